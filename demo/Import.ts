/**
 * What the worker processes and the process that starts them both know: the
 * kind of work, the table, and what a worker reports.
 */
import { Effect, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { Checkpoint, Work } from "worklease"

/** The work IDs are `import:0` to `import:7`. A checkpoint holds the first record that is not yet in the table. */
export const Import = Work.make("import", Checkpoint.make(Schema.Struct({ next: Schema.Int })))

export const workId = (part: number) => Import.id(String(part))

/** Short, so that a takeover does not keep the audience waiting. */
export const ttl = "2 seconds"

/**
 * Nothing in the table keeps a record from being in it twice: only the fence
 * does. `written` tells in which order the rows came, and `token` under which
 * fencing token.
 */
export const createTable = Effect.flatMap(SqlClient.SqlClient, (sql) =>
  sql`CREATE TABLE city (
    written bigint GENERATED ALWAYS AS IDENTITY,
    token bigint NOT NULL,
    part integer NOT NULL,
    record integer NOT NULL,
    id integer NOT NULL,
    name text NOT NULL,
    alternative text NOT NULL,
    country text NOT NULL,
    feature text NOT NULL,
    admin text NOT NULL,
    municipality text,
    district text,
    population integer NOT NULL,
    longitude double precision NOT NULL,
    latitude double precision NOT NULL
  )`)

/** How a worker process is started: its one argument, as JSON. */
export const Settings = Schema.fromJsonString(Schema.Struct({
  holderId: Schema.String,
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
  /** A transaction has committed: everything before `next` is in the table. */
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
