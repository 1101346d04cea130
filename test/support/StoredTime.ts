/** What the contract suite may do to leases in a database of its own: move time, raise tokens, lock rows. */
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as SqlClient from "effect/sql/SqlClient"

const micros = (duration: Duration.Duration): bigint => BigInt(Math.round(Duration.toMillis(duration) * 1000))

const execute = (statement: string, parameters: ReadonlyArray<unknown> = []) =>
  Effect.flatMap(SqlClient.SqlClient, (sql) => sql.unsafe(statement, parameters))

/** Moves what is stored into the past: to it, the server's clock has moved on. */
export const shift = (duration: Duration.Duration) =>
  execute(
    `UPDATE worklease SET
  acquired_at = acquired_at - $1::bigint * interval '1 microsecond',
  expires_at = expires_at - $1::bigint * interval '1 microsecond',
  yield_deadline = yield_deadline - $1::bigint * interval '1 microsecond'`,
    [micros(duration)]
  )

/**
 * Gives the database a clock that stands still until it is set: PostgreSQL
 * finds a function where the search path looks first. Sessions that begin
 * later, and this one, have it.
 */
export const installStandingClock = Effect.forEach(
  [
    `CREATE SCHEMA standing`,
    // A sequence, because it is set at once, whatever transaction somebody is in.
    `CREATE SEQUENCE standing.microseconds START 1600000000123456`,
    `CREATE FUNCTION standing.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
  SELECT timestamptz 'epoch' + (SELECT last_value FROM standing.microseconds) * interval '1 microsecond'
$$`,
    `CREATE FUNCTION standing.statement_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $$
  SELECT standing.clock_timestamp()
$$`,
    `DO $$ BEGIN
  EXECUTE format('ALTER DATABASE %I SET search_path = standing, pg_catalog, public', current_database());
END $$`,
    `SET search_path = standing, pg_catalog, public`
  ],
  (statement) => execute(statement),
  { discard: true }
)

const moveClock = (micros: bigint) =>
  execute(`SELECT setval('standing.microseconds', (SELECT last_value FROM standing.microseconds) + $1::bigint)`, [
    micros
  ])

export const advance = (duration: Duration.Duration) => moveClock(micros(duration))

export const setBack = (duration: Duration.Duration) => moveClock(-micros(duration))

export const raiseToken = (workId: string, fencingToken: bigint) =>
  execute(`UPDATE worklease SET fencing_token = $2::bigint WHERE work_id = $1::text`, [workId, fencingToken])

/** Locks a row in a transaction that stays open with the scope. Needs a second connection. */
export const lock = Effect.fnUntraced(function*(workId: string) {
  const sql = yield* SqlClient.SqlClient
  const locked = yield* Deferred.make<void>()
  yield* sql.unsafe(`SELECT FROM worklease WHERE work_id = $1::text FOR UPDATE`, [workId]).pipe(
    Effect.andThen(Deferred.succeed(locked, void 0)),
    Effect.andThen(Effect.never),
    sql.withTransaction,
    Effect.forkScoped
  )
  yield* Deferred.await(locked)
})
