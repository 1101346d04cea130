import { assert, describe, it } from "@effect/vitest"
import { Cause, Deferred, Duration, Effect, Exit, Fiber, Option, Random } from "effect"
import { SqlClient } from "effect/sql"
import { Fence, Lease, LeaseError, Worker } from "worklease"
import * as Fenced from "./support/Fenced.ts"
import { checkpointed, Import, write, written } from "./support/Fenced.ts"
import * as Postgres from "./support/Postgres.ts"
import { eventually, lockRow, pause } from "./support/Sessions.ts"

const oneSecond = {
  ttl: "1 second",
  renewEvery: "300 millis",
  safetyMargin: "100 millis",
  operationTimeout: "200 millis",
  pollInterval: "50 millis"
} as const

/** So that only what the library does by itself is tested. */
const withoutTimeouts = Effect.flatMap(SqlClient.SqlClient, (sql) =>
  Effect.flatMap(
    sql.unsafe<{ readonly name: string }>(
      `SELECT name FROM pg_settings
      WHERE name IN ('idle_in_transaction_session_timeout', 'statement_timeout', 'transaction_timeout')`
    ),
    (rows) => Effect.forEach(rows, ({ name }) => sql.unsafe(`SET LOCAL ${name} = 0`), { discard: true })
  ))

/** The process does not run for a while. */
const blocked = (millis: number) =>
  Effect.sync(() => {
    const end = performance.now() + millis
    while (performance.now() < end);
  })

/** Renewals find the row locked, so that the window ends. The fence's own lock does not mind. */
const withoutRenewals = (url: string, key = "a") => lockRow(url, `import:${key}`, "NO KEY UPDATE")

const isLost = (error: unknown, reason: LeaseError.LeaseLostReason["_tag"]) => {
  assert.instanceOf(error, LeaseError.LeaseLost)
  assert.strictEqual((error as LeaseError.LeaseLost).reason._tag, reason)
}

const openTransactions = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql.unsafe(
      "SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL"
    ),
    (rows) => rows.length
  )

