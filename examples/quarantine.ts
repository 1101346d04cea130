/**
 * Quarantine: work that ends again and again without a new checkpoint is not
 * taken any more, until an operator has mended it and lets it go.
 *
 * Runs on the memory backend.
 *
 *     node examples/quarantine.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Data, Effect, Layer, Option, Schema } from "effect"
import assert from "node:assert/strict"
import { Checkpoint, Lease, Work, Worker } from "worklease"
import * as Memory from "worklease/layers/Memory"

class Unreadable extends Data.TaggedError("Unreadable")<{ readonly line: number }> {}

const Import = Work.make("import", Checkpoint.make(Schema.Struct({ line: Schema.Int })))

/** Two lines that are well, and one that no retry will mend. */
const file = ["a,1", "b,2", "c;3"]

const importFile = Worker.run(
  Import.id("prices.csv"),
  Effect.fnUntraced(function*(work) {
    const start = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.line })
    yield* Console.log(`   begins at line ${start}; terms in vain so far: ${work.prior.termsWithoutProgress}`)
    for (let line = start; line < file.length; line++) {
      if (!file[line].includes(",")) return yield* new Unreadable({ line })
      yield* work.checkpoint({ line: line + 1 })
    }
    return "imported"
  }),
  { quarantineAfter: 3 }
)

const main = Effect.gen(function*() {
  // The first run has made progress, so it does not count. The next three get nowhere.
  yield* Console.log("Line 2 of a file is malformed, so each run fails there; only the first one gets any further:")
  for (let run = 0; run < 4; run++) {
    assert.equal((yield* Effect.flip(importFile))._tag, "Unreadable")
  }
  const refused = yield* Effect.flip(importFile)
  assert(refused._tag === "Quarantined")
  assert.equal(refused.termsWithoutProgress, 3)
  yield* Console.log(`The next one does not begin:\n   ${refused.message}`)

  // An operator mends the line, and lets the work go. It continues from its last checkpoint.
  yield* Console.log("The line is mended, and an operator lets the work go:")
  file[2] = "c,3"
  assert.equal(yield* Lease.lift(Import.id("prices.csv")), true)
  const result = yield* importFile
  assert.equal(result, "imported")
  yield* Console.log(`   ${result}`)
})

NodeRuntime.runMain(main.pipe(Effect.provide(Lease.layer.pipe(Layer.provide(Memory.layer)))))
