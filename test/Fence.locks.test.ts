import { assert, describe, it } from "@effect/vitest"
import { Effect, Exit, Fiber, Random } from "effect"
import { SqlClient } from "effect/sql"
import { Fence, Lease, LeaseError, Worker } from "worklease"
import * as Fenced from "./support/Fenced.ts"
import { checkpointed, Import, write, written } from "./support/Fenced.ts"
import * as Postgres from "./support/Postgres.ts"
import { eventually, isOverOnce, lockRow, pause, session } from "./support/Sessions.ts"

const oneSecond = {
  ttl: "1 second",
  renewEvery: "300 millis",
  safetyMargin: "100 millis",
  operationTimeout: "200 millis"
} as const

const expiryOf = (sql: SqlClient.SqlClient, workId = "import:a") =>
  Effect.map(
    sql.unsafe<{ readonly expires_at: Date }>("SELECT expires_at FROM worklease WHERE work_id = $1", [workId]),
    ([row]) => row.expires_at.getTime()
  )

const isExpired = (sql: SqlClient.SqlClient, workId = "import:a") =>
  Effect.map(
    sql.unsafe<{ readonly expired: boolean }>(
      "SELECT expires_at <= clock_timestamp() AS expired FROM worklease WHERE work_id = $1",
      [workId]
    ),
    ([row]) => row.expired
  )

/** As far as the server has them. */
const timeouts = ["idle_in_transaction_session_timeout", "statement_timeout", "transaction_timeout"]

const settings = Effect.flatMap(SqlClient.SqlClient, (sql) =>
  Effect.map(
    sql.unsafe<{ readonly name: string; readonly millis: number }>(
      "SELECT name, setting::integer AS millis FROM pg_settings WHERE name = ANY ($1::text[])",
      [timeouts]
    ),
    (rows): Readonly<Record<string, number>> => Object.fromEntries(rows.map(({ millis, name }) => [name, millis]))
  ))

/** So that a transaction may outlive its lease, as under a server that has not noticed yet. */
const withoutTimeouts = Effect.flatMap(
  SqlClient.SqlClient,
  (sql) =>
    Effect.flatMap(
      settings,
      (settings) =>
        Effect.forEach(Object.keys(settings), (name) => sql.unsafe(`SET LOCAL ${name} = 0`), { discard: true })
    )
)

