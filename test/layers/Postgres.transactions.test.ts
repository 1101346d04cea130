import { assert, describe, it } from "@effect/vitest"
import { Duration, Effect, Exit, Fiber, Layer, Option, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { Checkpoint, Lease, LeaseError, Renewal, Work, Worker } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import { freshDatabase } from "../support/Postgres.ts"
import * as Sessions from "../support/Sessions.ts"

const Count = Work.make("count", Checkpoint.make(Schema.Struct({ n: Schema.Number })))

/** Runs an effect in a transaction that is then rolled back. */
const rolledBack = <A, E, R>(effect: Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const sql = yield* SqlClient.SqlClient
    let value: Option.Option<A> = Option.none()
    const exit = yield* Effect.exit(sql.withTransaction(Effect.andThen(
      Effect.map(effect, (result) => {
        value = Option.some(result)
      }),
      Effect.fail("rolled back" as const)
    )))
    if (Option.isNone(value)) return yield* Effect.flatMap(exit, () => Effect.die("no value"))
    return Option.getOrThrow(value)
  })

describe("Postgres inside the caller's transactions", () => {
  for (const serializable of [false, true]) {
    it.live(
      `acquire, renew, release and forget never join: a rollback does not undo them${
        serializable ? ", where transactions are serializable by default" : ""
      }`,
      () =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase({ serializable })
          const sql = yield* Sessions.session(url)
          const row = Effect.map(
            sql.unsafe<{ readonly exit: string | null; readonly expires_at: Date; readonly token: bigint }>(
              "SELECT exit, expires_at, fencing_token AS token FROM worklease"
            ),
            ([row]) => row
          )
          yield* Effect.gen(function*() {
            const { token } = yield* rolledBack(Lease.acquire("a"))
            const acquired = yield* row
            assert.strictEqual(acquired.token, token.fencingToken)
            yield* Sessions.pause(20)
            yield* rolledBack(Lease.renew(token))
            assert.isAbove((yield* row).expires_at.getTime(), acquired.expires_at.getTime())
            assert.isTrue(yield* rolledBack(Lease.requestYield("a")))
            assert.deepStrictEqual(yield* sql.unsafe("SELECT yield_requested AS asked FROM worklease"), [
              { asked: true }
            ])
            yield* rolledBack(Lease.release(token, "yielded"))
            assert.strictEqual((yield* row).exit, "yielded")
            yield* sql.unsafe("UPDATE worklease SET terms_without_progress = 3")
            assert.isTrue(yield* rolledBack(Lease.lift("a")))
            assert.deepStrictEqual(yield* sql.unsafe("SELECT terms_without_progress AS count FROM worklease"), [
              { count: 0 }
            ])
            const { token: next } = yield* rolledBack(Lease.acquire("a"))
            yield* rolledBack(Lease.forget(next))
            assert.strictEqual((yield* row).exit, "forgotten")
            assert.strictEqual(yield* rolledBack(Worker.run("a", () => Effect.succeed(1))), 1)
            assert.strictEqual((yield* row).exit, "finished")
          }).pipe(Effect.provide(Sessions.process(url)))
        })
    )
  }

  it.live("leases whose layer was built inside one that has ended do not look for it", () =>
    Effect.gen(function*() {
      const { layer } = yield* freshDatabase()
      yield* Effect.gen(function*() {
        const sql = yield* SqlClient.SqlClient
        const leases = yield* Effect.flatMap(
          Effect.scope,
          (scope) => sql.withTransaction(Layer.buildWithScope(Lease.layer, scope))
        )
        const { token } = yield* Effect.provide(Lease.acquire(Count.id("a")), leases)
        yield* Effect.provide(Lease.checkpoint(token, { n: 1 }), leases)
        assert.deepStrictEqual(
          yield* Effect.provide(Lease.readCheckpoint(token), leases),
          Option.some({ n: 1 })
        )
      }).pipe(Effect.provide(Layer.provideMerge(Postgres.layer, layer)))
    }))

  it.live("nor do they see what it has not committed, or wait for it", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      yield* Effect.gen(function*() {
        const sql = yield* SqlClient.SqlClient
        const { token } = yield* Lease.acquire(Count.id("a"))
        const error = yield* sql.withTransaction(Effect.gen(function*() {
          yield* Lease.checkpoint(token, { n: 1 })
          // The transaction has the row, so somebody else's renewal of it is refused in time.
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.none())
          return yield* Effect.flip(Lease.renew(token))
        }))
        if (!(error instanceof LeaseError.BackendError)) return assert.fail(String(error))
        assert.strictEqual(error.reason._tag, "TimedOut")
        assert.strictEqual(error.outcome, "rejected")
        assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 1 }))
        yield* Lease.renew(token)
      }).pipe(Effect.provide(Sessions.process(url, { operationTimeout: "300 millis" })))
    }))

  it.live("on a client with a single connection they fail at once, typed, and change nothing", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const other = yield* Sessions.session(url)
      const rows = other.unsafe("SELECT to_jsonb(l)::text AS row FROM worklease l ORDER BY work_id")
      yield* Effect.gen(function*() {
        const sql = yield* SqlClient.SqlClient
        const { token } = yield* Lease.acquire(Count.id("a"))
        const before = yield* rows
        const operations: ReadonlyArray<readonly [string, Effect.Effect<unknown, unknown, Lease.Leases>]> = [
          ["acquire", Lease.acquire("b")],
          ["acquire", Lease.acquire("b", { wait: true })],
          ["acquire", Effect.scoped(Lease.hold("b"))],
          ["acquire", Lease.withLease(Effect.void, "b")],
          ["acquire", Worker.run("b", () => Effect.void)],
          ["renew", Lease.renew(token)],
          ["release", Lease.release(token, "finished")],
          ["release", Lease.release(token, "finished", { n: 1 })],
          ["forget", Lease.forget(token)],
          ["requestYield", Lease.requestYield(Count.id("a"))],
          ["lift", Lease.lift(Count.id("a"))]
        ]
        for (const [operation, effect] of operations) {
          const started = performance.now()
          const error = yield* Effect.flip(sql.withTransaction(effect))
          assert.isBelow(performance.now() - started, 4_000)
          if (!(error instanceof LeaseError.BackendError)) return assert.fail(String(error))
          assert.strictEqual(error.operation, operation)
          assert.strictEqual(error.outcome, "rejected")
          assert.include(error.message, "transaction")
        }
        assert.deepStrictEqual(yield* rows, before)
        // Outside of one, they work.
        yield* Lease.renew(token)
        yield* sql.withTransaction(Lease.checkpoint(token, { n: 1 }))
        assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 1 }))
        yield* Lease.release(token, "finished")
      }).pipe(Effect.provide(Sessions.process(url, { maxConnections: 1 })))
    }))

  describe("a checkpoint joins", () => {
    it.live("it is there after the commit, and not after a rollback, and what comes next is stored", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const other = yield* Sessions.session(url)
        yield* Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          yield* sql.unsafe("CREATE TABLE done (n int)")
          const { token } = yield* Lease.acquire(Count.id("a"))
          const stored = Lease.readCheckpoint(token)
          const step = (n: number) =>
            Effect.andThen(sql.unsafe("INSERT INTO done VALUES ($1)", [n]), Lease.checkpoint(token, { n }))

          yield* rolledBack(step(1))
          assert.deepStrictEqual(yield* stored, Option.none())
          yield* sql.withTransaction(step(2))
          assert.deepStrictEqual(yield* stored, Option.some({ n: 2 }))
          yield* rolledBack(Effect.andThen(step(3), step(4)))
          assert.deepStrictEqual(yield* stored, Option.some({ n: 2 }))
          // Its number was spent by the transaction that was rolled back, and outside of any there is a larger one.
          yield* Lease.checkpoint(token, { n: 5 })
          assert.deepStrictEqual(yield* stored, Option.some({ n: 5 }))
          yield* sql.withTransaction(Effect.gen(function*() {
            yield* step(6)
            assert.deepStrictEqual(yield* other.unsafe("SELECT n FROM done"), [{ n: 2 }])
            yield* step(7)
            assert.deepStrictEqual(yield* stored, Option.some({ n: 5 }))
          }))
          assert.deepStrictEqual(yield* stored, Option.some({ n: 7 }))
          yield* rolledBack(step(8))
          yield* Lease.release(token, "finished", { n: 9 })
          assert.deepStrictEqual(yield* other.unsafe("SELECT n FROM done ORDER BY n"), [{ n: 2 }, { n: 6 }, { n: 7 }])
          const { prior } = yield* Lease.acquire(Count.id("a"))
          assert.deepStrictEqual(prior.state, Option.some({ n: 9 }))
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    it.live("a savepoint that is rolled back takes it along, while the rest commits", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const { token } = yield* Lease.acquire(Count.id("a"))
          yield* sql.withTransaction(Effect.gen(function*() {
            yield* Lease.checkpoint(token, { n: 1 })
            yield* rolledBack(Lease.checkpoint(token, { n: 2 }))
          }))
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 1 }))
          yield* sql.withTransaction(Effect.gen(function*() {
            yield* rolledBack(Lease.checkpoint(token, { n: 3 }))
            yield* sql.withTransaction(Lease.checkpoint(token, { n: 4 }))
          }))
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 4 }))
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    it.live("the window moves when the commit is known, and not by what is rolled back", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const policy = yield* Renewal.make({ ttl: "30 seconds" })
        yield* Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          yield* Effect.scoped(Effect.gen(function*() {
            const lease = yield* Lease.hold(Count.id("a"), { policy })
            const window = Effect.map(lease.window, Duration.toMillis)
            const passed = Effect.fnUntraced(function*(millis: number) {
              const before = yield* window
              yield* Sessions.eventually("the time has passed", Effect.map(window, (now) => now < before - millis))
              return before - millis
            })
            const first = yield* passed(500)
            yield* rolledBack(lease.checkpoint({ n: 1 }))
            assert.isBelow(yield* window, first)
            // A savepoint that is rolled back, in a transaction that commits.
            yield* sql.withTransaction(rolledBack(lease.checkpoint({ n: 2 })))
            assert.isBelow(yield* window, first)
            yield* sql.withTransaction(Effect.gen(function*() {
              yield* lease.checkpoint({ n: 3 })
              assert.isBelow(yield* window, first)
              yield* passed(100)
            }))
            // Counted from when it was sent, and not from the commit.
            assert.isAbove(yield* window, first)
            assert.isAtMost(yield* window, 27_000 - 100)
          }))
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    it.live("a refused one dooms the transaction, also when its error is caught", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          yield* sql.unsafe("CREATE TABLE done (n int)")
          const { token } = yield* Lease.acquire(Count.id("a"))
          yield* sql.unsafe("UPDATE worklease SET expires_at = clock_timestamp()")
          const { token: next } = yield* Lease.acquire(Count.id("a"))
          for (
            const [stale, tag] of [[token, "Fenced"], [next, "LeaseExpired"]] as const
          ) {
            if (tag === "LeaseExpired") yield* Lease.release(next, "finished")
            let refused: unknown
            const catching = Effect.andThen(
              sql.unsafe("INSERT INTO done VALUES (1)"),
              Effect.catch(Lease.checkpoint(stale, { n: 1 }), (error) =>
                Effect.sync(() => {
                  refused = error
                }))
            )
            for (const effect of [catching, sql.withTransaction(catching)]) {
              refused = undefined
              const exit = yield* Effect.exit(sql.withTransaction(effect))
              assert.isTrue(Exit.isFailure(exit))
              assert.strictEqual((refused as { readonly _tag: string })._tag, tag)
              assert.deepStrictEqual(yield* sql.unsafe("SELECT n FROM done"), [])
            }
          }
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    it.live("transactions one after the other keep a held lease beyond its ttl", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const ttl = 1_000
        yield* Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          // Each within the window that the one before it has left, and all of them longer than the ttl.
          const value = yield* Worker.run(
            Count.id("a"),
            Effect.fnUntraced(function*(work) {
              for (let n = 1; n <= 10; n++) {
                yield* sql.withTransaction(Effect.andThen(work.checkpoint({ n }), Sessions.pause(ttl / 4)))
              }
              return work.token.fencingToken
            })
          )
          const { prior } = yield* Lease.acquire(Count.id("a"))
          assert.strictEqual(Option.getOrThrow(prior.fencingToken), value)
          assert.deepStrictEqual(prior.state, Option.some({ n: 10 }))
        }).pipe(Effect.provide(Sessions.process(url, { ttl })))
      }))

    it.live("an interrupted transaction leaves the lease as it was", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const { token } = yield* Lease.acquire(Count.id("a"))
          yield* Lease.checkpoint(token, { n: 1 })
          const transaction = yield* Effect.forkChild(
            sql.withTransaction(Effect.andThen(Lease.checkpoint(token, { n: 2 }), Effect.never))
          )
          const other = yield* Sessions.session(url)
          yield* Sessions.eventually(
            "the transaction has the row",
            Effect.map(
              other.unsafe("SELECT FROM worklease FOR NO KEY UPDATE SKIP LOCKED"),
              (rows) => rows.length === 0
            )
          )
          yield* Fiber.interrupt(transaction)
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 1 }))
          yield* Lease.checkpoint(token, { n: 3 })
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 3 }))
        }).pipe(Effect.provide(Sessions.process(url)))
      }))
  })
})
