/**
 * What is executed by whom, kept by the store itself: an execution that begins
 * while another one of the same key goes on is an overlap, in the order in
 * which the store sees them, and by no clock but its own.
 */
import { PgClient } from "@effect/sql-pg"
import { Context, Effect, Layer, Redacted } from "effect"
import { Redis as RedisClient } from "effect/persistence"
import { SqlClient } from "effect/sql"
import type * as Backend from "worklease/Backend"
import * as Postgres from "worklease/layers/Postgres"
import * as Redis from "worklease/layers/Redis"
import { clientOf } from "./Redis.ts"

export interface Execution {
  readonly key: string
  /** Who executes it, if anybody does. */
  readonly holderId: string | undefined
  readonly executions: number
  readonly overlaps: number
  /** The milliseconds between one execution and the next: from the death of one that was killed. */
  readonly gaps: ReadonlyArray<number>
}

export class Executions extends Context.Service<Executions, {
  readonly begin: (key: string, token: bigint, holderId: string) => Effect.Effect<void>
  readonly end: (key: string, token: bigint) => Effect.Effect<void>
  /** From now on, what this process has begun does not go on. */
  readonly died: (holderId: string) => Effect.Effect<void>
  readonly all: Effect.Effect<ReadonlyArray<Execution>>
  /** How many are executed by whom. */
  readonly loads: Effect.Effect<ReadonlyMap<string, number>>
}>()("worklease/test/Executions") {}

/** A store, of which the backend is a part. */
export const layer = (url: string): Layer.Layer<Executions | Backend.Backend, unknown> =>
  url.startsWith("redis")
    ? inRedis.pipe(Layer.provideMerge(Redis.layer), Layer.provide(clientOf(url)))
    : inPostgres.pipe(
      Layer.provideMerge(Postgres.layer),
      Layer.provide(PgClient.layer({ url: Redacted.make(url), maxConnections: 5 }))
    )

// -----------------------------------------------------------------------------
// PostgreSQL
// -----------------------------------------------------------------------------

/** Once for each database. */
export const prepare = Effect.gen(function*() {
  const sql = yield* SqlClient.SqlClient
  yield* sql`CREATE TABLE execution (key text PRIMARY KEY, token bigint, holder_id text, ended_at timestamptz,
    executions integer NOT NULL DEFAULT 1, overlapping integer NOT NULL DEFAULT 0, gaps real[] NOT NULL DEFAULT '{}')`
  yield* sql`CREATE TABLE dead (holder_id text PRIMARY KEY, died_at timestamptz NOT NULL DEFAULT clock_timestamp())`
})

const inPostgres = Layer.effect(
  Executions,
  Effect.gen(function*() {
    const sql = yield* SqlClient.SqlClient
    return Executions.of({
      begin: (key, token, holderId) =>
        Effect.orDie(Effect.asVoid(
          sql`INSERT INTO execution AS e (key, token, holder_id) VALUES (${key}, ${token}, ${holderId})
            ON CONFLICT (key) DO UPDATE SET
              token = EXCLUDED.token,
              holder_id = EXCLUDED.holder_id,
              executions = e.executions + 1,
              overlapping = e.overlapping +
                (e.token IS NOT NULL AND NOT EXISTS (SELECT FROM dead WHERE holder_id = e.holder_id))::integer,
              gaps = e.gaps || (extract(epoch FROM clock_timestamp() -
                COALESCE((SELECT died_at FROM dead WHERE holder_id = e.holder_id AND e.token IS NOT NULL), e.ended_at)
              ) * 1000)::real`
        )),
      end: (key, token) =>
        Effect.orDie(Effect.asVoid(
          sql`UPDATE execution SET token = NULL, ended_at = clock_timestamp() WHERE key = ${key} AND token = ${token}`
        )),
      died: (holderId) => Effect.orDie(Effect.asVoid(sql`INSERT INTO dead (holder_id) VALUES (${holderId})`)),
      all: Effect.orDie(Effect.map(
        sql<
          Omit<Execution, "holderId"> & { readonly holder: string | null }
        >`SELECT key, executions, overlapping AS "overlaps", gaps, CASE WHEN token IS NULL
            OR EXISTS (SELECT FROM dead WHERE holder_id = execution.holder_id) THEN NULL ELSE holder_id END AS holder
          FROM execution ORDER BY key`,
        (rows) => rows.map(({ holder, ...row }) => ({ ...row, holderId: holder ?? undefined }))
      )),
      loads: Effect.orDie(Effect.map(
        sql<{ readonly holder: string; readonly load: number }>`SELECT holder_id AS holder, count(*)::integer AS load
          FROM execution WHERE token IS NOT NULL AND holder_id NOT IN (SELECT holder_id FROM dead) GROUP BY holder_id`,
        (rows) => new Map(rows.map(({ holder, load }) => [holder, load]))
      ))
    })
  })
)

