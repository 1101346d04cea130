/**
 * The state that is checkpointed in all measurements: of several typed fields,
 * and about 200 bytes long once it is encoded.
 */
import { Effect, Schema } from "effect"
import { Checkpoint, Work } from "worklease"

export const State = Checkpoint.make(Schema.Struct({
  file: Schema.String,
  phase: Schema.Literals(["reading", "writing"]),
  line: Schema.Int,
  offset: Schema.Int,
  imported: Schema.Int,
  failed: Schema.Array(Schema.Int),
  resumable: Schema.Boolean,
  note: Schema.NullOr(Schema.String)
}))

export const Import = Work.make("import", State)

/** Different each time, and always of the same length. */
export const stateOf = (step: number) => ({
  file: "imports/2026/11/customers.csv",
  phase: "writing" as const,
  line: 100_000_000 + step,
  offset: 1_000_000_000 + step * 7,
  imported: 100_000_000 + step,
  failed: [1017, 20_482, 300_771],
  resumable: true,
  note: "continue after the last line"
})

/** As it is stored. */
export const encoded = (step: number) =>
  Effect.map(Effect.orDie(State.encode("import:0", stateOf(step))), ({ bytes }) => bytes)
