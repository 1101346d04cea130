/**
 * The database as it is measured: our leases in it, and the bare table that
 * the compared statements work on.
 */
import { PgClient } from "@effect/sql-pg"
import { Data, Effect, Layer, Redacted } from "effect"
import { SqlClient } from "effect/sql"
import { type Backend, Lease } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import * as EmbeddedPostgres from "../support/EmbeddedPostgres.ts"

/** The connections of every pool, and of pgbench. */
export const connections = 10

export const client = (url: string) => PgClient.layer({ url: Redacted.make(url), maxConnections: connections })

/** Whether waiting acquires are woken up is the one option of the backend that is measured. */
export type StorageOptions = Postgres.Options & { readonly wakeups?: boolean }

export const storage = (options: StorageOptions = {}) => Postgres.layerWith(options)

/** The client, with every statement that leaves it told. */
export const toldClient = (url: string, onStatement: () => void) =>
  Layer.effect(
    SqlClient.SqlClient,
    Effect.map(SqlClient.SqlClient, (client) => {
      const told = (sql: SqlClient.SqlClient): SqlClient.SqlClient =>
        new Proxy(sql, {
          get: (sql, property) => {
            const value = Reflect.get(sql, property)
            if (property === "withoutTransforms") return () => told(sql.withoutTransforms())
            if (property !== "unsafe") return value
            return (...parameters: Parameters<typeof sql.unsafe>) => {
              onStatement()
              return sql.unsafe(...parameters)
            }
          }
        })
      return told(client)
    })
  ).pipe(Layer.provide(client(url)))

/** Leases, their backend and its client, over a pool of their own. */
export const leases = (url: string, options: Lease.LayerOptions & StorageOptions = {}) => {
  const { schema, table, wakeups, ...policy } = options
  return Lease.layerWith(policy).pipe(
    Layer.provideMerge(storage({
      ...(schema === undefined ? {} : { schema }),
      ...(table === undefined ? {} : { table }),
      ...(wakeups === undefined ? {} : { wakeups })
    })),
    Layer.provideMerge(client(url))
  )
}

/** Whether a backend can wake up those who wait. */
export const hasWakeups = (backend: Backend.Backend["Service"]): boolean => backend.wakeups._tag === "Some"

// -----------------------------------------------------------------------------
// the compared statements
// -----------------------------------------------------------------------------

/** A table like ours in everything: made by the same migrations. */
const table = "bare"

const term = { holderId: "bench", token: 1n }

/** Makes the table, with so many rows that are held. */
export const makeBare = (rows: number, state: Uint8Array) =>
  Effect.gen(function*() {
    yield* Layer.build(Postgres.layerMigrations({ table }))
    const sql = yield* SqlClient.SqlClient
    yield* sql.unsafe(
      `INSERT INTO ${table} (work_id, holder_id, fencing_token, attempt, acquired_at, expires_at, state_version, state)
      SELECT '${table}:' || i, $1::text, $2::bigint, gen_random_uuid()::text, now(), now() + interval '30 seconds', 1, $3::bytea
      FROM generate_series(1, $4::integer) i`,
      [term.holderId, term.token, state, rows]
    )
    yield* sql.unsafe(`VACUUM ANALYZE ${table}`)
  })

export const workId = (row: number): string => `${table}:${row}`

/** What a checkpoint of one lease needs: the same predicates and columns, in one statement for one row. */
const checkpointText = (workId: string, holderId: string, token: string, ttl: string, state: string): string =>
  `UPDATE ${table} SET expires_at = clock_timestamp() + ${ttl} * interval '1 microsecond', sequence = sequence + 1,
  state_version = 1, state = ${state}
WHERE work_id = ${workId} AND holder_id = ${holderId} AND fencing_token = ${token} AND exit IS NULL`

const checkpointStatement = checkpointText("$1::text", "$2::text", "$3::bigint", "$4::bigint", "$5::bytea")

export const bareCheckpoint = (sql: SqlClient.SqlClient, row: number, state: Uint8Array) =>
  sql.unsafe(checkpointStatement, [workId(row), term.holderId, term.token, 30_000_000n, state])

class NothingDone extends Data.TaggedError("NothingDone")<{ readonly message: string }> {}

/**
 * Makes sure that what is compared with has done what it was measured for: so
 * many of these updates, at least, have found their row.
 */
export const bareCheckpointsOf = <E, R>(
  sql: SqlClient.SqlClient,
  atLeast: (result: number) => number,
  measure: Effect.Effect<number, E, R>
) =>
  Effect.gen(function*() {
    const before = yield* bareCheckpoints(sql)
    const result = yield* measure
    const updates = (yield* bareCheckpoints(sql)) - before
    if (updates >= atLeast(result)) return result
    return yield* new NothingDone({
      message: `Of ${atLeast(result)} compared statements or more, ${updates} did anything`
    })
  })

const bareCheckpoints = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql.unsafe<{ readonly updates: number }>(`SELECT sum(sequence)::double precision AS updates FROM ${table}`),
    ([{ updates }]) => updates
  )