// -----------------------------------------------------------------------------
// Redis
// -----------------------------------------------------------------------------

const now = `local time = redis.call('TIME')
local now = time[1] * 1000 + time[2] / 1000`

const begin = `${now}
local token, holder, ended = unpack(redis.call('HMGET', KEYS[1], 'token', 'holder', 'ended'))
local died = token and redis.call('HGET', 'dead', holder)
if token and not died then redis.call('HINCRBY', KEYS[1], 'overlaps', 1) end
if holder then redis.call('RPUSH', KEYS[1] .. ':gaps', now - (died or ended or now)) end
redis.call('HSET', KEYS[1], 'token', ARGV[1], 'holder', ARGV[2])
redis.call('HINCRBY', KEYS[1], 'executions', 1)
redis.call('SADD', 'executions', KEYS[1])`

const end = `${now}
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return end
redis.call('HDEL', KEYS[1], 'token')
redis.call('HSET', KEYS[1], 'ended', now)`

const died = `${now}
redis.call('HSET', 'dead', KEYS[1], now)`

const all = `local answer = {}
for _, key in ipairs(redis.call('SMEMBERS', 'executions')) do
  local token, holder, executions, overlaps =
    unpack(redis.call('HMGET', key, 'token', 'holder', 'executions', 'overlaps'))
  if not token or redis.call('HEXISTS', 'dead', holder) == 1 then holder = false end
  answer[#answer + 1] = {string.sub(key, 11), holder, executions, overlaps or '0', redis.call('LRANGE', key .. ':gaps', 0, -1)}
end
return answer`

const loads = `local loads = {}
for _, key in ipairs(redis.call('SMEMBERS', 'executions')) do
  local token, holder = unpack(redis.call('HMGET', key, 'token', 'holder'))
  if token then loads[holder] = (loads[holder] or 0) + 1 end
end
local answer = {}
for holder, load in pairs(loads) do
  if redis.call('HEXISTS', 'dead', holder) == 0 then answer[#answer + 1] = {holder, load} end
end
return answer`

const inRedis = Layer.effect(
  Executions,
  Effect.gen(function*() {
    const redis = yield* RedisClient.Redis
    const run = (lua: string, key: string, ...args: ReadonlyArray<string>) =>
      Effect.orDie(Effect.asVoid(redis.send("EVAL", lua, "1", key, ...args)))
    return Executions.of({
      begin: (key, token, holderId) => run(begin, `execution:${key}`, String(token), holderId),
      end: (key, token) => run(end, `execution:${key}`, String(token)),
      died: (holderId) => run(died, holderId),
      all: Effect.orDie(Effect.map(
        redis.send<ReadonlyArray<readonly [string, string | null, string, string, ReadonlyArray<string>]>>(
          "EVAL",
          all,
          "0"
        ),
        (rows) =>
          rows.map(([key, holderId, executions, overlaps, gaps]) => ({
            key,
            holderId: holderId ?? undefined,
            executions: Number(executions),
            overlaps: Number(overlaps),
            gaps: gaps.map(Number)
          })).sort((a, b) => a.key < b.key ? -1 : 1)
      )),
      loads: Effect.orDie(Effect.map(
        redis.send<ReadonlyArray<readonly [string, number]>>("EVAL", loads, "0"),
        (rows) => new Map(rows)
      ))
    })
  })
)
