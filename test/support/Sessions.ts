/**
 * What goes on in a test's database beside the leases: other sessions that read, lock and break things, and other
 * processes that hold leases.
 */
import * as PgClient from "@effect/sql-pg/PgClient"
import { assert } from "@effect/vitest"
import * as Clock from "effect/Clock"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Reactivity from "effect/reactivity/Reactivity"
import * as Redacted from "effect/Redacted"
import type * as Scope from "effect/Scope"
import type * as SqlClient from "effect/sql/SqlClient"
import type { SqlError } from "effect/sql/SqlError"
import type * as Backend from "worklease/Backend"
import type { Fence } from "worklease/Fence"
import * as Postgres from "worklease/layers/Postgres"
import * as Lease from "worklease/Lease"
import type { BackendError, InvalidConfig } from "worklease/LeaseError"

/** Real time, whatever the `Clock` is. */
export const pause = (millis: number): Effect.Effect<void> =>
  Effect.callback((resume) => {
    const timer = setTimeout(() => resume(Effect.void), millis)
    return Effect.sync(() => clearTimeout(timer))
  })

/** Waits until a condition holds, and fails the test if it does not within the time. */
export const eventually = Effect.fnUntraced(function*<E, R>(
  what: string,
  condition: Effect.Effect<boolean, E, R>,
  millis = 20_000
): Effect.fn.Return<void, E, R> {
  const deadline = performance.now() + millis
  while (!(yield* condition)) {
    if (performance.now() > deadline) assert.fail(`Not within ${millis} ms: ${what}`)
    yield* pause(10)
  }
})

/**
 * Tells when what meets by chance has had its time: 3 seconds, and up to 20 on a slow machine, until enough has met.
 */
export const isOverOnce = (isEnough: () => boolean): () => boolean => {
  const start = performance.now()
  return () => performance.now() - start > (isEnough() ? 3_000 : 20_000)
}

/** One connection of its own, for as long as the scope is open. */
export const session = (url: string): Effect.Effect<SqlClient.SqlClient, SqlError, Scope.Scope> =>
  Effect.provide(PgClient.makeClient({ url: Redacted.make(url), applicationName: "test" }), Reactivity.layer)

/** Locks the row of a work ID as another transaction would, until it is unlocked or the scope closes. */
export const lockRow = Effect.fnUntraced(function*(
  url: string,
  workId: string,
  strength: "UPDATE" | "NO KEY UPDATE" | "SHARE" | "KEY SHARE" = "UPDATE"
): Effect.fn.Return<{ readonly unlock: Effect.Effect<void, SqlError> }, SqlError, Scope.Scope> {
  const sql = yield* session(url)
  yield* sql.unsafe("BEGIN")
  const rows = yield* sql.unsafe(`SELECT FROM worklease WHERE work_id = $1 FOR ${strength}`, [workId])
  assert.lengthOf(rows, 1)
  return { unlock: Effect.asVoid(sql.unsafe("ROLLBACK")) }
})

export interface ProcessOptions extends Lease.LayerOptions, Postgres.Options, Pick<PgClient.PgPoolConfig, "multiplex"> {
  /** The size of its pool. Defaults to 10. */
  readonly maxConnections?: number | undefined
  readonly applicationName?: string | undefined
}

/** The leases of one process, over a pool of its own: two of these are two processes. */
export const process = (
  url: string,
  options?: ProcessOptions | undefined
): Layer.Layer<
  Lease.Leases | Backend.Backend | Fence | PgClient.PgClient | SqlClient.SqlClient,
  BackendError | InvalidConfig | SqlError
> =>
  Lease.layerWith(options ?? {}).pipe(
    Layer.provideMerge(Postgres.layerWith(options ?? {})),
    Layer.provideMerge(PgClient.layer({
      url: Redacted.make(url),
      maxConnections: options?.maxConnections ?? 10,
      multiplex: options?.multiplex,
      applicationName: options?.applicationName
    })),
    // Several may be built in one scope.
    Layer.fresh
  )

/** Keeps a record of every change of a row, so that a test sees what really took effect. */
export const auditRows = (sql: SqlClient.SqlClient): Effect.Effect<void, SqlError> =>
  Effect.forEach([
    `CREATE TABLE audit (at timestamptz DEFAULT clock_timestamp(), number bigint GENERATED ALWAYS AS IDENTITY,
      work_id text, operation text, token bigint, exit text, sequence bigint, before timestamptz, after timestamptz)`,
    `CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
      INSERT INTO audit (work_id, operation, token, exit, sequence, before, after)
      VALUES (NEW.work_id, TG_OP, NEW.fencing_token, NEW.exit, NEW.sequence,
        CASE WHEN TG_OP = 'UPDATE' THEN OLD.expires_at END, NEW.expires_at);
      RETURN NULL;
    END $$`,
    `CREATE TRIGGER audit AFTER INSERT OR UPDATE ON worklease FOR EACH ROW EXECUTE FUNCTION audit()`
  ], (statement) =>
    sql.unsafe(statement), { discard: true })

/** A process whose wall clock is off by so many milliseconds, as they are at the time. */
export const skewed = (millis: () => number) => <A, E, R>(effect: Effect.Effect<A, E, R>): Effect.Effect<A, E, R> =>
  Effect.flatMap(Clock.Clock, (clock) => {
    const currentTimeMillisUnsafe = () => clock.currentTimeMillisUnsafe() + millis()
    const currentTimeNanosUnsafe = () => clock.currentTimeNanosUnsafe() + BigInt(millis()) * BigInt(1_000_000)
    return Effect.provideService(effect, Clock.Clock, {
      currentTimeMillisUnsafe,
      currentTimeMillis: Effect.sync(currentTimeMillisUnsafe),
      currentTimeNanosUnsafe,
      currentTimeNanos: Effect.sync(currentTimeNanosUnsafe),
      monotonicTimeNanosUnsafe: () => clock.monotonicTimeNanosUnsafe(),
      monotonicTimeNanos: clock.monotonicTimeNanos,
      sleep: (duration) => clock.sleep(duration)
    })
  })
