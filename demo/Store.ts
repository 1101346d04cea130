/**
 * Where the leases and the records are: in PostgreSQL, where rows and
 * checkpoint commit together, or in Redis, where a fenced write appends rows
 * only at their own place, so that one that is repeated changes nothing.
 */
import * as NodeRedis from "@effect/platform-node/NodeRedis"
import { PgClient } from "@effect/sql-pg"
import { Array as Arr, Context, Effect, Layer, Redacted, Schema, type Scope } from "effect"
import { Redis as RedisClient } from "effect/persistence"
import { SqlClient, type SqlError } from "effect/sql"
import { type Backend, Fence, type Lease, type LeaseError } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import * as Redis from "worklease/layers/Redis"
import * as EmbeddedPostgres from "../support/EmbeddedPostgres.ts"
import * as RedisServer from "../support/RedisServer.ts"
import type { City } from "./Cities.ts"

export const Kind = Schema.Literals(["postgres", "redis"])

export type Kind = typeof Kind.Type

export interface Row extends City {
  readonly token: bigint
  readonly part: number
  readonly record: number
}

export interface Write {
  readonly work: Lease.Lease<{ readonly next: number }>
  readonly rows: Arr.NonEmptyReadonlyArray<Row>
  /** The first record that is not written once the rows are. */
  readonly next: number
  /** Comes between the last look at the lease and the write. */
  readonly before: Effect.Effect<void>
  readonly fence: boolean
}

export class Records extends Context.Service<Records, {
  /** Writes rows, and a checkpoint that says so. */
  readonly write: (write: Write) => Effect.Effect<
    void,
    SqlError.SqlError | RedisClient.RedisError | Effect.Error<ReturnType<Write["work"]["checkpoint"]>> | Refused
  >
  /** What is there of a part, in the order in which it was written. */
  readonly read: (part: number) => Effect.Effect<ReadonlyArray<Row>, SqlError.SqlError | RedisClient.RedisError>
}>()("worklease/demo/Records") {}

type Refused = LeaseError.BackendError | LeaseError.InvalidConfig | LeaseError.LeaseLost

/** A server for as long as the scope is open: its URL, and what it is called. */
export const start = (kind: Kind): Effect.Effect<
  { readonly url: string; readonly name: string },
  EmbeddedPostgres.EmbeddedPostgresError | RedisServer.RedisServerError,
  Scope.Scope
> =>
  kind === "postgres"
    ? Effect.map(EmbeddedPostgres.start(), ({ url, version }) => ({ url, name: `PostgreSQL ${version}` }))
    : Effect.map(RedisServer.start(), ({ url }) => ({ url, name: "Redis" }))

export const layer = (kind: Kind, url: string): Layer.Layer<
  Backend.Backend | Records,
  LeaseError.BackendError | LeaseError.InvalidConfig | SqlError.SqlError | RedisClient.RedisError
> =>
  kind === "postgres"
    ? inPostgres.pipe(
      Layer.provideMerge(Postgres.layer),
      Layer.provide(PgClient.layer({ url: Redacted.make(url), maxConnections: 10 }))
    )
    : inRedis.pipe(
      Layer.provideMerge(Redis.layer),
      Layer.provide(NodeRedis.layer({ url, disableOfflineQueue: true }))
    )

// -----------------------------------------------------------------------------
// PostgreSQL
// -----------------------------------------------------------------------------

/**
 * Nothing in the table keeps a record from being in it twice: only the fence
 * does. `written` tells in which order the rows came, and `token` under which
 * fencing token.
 */
const createTable = Effect.flatMap(SqlClient.SqlClient, (sql) =>
  sql`CREATE TABLE IF NOT EXISTS city (
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

/** Creates the table once, in the process that starts the others. */
export const prepare = (kind: Kind, url: string): Effect.Effect<void, SqlError.SqlError> =>
  kind === "redis"
    ? Effect.void
    : Effect.provide(Effect.asVoid(createTable), PgClient.layer({ url: Redacted.make(url), maxConnections: 1 }))

const inPostgres = Layer.effect(
  Records,
  Effect.gen(function*() {
    const sql = yield* SqlClient.SqlClient
    const fenced = yield* Fence.Fence
    return Records.of({
      write: ({ before, fence, next, rows, work }) => {
        const insert = Effect.andThen(before, sql`INSERT INTO city ${sql.insert(Arr.map(rows, (row) => ({ ...row })))}`)
        const checkpoint = work.checkpoint({ next })
        return fence
          ? Fence.transaction(Effect.andThen(insert, checkpoint), work).pipe(
            Effect.provideService(Fence.Fence, fenced)
          )
          // What a lease is worth alone: one that ends after it was looked at does not hold back the write.
          : Effect.andThen(Effect.uninterruptible(insert), checkpoint)
      },
      read: (part) => sql<Row>`SELECT * FROM city WHERE part = ${part} ORDER BY written`
    })
  })
)

// -----------------------------------------------------------------------------
// Redis
// -----------------------------------------------------------------------------

/** A list for each part. A city that has been written is not written again: its place is taken. */
const append = `if redis.call('LLEN', KEYS[1]) ~= tonumber(ARGV[1]) then return 0 end
for i = 2, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[i]) end
return 1`

const keyOf = (part: number) => `city:${Redis.hashTag(`import:${part}`)}`

const inRedis = Layer.effect(
  Records,
  Effect.gen(function*() {
    const redis = yield* RedisClient.Redis
    const writes = yield* Redis.FencedWrites
    return Records.of({
      write: ({ before, fence, next, rows, work }) => {
        const key = keyOf(rows[0].part)
        const values = rows.map((row) => JSON.stringify({ ...row, token: String(row.token) }))
        const write: Effect.Effect<unknown, Refused | RedisClient.RedisError> = fence
          ? writes.eval(work.token, { lua: append, keys: [key], args: [String(rows[0].record), ...values] }).pipe(
            // The renewals find it out too, and end this work.
            Effect.catchTag(["Fenced", "LeaseExpired"], () => work.lost)
          )
          : Effect.uninterruptible(redis.send("RPUSH", key, ...values))
        return Effect.andThen(Effect.andThen(before, write), work.checkpoint({ next }))
      },
      read: (part) =>
        Effect.map(
          redis.send<ReadonlyArray<string>>("LRANGE", keyOf(part), "0", "-1"),
          (values) =>
            values.map((value) => {
              const row = JSON.parse(value)
              return { ...row, token: BigInt(row.token) } as Row
            })
        )
    })
  })
)
