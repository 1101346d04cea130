/** What the tests of fenced transactions have in common. */
import { Context, Duration, Effect, Layer, Schema, Scope } from "effect"
import { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import { type Backend, Checkpoint, type Fence, Lease, Work } from "worklease"
import * as Pglite from "worklease/layers/Pglite"
import { freshDatabase } from "./Postgres.ts"
import * as Sessions from "./Sessions.ts"

export const Import = Work.make("import", Checkpoint.make(Schema.Struct({ line: Schema.Int })))

export type Process = Context.Context<Lease.Leases | Backend.Backend | Fence.Fence | SqlClient.SqlClient>

/** A database with a table of the user's own, and processes that use it. */
export interface World {
  /** The leases of one process: two of these are two processes. */
  readonly process: (options?: Sessions.ProcessOptions) => Effect.Effect<Process, unknown, Scope.Scope>
  /** A look at what is committed. */
  readonly sql: SqlClient.SqlClient
}

const table = "CREATE TABLE written (number integer NOT NULL, line integer NOT NULL)"

export const postgres = (
  options?: { readonly serializable?: boolean | undefined }
): Effect.Effect<World & { readonly url: string }, unknown, Scope.Scope> =>
  Effect.gen(function*() {
    const { url } = yield* freshDatabase(options)
    const sql = yield* Sessions.session(url)
    yield* sql.unsafe(table)
    return { url, sql, process: (options) => Layer.build(Sessions.process(url, options)) }
  })

let database: Context.Context<SqlClient.SqlClient | Backend.Backend | Fence.Fence> | undefined

/** All processes share its one session, and all tests of a file share it: to open one takes long. */
export const pglite: Effect.Effect<World, unknown, Scope.Scope> = Effect.gen(function*() {
  const open = database ?? (yield* Layer.buildWithScope(Layer.fresh(Pglite.layer), Scope.makeUnsafe()))
  database = open
  const sql = Context.get(open, SqlClient.SqlClient)
  yield* sql.unsafe("DROP TABLE IF EXISTS written")
  yield* sql.unsafe(table)
  yield* sql.unsafe("DELETE FROM worklease")
  return {
    sql,
    process: (options) =>
      Effect.map(
        Layer.build(Layer.fresh(Layer.provide(Lease.layerWith(options ?? {}), Layer.succeedContext(open)))),
        (leases) => Context.merge(open, leases)
      )
  }
})

/** A write of the user's own. */
export const write = (line: number, number = 1): Effect.Effect<void, SqlError, SqlClient.SqlClient> =>
  Effect.flatMap(SqlClient.SqlClient, (sql) => sql`INSERT INTO written VALUES (${number}, ${line})`)

/** The lines that have been written and committed. */
export const written = (sql: SqlClient.SqlClient): Effect.Effect<ReadonlyArray<number>, SqlError> =>
  Effect.map(
    sql.unsafe<{ readonly line: number }>("SELECT line FROM written ORDER BY line"),
    (rows) => rows.map(({ line }) => line)
  )

/** The line that the last committed checkpoint tells of, if there is one. */
export const checkpointed = (sql: SqlClient.SqlClient, key = "a"): Effect.Effect<number | undefined, SqlError> =>
  Effect.map(
    sql.unsafe<{ readonly state: Uint8Array | null }>("SELECT state FROM worklease WHERE work_id = $1", [
      `import:${key}`
    ]),
    ([row]) => row?.state == null ? undefined : JSON.parse(new TextDecoder().decode(row.state)).line
  )

export const windowOf = (lease: Lease.Any) => Effect.map(lease.window, Duration.toMillis)

/** What is left at least of a window of so many milliseconds, counted from a statement that was sent no sooner than `time`. */
export const windowSince = (window: number, time: number): number => window - (performance.now() - time) - 20