describe("Fence after a loss", () => {
  describe("nothing commits", () => {
    for (
      const [where, end] of [
        ["between two statements", pause(60_000)],
        ["under a statement", Effect.flatMap(SqlClient.SqlClient, (sql) => sql.unsafe("SELECT pg_sleep(60)"))],
        ["and the body goes on, uninterruptibly", Effect.uninterruptible(pause(1_500))],
        ["and the event loop is blocked past the window", blocked(1_200)],
        ["and the body fails because of it", Effect.andThen(blocked(1_200), Effect.fail("own"))]
      ] as ReadonlyArray<[string, Effect.Effect<unknown, unknown, SqlClient.SqlClient>]>
    ) {
      it.live(`when the window ends ${where}`, () =>
        Effect.gen(function*() {
          const { process, sql, url } = yield* Fenced.postgres()
          const a = yield* process({ ...oneSecond, holderId: "a" })
          let returned = false
          const error = yield* Worker.run(Import.id("a"), (work) =>
            Effect.gen(function*() {
              yield* withoutRenewals(url)
              yield* Effect.gen(function*() {
                yield* withoutTimeouts
                yield* write(1)
                yield* end
              }).pipe(Fence.transaction(work), Effect.exit)
              returned = true
            }).pipe(Effect.scoped)).pipe(Effect.provide(a), Effect.flip)
          isLost(error, "WindowExhausted")
          assert.isFalse(returned)
          assert.deepStrictEqual(yield* written(sql), [])
          yield* Effect.provide(write(2), a)
        }))
    }

    it.live("when the event loop is blocked past the window after a checkpoint", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ ...oneSecond, holderId: "a" })
        const b = yield* process({ ...oneSecond, holderId: "b" })
        const error = yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            yield* withoutTimeouts
            yield* write(1)
            yield* work.checkpoint({ line: 1 })
            yield* blocked(1_200)
          }).pipe(Fence.transaction(work))).pipe(Effect.provide(a), Effect.flip)
        isLost(error, "WindowExhausted")
        assert.deepStrictEqual(yield* written(sql), [])
        const { prior } = yield* Effect.provide(Lease.acquire(Import.id("a"), { wait: true }), b)
        assert.deepInclude(prior, { state: Option.none() })
      }))

    it.live("when the term has ended behind its holder's back", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ ...oneSecond, holderId: "a" })
        const error = yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            yield* write(1)
            yield* sql.unsafe("UPDATE worklease SET exit = 'abandoned'")
            yield* pause(60_000)
          }).pipe(Fence.transaction(work))).pipe(Effect.provide(a), Effect.flip)
        isLost(error, "LeaseExpired")
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("when COMMIT takes longer than the window: the server ends it, from 17", () =>
      Effect.gen(function*() {
        // Before, no timeout counts while a COMMIT runs.
        if (Number((yield* Postgres.server).version) < 17) return
        const { process, sql } = yield* Fenced.postgres()
        yield* slowCommit(sql, 5)
        const a = yield* process({ ...oneSecond, holderId: "a" })
        const b = yield* process({ ...oneSecond, holderId: "b" })
        const start = performance.now()
        const error = yield* Worker.run(Import.id("a"), (work) =>
          Effect.andThen(write(1), work.checkpoint({ line: 1 })).pipe(Fence.transaction(work))).pipe(
            Effect.provide(a),
            Effect.flip
          )
        // Whichever notices first.
        if (error instanceof LeaseError.BackendError) {
          assert.strictEqual(error.outcome, "rejected")
        } else isLost(error, "WindowExhausted")
        yield* Effect.provide(Lease.acquire(Import.id("a"), { wait: true }), b)
        assert.isBelow(performance.now() - start, 3_000)
        assert.deepStrictEqual(yield* written(sql), [])
      }))
  })

  it.live("a COMMIT that was under way counts for the successor, which waits for it", () =>
    Effect.gen(function*() {
      const { process, sql } = yield* Fenced.postgres()
      yield* slowCommit(sql, 2)
      const a = yield* process({ ...oneSecond, holderId: "a" })
      const b = yield* process({ ...oneSecond, holderId: "b" })
      const start = performance.now()
      const error = yield* Worker.run(Import.id("a"), (work) =>
        Effect.gen(function*() {
          yield* withoutTimeouts
          yield* write(1)
          yield* work.checkpoint({ line: 1 })
        }).pipe(Fence.transaction(work))).pipe(Effect.provide(a), Effect.flip)
      isLost(error, "WindowExhausted")
      assert.isBelow(performance.now() - start, 1_900)
      const { prior } = yield* Effect.provide(Lease.acquire(Import.id("a"), { wait: true }), b)
      assert.isAbove(performance.now() - start, 2_000)
      assert.deepInclude(prior, { state: Option.some({ line: 1 }) })
      assert.deepStrictEqual(yield* written(sql), [1])
    }))

  it.live("an unguarded hold does not return, and has rolled back and given its connection back", () =>
    Effect.gen(function*() {
      const { process, sql, url } = yield* Fenced.postgres()
      const a = yield* process({ ...oneSecond, holderId: "a", maxConnections: 2 })
      yield* Effect.gen(function*() {
        const lease = yield* Lease.hold(Import.id("a"))
        yield* withoutRenewals(url)
        const open = yield* openTransactions(sql)
        let interrupted = false
        const returned: Array<string> = []
        const fiber = yield* Effect.gen(function*() {
          yield* withoutTimeouts
          yield* write(1)
          yield* pause(60_000)
        }).pipe(
          Effect.onInterrupt(() => Effect.sync(() => interrupted = true)),
          Fence.transaction(lease),
          Effect.exit,
          Effect.andThen(Effect.sync(() => returned.push("the first"))),
          Effect.forkChild({ startImmediately: true })
        )
        yield* eventually("it has begun", Effect.map(openTransactions(sql), (now) => now > open))
        yield* Effect.exit(lease.lost)
        yield* eventually("it is rolled back", Effect.map(openTransactions(sql), (now) => now === open), 1_000)
        assert.isTrue(interrupted)
        // Both connections are there.
        yield* Effect.all([write(2), write(3)], { concurrency: 2 })
        // Nor does it begin again.
        const again = yield* Fence.transaction(write(4), lease).pipe(
          Effect.exit,
          Effect.andThen(Effect.sync(() => returned.push("the second"))),
          Effect.forkChild({ startImmediately: true })
        )
        yield* pause(200)
        assert.deepStrictEqual(returned, [])
        // Whoever holds a lease without a guard is not interrupted either.
        assert.deepStrictEqual([fiber.pollUnsafe(), again.pollUnsafe()], [undefined, undefined])
        yield* Fiber.interrupt(again)
        yield* Fiber.interrupt(fiber)
      }).pipe(Effect.scoped, Effect.provide(a))
      assert.deepStrictEqual(yield* written(sql), [2, 3])
    }))

  it.live("what the body still does when it is interrupted is done before the lease is released", () =>
    Effect.gen(function*() {
      const { process, sql } = yield* Fenced.postgres()
      const a = yield* process({ ...oneSecond, holderId: "a" })
      const events: Array<string> = []
      const began = yield* Deferred.make<void>()
      const fiber = yield* Worker.run(Import.id("a"), (work) =>
        write(1).pipe(
          Effect.andThen(Deferred.succeed(began, undefined)),
          Effect.andThen(pause(60_000)),
          // For longer than an operation may take.
          Effect.onInterrupt(() =>
            Effect.gen(function*() {
              yield* pause(500)
              const [{ exit }] = yield* Effect.orDie(
                sql.unsafe<{ readonly exit: string | null }>("SELECT exit FROM worklease")
              )
              events.push(`cleaned up, ${exit === null ? "held" : exit}`)
            })
          ),
          Fence.transaction(work),
          Effect.ensuring(Effect.sync(() => events.push("over")))
        )).pipe(Effect.provide(a), Effect.forkChild({ startImmediately: true }))
      yield* Deferred.await(began)
      yield* Fiber.interrupt(fiber)
      assert.deepStrictEqual(events, ["cleaned up, held", "over"])
      assert.deepStrictEqual(yield* written(sql), [])
    }))

  it.live("a hold whose transaction waits for a connection, or for the row, gives up too", () =>
    Effect.gen(function*() {
      const { process, sql, url } = yield* Fenced.postgres()
      const a = yield* process({ ...oneSecond, operationTimeout: "500 millis", holderId: "a", maxConnections: 3 })
      for (const waits of ["for a connection", "for the row"] as const) {
        const error = yield* Worker.run(Import.id(waits), (work) =>
          Effect.gen(function*() {
            const client = yield* SqlClient.SqlClient
            if (waits === "for a connection") {
              yield* Effect.all([client.reserve, client.reserve, client.reserve])
            } else {
              yield* lockRow(url, `import:${waits}`)
            }
            return yield* Effect.forever(Effect.exit(Fence.transaction(write(1), work)))
          }).pipe(Effect.scoped)).pipe(Effect.provide(a), Effect.flip)
        isLost(error, "WindowExhausted")
      }
      assert.deepStrictEqual(yield* written(sql), [])
      yield* eventually("no transaction is left", Effect.map(openTransactions(sql), (open) => open === 0))
    }))

  it.live("interrupted at any moment, it has either committed both or neither, and leaves nothing behind", () =>
    Effect.gen(function*() {
      const { process, sql } = yield* Fenced.postgres()
      const a = yield* process({ holderId: "a", maxConnections: 4 })
      const outcomes = { interrupted: 0, done: 0 }
      yield* Effect.gen(function*() {
        const { token } = yield* Lease.acquire(Import.id("a"))
        // On a slow machine it takes longer.
        let micros = 12_000
        for (let line = 1; line <= 150; line++) {
          if (line % 50 === 0 && outcomes.done <= 5) micros *= 10
          const exit = yield* write(line).pipe(
            Effect.andThen(Lease.checkpoint(token, { line })),
            Effect.andThen(write(line, 2)),
            Fence.transaction(token),
            Effect.timeoutOption(Duration.micros(BigInt(yield* Random.nextIntBetween(0, micros)))),
            Effect.exit
          )
          assert.isTrue(Exit.isSuccess(exit), Exit.isFailure(exit) ? Cause.pretty(exit.cause) : "")
          const lines = yield* written(sql)
          assert.strictEqual(lines.filter((_) => _ === line).length % 2, 0)
          if (lines.includes(line)) {
            assert.strictEqual(yield* checkpointed(sql), line)
            outcomes.done++
          } else {
            assert.notStrictEqual(yield* checkpointed(sql), line)
            outcomes.interrupted++
          }
          assert.strictEqual(yield* openTransactions(sql), 0)
        }
        yield* Effect.all(Array.from({ length: 4 }, () => write(0)), { concurrency: 4 })
      }).pipe(Effect.provide(a))
      assert.isAbove(outcomes.done, 5)
      assert.isAbove(outcomes.interrupted, 5)
    }))
})

/** COMMIT of a write takes this many seconds. */
const slowCommit = (sql: SqlClient.SqlClient, seconds: number) =>
  Effect.forEach([
    `CREATE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS $$
      BEGIN PERFORM pg_sleep(${seconds}); RETURN NULL; END $$`,
    `CREATE CONSTRAINT TRIGGER slow_commit AFTER INSERT ON written DEFERRABLE INITIALLY DEFERRED
      FOR EACH ROW EXECUTE FUNCTION slow_commit()`
  ], (statement) =>
    sql.unsafe(statement), { discard: true })
