/**
 * What the members of the pool and the process that starts them both know: the
 * kind of work, and what a member reports.
 */
import { Schema } from "effect"
import { Checkpoint, Work } from "worklease"
import * as Store from "../Store.ts"

/** The work IDs are `partition:00`, `partition:01` and so on. A checkpoint holds how far the partition is processed. */
export const Partition = Work.make("partition", Checkpoint.make(Schema.Struct({ offset: Schema.Int })))

export const keysOf = (count: number): ReadonlyArray<string> =>
  Array.from({ length: count }, (_, index) => String(index).padStart(String(count - 1).length, "0"))

/** Short, so that a takeover does not keep the audience waiting, and long enough for a process to start in. */
export const ttl = 5000

/** How a member is started: its one argument, as JSON. */
export const Settings = Schema.fromJsonString(Schema.Struct({
  holderId: Schema.String,
  /** Its stable identity, if it has one. */
  memberId: Schema.optionalKey(Schema.String),
  backend: Store.Kind,
  url: Schema.String,
  keys: Schema.Int
}))

/** An execution of a partition. `at` is in milliseconds since the epoch, by the clock of the machine. */
const execution = { key: Schema.String, token: Schema.BigInt, at: Schema.Int }

/** What a member says, one JSON line each. */
export const Report = Schema.Union([
  /** It is there, and joins. */
  Schema.TaggedStruct("Started", { at: Schema.Int }),
  /** An execution begins, at the offset that is stored. */
  Schema.TaggedStruct("Began", { ...execution, offset: Schema.Int, exit: Schema.String }),
  /** It is asked to hand over. */
  Schema.TaggedStruct("Asked", execution),
  /** A checkpoint is stored. */
  Schema.TaggedStruct("Advanced", { ...execution, offset: Schema.Int }),
  /** The execution has ended. The lease is released after that. */
  Schema.TaggedStruct("Ended", execution),
  /** The statements that it has sent so far: those that look how all stand, and all. */
  Schema.TaggedStruct("Counted", { looks: Schema.Int, statements: Schema.Int }),
  /** It has shut down in good order. */
  Schema.TaggedStruct("Left", { at: Schema.Int })
])

export type Report = typeof Report.Type

export const ReportLine = Schema.fromJsonString(Schema.toCodecJson(Report))
