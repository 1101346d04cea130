/**
 * What the worker processes and the process that starts them both know: the
 * kind of work, and what a worker reports.
 */
import { Schema } from "effect"
import { Checkpoint, Work } from "worklease"
import * as Store from "./Store.ts"

/** The work IDs are `import:0` to `import:7`. A checkpoint holds the first record that is not yet written. */
export const Import = Work.make("import", Checkpoint.make(Schema.Struct({ next: Schema.Int })))

export const workId = (part: number) => Import.id(String(part))

/** Short, so that a takeover does not keep the audience waiting. */
export const ttl = "2 seconds"

/** How a worker process is started: its one argument, as JSON. */
export const Settings = Schema.fromJsonString(Schema.Struct({
  holderId: Schema.String,
  backend: Store.Kind,
  url: Schema.String,
  records: Schema.optionalKey(Schema.Int),
  fence: Schema.Boolean
}))

const term = { part: Schema.Int, token: Schema.BigInt }

/** What a worker process says, one JSON line each. */
export const Report = Schema.Union([
  /** It has a lease, and continues at `next`. */
  Schema.TaggedStruct("Acquired", {
    ...term,
    next: Schema.Int,
    prior: Schema.Struct({ exit: Schema.String, holderId: Schema.NullOr(Schema.String) })
  }),
  /** A transaction has committed: everything before `next` is there. */
  Schema.TaggedStruct("Wrote", { ...term, next: Schema.Int }),
  Schema.TaggedStruct("Finished", term),
  /** The lease is lost, and its work has stopped. */
  Schema.TaggedStruct("Lost", { ...term, why: Schema.String }),
  /** The work has failed. It will be tried again. */
  Schema.TaggedStruct("Failed", { part: Schema.Int, why: Schema.String }),
  /** It stops itself with SIGSTOP now, as it was asked to, in a write to this part. */
  Schema.TaggedStruct("Stopping", { part: Schema.Int })
])

export type Report = typeof Report.Type

export const ReportLine = Schema.fromJsonString(Schema.toCodecJson(Report))