/** The same for pgbench: a random row of its own for each client, so that none waits for another's lock. */
export const pgbenchScript = (rows: number): string =>
  `\\set row :client_id + 1 + ${connections} * random(0, ${Math.max(0, Math.floor(rows / connections) - 1)})
${
    checkpointText(
      `'${table}:' || :row::text`,
      ":holder::text",
      ":token::bigint",
      ":ttl::bigint",
      "convert_to(:state, 'UTF8')"
    ).replaceAll("\n", " ")
  };
`

export const pgbenchVariables = (state: Uint8Array): Readonly<Record<string, string>> => ({
  holder: term.holderId,
  token: String(term.token),
  ttl: "30000000",
  state: new TextDecoder().decode(state)
})

const takeColumns =
  `holder_id = $2::text, fencing_token = greatest(b.fencing_token + 1, $3::bigint), attempt = $4::text,
  acquired_at = clock_timestamp(), expires_at = clock_timestamp() + interval '30 seconds', exit = NULL, sequence = 0,
  prior_exit = b.exit, prior_holder_id = b.holder_id, prior_fencing_token = b.fencing_token, prior_attempt = b.attempt`

const isFree = "(b.exit IS NOT NULL OR b.expires_at <= clock_timestamp())"

const takeStatement = `UPDATE ${table} b SET ${takeColumns}
WHERE b.work_id = $1::text AND ${isFree} RETURNING fencing_token`

const takeNewStatement =
  `INSERT INTO ${table} AS b (work_id, holder_id, fencing_token, attempt, acquired_at, expires_at)
VALUES ($1::text, $2::text, $3::bigint, $4::text, clock_timestamp(), clock_timestamp() + interval '30 seconds')
ON CONFLICT (work_id) DO UPDATE SET ${takeColumns} WHERE ${isFree} RETURNING fencing_token`

const releaseStatement = `UPDATE ${table} SET exit = 'finished', expires_at = clock_timestamp()
WHERE work_id = $1::text AND holder_id = $2::text AND fencing_token = $3::bigint AND exit IS NULL`

const take = (sql: SqlClient.SqlClient, statement: string, workId: string) =>
  sql.unsafe<{ readonly fencing_token: bigint }>(statement, [
    workId,
    term.holderId,
    BigInt(Date.now()) * 1000n,
    crypto.randomUUID()
  ])

/** Takes a row that exists, and is free. */
export const bareTake = (sql: SqlClient.SqlClient, row: number) =>
  Effect.filterOrFail(
    take(sql, takeStatement, workId(row)),
    (rows) => rows.length === 1,
    () => new NothingDone({ message: `The compared statement did not take row ${row}` })
  )

/** Takes and releases, in two statements: what a client does that has no batches. */
export const bareCycle = (sql: SqlClient.SqlClient, row: number, isNew: boolean) =>
  Effect.flatMap(
    take(sql, isNew ? takeNewStatement : takeStatement, workId(row)),
    ([{ fencing_token }]) => sql.unsafe(releaseStatement, [workId(row), term.holderId, fencing_token])
  )

export const bareRelease = (sql: SqlClient.SqlClient) => sql.unsafe(`UPDATE ${table} SET exit = 'finished'`)

// -----------------------------------------------------------------------------
// what the server counts
// -----------------------------------------------------------------------------

export interface Statistics {
  readonly inserted: number
  readonly deleted: number
  readonly updated: number
  readonly heapOnly: number
  readonly tableBytes: number
  readonly indexBytes: number
}

/**
 * What was written to the table of leases, and its size. A connection says what
 * it has done when it ends, at the latest: close the pools before.
 */
export const statistics = Effect.fnUntraced(function*(url: string): Effect.fn.Return<
  Statistics,
  EmbeddedPostgres.EmbeddedPostgresError
> {
  yield* allDisconnected(url)
  const [row] = yield* EmbeddedPostgres.execute(
    url,
    `SELECT n_tup_ins AS inserted, n_tup_del AS deleted, n_tup_upd AS updated, n_tup_hot_upd AS heap_only,
      pg_table_size(relid) AS table_bytes, pg_indexes_size(relid) AS index_bytes
    FROM pg_stat_user_tables WHERE relname = 'worklease'`
  )
  return {
    inserted: Number(row.inserted),
    deleted: Number(row.deleted),
    updated: Number(row.updated),
    heapOnly: Number(row.heap_only),
    tableBytes: Number(row.table_bytes),
    indexBytes: Number(row.index_bytes)
  }
})

/** A backend ends a moment after its client has closed the connection. */
const allDisconnected = Effect.fnUntraced(function*(url: string): Effect.fn.Return<
  void,
  EmbeddedPostgres.EmbeddedPostgresError
> {
  const deadline = performance.now() + 10_000
  while (performance.now() < deadline) {
    const others = yield* EmbeddedPostgres.execute(
      url,
      `SELECT pid FROM pg_stat_activity
      WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()`
    )
    if (others.length === 0) return
    yield* Effect.sleep(20)
  }
})