describe("Fence among other transactions", () => {
  describe("while it is open", () => {
    it.live("a takeover is refused as held by nobody known, also after the expiry", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ ...oneSecond, holderId: "a" })
        const b = yield* process({ holderId: "b" })
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          yield* Effect.gen(function*() {
            yield* withoutTimeouts
            const known = yield* Effect.flip(Effect.provide(Lease.acquire(Import.id("a")), b))
            assert.deepInclude(known, { _tag: "LeaseHeld", holderId: "a" })
            yield* eventually("it is expired", isExpired(sql))
            const start = performance.now()
            const error = yield* Effect.flip(Effect.provide(Lease.acquire(Import.id("a")), b))
            assert.isBelow(performance.now() - start, 2_000)
            assert.instanceOf(error, LeaseError.LeaseHeld)
            assert.isUndefined((error as LeaseError.LeaseHeld).holderId)
            yield* write(1)
          }).pipe(Fence.transaction(token))
          assert.deepStrictEqual(yield* written(sql), [1])
          const { prior } = yield* Effect.provide(Lease.acquire(Import.id("a")), b)
          assert.deepInclude(prior, { exit: "expired" })
        }).pipe(Effect.provide(a))
      }))

    it.live("also after a release, until it ends; then whoever waits has it", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a" })
        const b = yield* process({ holderId: "b", pollInterval: "50 millis" })
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          let waiting: Fiber.Fiber<unknown, unknown> | undefined
          yield* Effect.gen(function*() {
            yield* write(1)
            yield* Lease.release(token, "finished")
            waiting = yield* Lease.acquire(Import.id("a"), { wait: true }).pipe(
              Effect.tap(() => Effect.map(written(sql), (lines) => assert.deepStrictEqual(lines, [1]))),
              Effect.provide(b),
              Effect.forkDetach
            )
            yield* pause(300)
            assert.isUndefined(waiting.pollUnsafe())
          }).pipe(Fence.transaction(token))
          yield* Fiber.join(waiting!)
        }).pipe(Effect.provide(a))
      }))

    it.live("the lease's own renewals pass", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ ...oneSecond, holderId: "a" })
        yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            const before = yield* expiryOf(sql)
            yield* eventually("it was renewed", Effect.map(expiryOf(sql), (expiry) => expiry > before), 800)
            yield* write(1)
          }).pipe(Fence.transaction(work))).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [1])
      }))

    it.live("they wait once it has a checkpoint, and nothing is lost when it ends within the window", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ ...oneSecond, holderId: "a" })
        yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            for (let line = 1; line <= 3; line++) {
              yield* Effect.gen(function*() {
                yield* work.checkpoint({ line })
                const before = yield* expiryOf(sql)
                // The next begins with what this one leaves of the window: it must fit in.
                yield* pause(200)
                assert.strictEqual(yield* expiryOf(sql), before)
                yield* write(line)
              }).pipe(Fence.transaction(work))
            }
            yield* pause(1200)
          })).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [1, 2, 3])
        assert.strictEqual(yield* checkpointed(sql), 3)
      }))

    it.live("renewals of a lease that is held inside a transaction are not part of it", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ ...oneSecond, holderId: "a" })
        yield* Effect.gen(function*() {
          const client = yield* SqlClient.SqlClient
          yield* Effect.gen(function*() {
            yield* Lease.hold(Import.id("a"))
            const before = yield* expiryOf(sql)
            yield* eventually("it was renewed", Effect.map(expiryOf(sql), (expiry) => expiry > before))
            return yield* Effect.fail("own")
          }).pipe(client.withTransaction, Effect.ignore)
          assert.isFalse(yield* isExpired(sql))
        }).pipe(Effect.scoped, Effect.provide(a))
        assert.isTrue(yield* isExpired(sql))
      }))
  })

  describe("the term is pinned", () => {
    it.live("by whatever else is done to it: a lock that somebody keeps is a typed error, in time", () =>
      Effect.gen(function*() {
        const { process, sql, url } = yield* Fenced.postgres()
        const a = yield* process({ ...oneSecond, ttl: "30 seconds", holderId: "a" })
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          const lock = yield* lockRow(url, "import:a")
          const error = yield* Effect.flip(Fence.transaction(write(1), token))
          assert.deepInclude(error, { _tag: "BackendError", workId: "import:a", outcome: "rejected" })
          assert.strictEqual((error as LeaseError.BackendError).reason._tag, "TimedOut")
          yield* lock.unlock
          yield* Fence.transaction(write(2), token)
        }).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [2])
      }))

    it.live("a checkpoint whose row is deleted while it waits is fenced", () =>
      Effect.gen(function*() {
        const { process, url } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a" })
        yield* Effect.gen(function*() {
          const client = yield* SqlClient.SqlClient
          const { token } = yield* Lease.acquire(Import.id("a"))
          yield* Lease.release(token, "retired")
          const other = yield* session(url)
          yield* other.unsafe("BEGIN")
          yield* other.unsafe("DELETE FROM worklease")
          const fiber = yield* Lease.checkpoint(token, { line: 1 }).pipe(
            client.withTransaction,
            Effect.forkChild({ startImmediately: true })
          )
          yield* eventually(
            "it waits",
            Effect.map(
              other.unsafe(
                "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
              ),
              (rows) => rows.length > 0
            )
          )
          yield* other.unsafe("COMMIT")
          const error = yield* Effect.flip(Fiber.join(fiber))
          assert.instanceOf(error, LeaseError.Fenced)
        }).pipe(Effect.provide(a))
      }))
  })

  describe("the server's timeouts", () => {
    it.live("are what is left of the window inside, and what they were outside", () =>
      Effect.gen(function*() {
        const { version } = yield* Postgres.server
        const { process } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a", ttl: "10 seconds", maxConnections: 1 })
        yield* Effect.gen(function*() {
          const outside = yield* settings
          assert.deepStrictEqual(Object.keys(outside).length, Number(version) >= 17 ? 3 : 2)
          yield* Worker.run(Import.id("a"), (work) =>
            Effect.gen(function*() {
              yield* pause(300)
              const check = Effect.gen(function*() {
                for (const [name, millis] of Object.entries(yield* settings)) {
                  assert.isAtMost(millis, 8_700, name)
                  assert.isAbove(millis, 7_000, name)
                }
              })
              yield* Fence.transaction(check, work)
              assert.deepStrictEqual(yield* settings, outside)
              yield* Effect.ignore(Fence.transaction(Effect.andThen(check, Effect.fail("own")), work))
              assert.deepStrictEqual(yield* settings, outside)
            }))
        }).pipe(Effect.provide(a))
      }))

    it.live("are never raised above the user's own", () =>
      Effect.gen(function*() {
        const { version } = yield* Postgres.server
        const { process, sql } = yield* Fenced.postgres()
        const [{ database }] = yield* sql.unsafe<{ readonly database: string }>("SELECT current_database() AS database")
        const own: Record<string, number> = { idle_in_transaction_session_timeout: 7_777, statement_timeout: 600 }
        if (Number(version) >= 17) own.transaction_timeout = 2_000
        for (const [name, millis] of Object.entries(own)) {
          yield* sql.unsafe(`ALTER DATABASE ${database} SET ${name} = '${millis}ms'`)
        }
        const a = yield* process({ holderId: "a" })
        yield* Effect.gen(function*() {
          const client = yield* SqlClient.SqlClient
          const { token } = yield* Lease.acquire(Import.id("a"))
          const inside = yield* Fence.transaction(settings, token)
          assert.deepInclude(inside, { idle_in_transaction_session_timeout: 7_777, statement_timeout: 600 })
          assert.deepStrictEqual(yield* settings, own)
          if (Number(version) < 17) return
          assert.isAtMost(inside.transaction_timeout, 2_000)
          // Nor does it start again: what has passed before has passed.
          const exit = yield* Effect.gen(function*() {
            yield* write(1)
            yield* pause(1_500)
            yield* Fence.transaction(write(2), token)
            yield* pause(1_000)
            yield* write(3)
          }).pipe(client.withTransaction, Effect.exit)
          assert.isTrue(Exit.isFailure(exit))
          assert.deepStrictEqual(yield* written(sql), [])
        }).pipe(Effect.provide(a))
      }))

    it.live("end, from 17, also a transaction that is never idle, whatever the user's own timeout is", () =>
      Effect.gen(function*() {
        if (Number((yield* Postgres.server).version) < 17) return
        const { process, sql } = yield* Fenced.postgres()
        const [{ database }] = yield* sql.unsafe<{ readonly database: string }>("SELECT current_database() AS database")
        for (const own of ["0", "60s"]) {
          yield* sql.unsafe(`ALTER DATABASE ${database} SET transaction_timeout = '${own}'`)
          const a = yield* process({ ...oneSecond, holderId: "a" })
          yield* Effect.gen(function*() {
            const { token } = yield* Lease.acquire(Import.id(own))
            const error = yield* Effect.forever(Effect.andThen(write(1), pause(20))).pipe(
              Fence.transaction(token),
              Effect.timeout("10 seconds"),
              Effect.flip
            )
            assert.notStrictEqual((error as { readonly _tag: string })._tag, "TimeoutError")
          }).pipe(Effect.provide(a))
        }
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("fit into what PostgreSQL takes, however long the ttl is", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a", ttl: "60 days" })
        yield* Effect.provide(Worker.run(Import.id("a"), (work) => Fence.transaction(write(1), work)), a)
        assert.deepStrictEqual(yield* written(sql), [1])
      }))

    it.live("end a transaction that outlives the window, which is surely not committed", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ ...oneSecond, holderId: "a" })
        const b = yield* process({ ...oneSecond, holderId: "b" })
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          const error = yield* write(1).pipe(
            Effect.andThen(Lease.checkpoint(token, { line: 1 })),
            Effect.andThen(pause(1_200)),
            Fence.transaction(token),
            Effect.flip
          )
          assert.deepInclude(error, { _tag: "BackendError", workId: "import:a", outcome: "rejected" })
          yield* Effect.provide(Lease.acquire(Import.id("a")), b)
        }).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [])
        assert.isUndefined(yield* checkpointed(sql))
      }))
  })

  for (const serializable of [false, true]) {
    describe(serializable ? "where the default is serializable" : "where the default is read committed", () => {
      const isolation = Effect.flatMap(SqlClient.SqlClient, (sql) =>
        Effect.map(
          sql.unsafe<{ readonly isolation: string }>("SELECT current_setting('transaction_isolation') AS isolation"),
          ([row]) => row.isolation
        ))

      it.live("it runs at read committed, and nothing else does because of it", () =>
        Effect.gen(function*() {
          const { process, sql } = yield* Fenced.postgres({ serializable })
          const a = yield* process({ holderId: "a" })
          // A second client is another database, as far as the transaction of the first is concerned.
          const other = yield* process({ holderId: "other" })
          yield* Worker.run(Import.id("a"), (work) =>
            Effect.gen(function*() {
              const client = yield* SqlClient.SqlClient
              const inside = Effect.gen(function*() {
                yield* write(1)
                yield* work.checkpoint({ line: 1 })
                const nested = yield* client.withTransaction(isolation)
                const elsewhere = yield* Effect.provide(
                  Effect.flatMap(SqlClient.SqlClient, (sql) => sql.withTransaction(isolation)),
                  other
                )
                return [yield* isolation, nested, elsewhere]
              })
              const begin = "BEGIN ISOLATION LEVEL REPEATABLE READ"
              const fallback = serializable ? "serializable" : "read committed"
              assert.deepStrictEqual(
                yield* Fence.transaction(inside, work),
                ["read committed", "read committed", fallback]
              )
              assert.deepStrictEqual(
                yield* Fence.transaction(inside, work).pipe(Effect.provideService(SqlClient.BeginTransaction, begin)),
                ["read committed", "read committed", "repeatable read"]
              )
              assert.strictEqual(yield* client.withTransaction(isolation), fallback)
            })).pipe(Effect.provide(a))
          assert.deepStrictEqual(yield* written(sql), [1, 1])
          assert.strictEqual(yield* checkpointed(sql), 1)
        }))
    })
  }

  describe("many at once", () => {
    it.live("of the same lease all commit, and the last checkpoint by call order stands", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a" })
        const called: Array<number> = []
        yield* Worker.run(Import.id("a"), (work) =>
          Effect.forEach(
            Array.from({ length: 40 }, (_, i) => i),
            (line) =>
              Effect.gen(function*() {
                yield* write(line)
                yield* pause(yield* Random.nextIntBetween(0, 10))
                called.push(line)
                yield* work.checkpoint({ line })
                yield* pause(yield* Random.nextIntBetween(0, 3))
              }).pipe(Fence.transaction(work)),
            { concurrency: "unbounded", discard: true }
          )).pipe(Effect.provide(a))
        assert.lengthOf(yield* written(sql), 40)
        assert.strictEqual(yield* checkpointed(sql), called.at(-1))
      }))

    it.live("of several leases, mixed with renewals, checkpoints, takeovers and sweeps, deadlock nowhere", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        let fenced = 0
        const isOver = isOverOnce(() => fenced > 100)
        const keys = ["a", "b", "c", "d"]
        const policy = { ttl: "600 millis", renewEvery: "50 millis", operationTimeout: "200 millis" } as const
        yield* Effect.forEach(["one", "two", "three"], (holderId) =>
          Effect.gen(function*() {
            const context = yield* process({ ...policy, holderId, pollInterval: "20 millis" })
            yield* Effect.forEach(keys, (key) =>
              Effect.gen(function*() {
                while (!isOver()) {
                  yield* Worker.run(Import.id(key), (work) =>
                    Effect.forEach(Array.from({ length: 3 }, (_, i) => i), (i) =>
                      Effect.gen(function*() {
                        yield* work.checkpoint({ line: i })
                        yield* Effect.gen(function*() {
                          yield* write(i)
                          yield* pause(yield* Random.nextIntBetween(0, 20))
                          yield* work.checkpoint({ line: i })
                        }).pipe(Fence.transaction(work))
                        fenced++
                      }), { concurrency: "unbounded", discard: true })).pipe(
                      Effect.ignore
                    )
                  yield* pause(yield* Random.nextIntBetween(0, 20))
                }
              }), { concurrency: "unbounded", discard: true }).pipe(Effect.provide(context))
          }), { concurrency: "unbounded", discard: true })
        assert.isAbove(fenced, 100)
        yield* pause(100)
        const [{ deadlocks }] = yield* sql.unsafe<{ readonly deadlocks: bigint }>(
          "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
        )
        assert.strictEqual(Number(deadlocks), 0)
        assert.lengthOf(yield* written(sql), fenced)
      }))
  })
})
