import { assert, describe, it } from "@effect/vitest"
import { Duration, Effect, Fiber, Latch, Option, Random, Schema, Semaphore } from "effect"
import type { NonEmptyReadonlyArray } from "effect/Array"
import { SqlClient } from "effect/sql"
import { Backend, Checkpoint, Lease, LeaseError, Work } from "worklease"
import { freshDatabase } from "../support/Postgres.ts"
import * as Sessions from "../support/Sessions.ts"

const Count = Work.make("count", Checkpoint.make(Schema.Struct({ n: Schema.Number })))

/** How often PostgreSQL has had to break a deadlock in this database. */
const deadlocks = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql.unsafe<{ readonly deadlocks: bigint }>(
      `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`
    ),
    ([row]) => Number(row.deadlocks)
  )

/** Any of the whole numbers from 0 to below the limit. */
const below = (limit: number) => Random.nextIntBetween(0, limit, { halfOpen: true })

const repeated = (times: number) => Array.from({ length: times }, (_, i) => i)

/** Several processes at once: each effect under the leases of its own. */
const inProcesses = <A, E>(
  url: string,
  count: number,
  options: Sessions.ProcessOptions,
  effect: (process: number) => Effect.Effect<A, E, Lease.Leases | Backend.Backend | SqlClient.SqlClient>
) =>
  Effect.forEach(
    repeated(count),
    (i) => Effect.provide(effect(i), Sessions.process(url, { holderId: `process-${i}`, ...options })),
    { concurrency: "unbounded" }
  )

describe("Postgres under contention", () => {
  describe("racing", () => {
    it.live("32 fibers acquire, release, forget and sweep: every token larger than the last, one holder at a time", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        const workIds = ["a", "b", "c", "d"]
        const acquisitions = 3_000
        const exits = ["finished", "retired", "abandoned", "yielded"] as const
        // The tokens of half of them are ahead of the clock, so that it is the last one that counts, not the clock.
        const ahead = BigInt("4000000000000000000")
        const tokens = new Map<string, Array<bigint>>(workIds.map((workId, i) => [workId, i < 2 ? [ahead] : []]))
        const holders = new Map<string, number>(workIds.map((workId) => [workId, 0]))
        let acquired = 0
        const enough = () => acquired >= acquisitions
        let swept = 0

        yield* Effect.provide(Effect.void, Sessions.process(url))
        yield* sql.unsafe(
          `INSERT INTO worklease (work_id, holder_id, fencing_token, attempt, acquired_at, expires_at, exit)
          SELECT id, 'earlier', $1::bigint, 'earlier', now(), now(), 'retired' FROM unnest($2::text[]) id`,
          [ahead, workIds.slice(0, 2)]
        )

        // A sweep deletes what ended more than an hour ago, which is longer than any statement that could have seen the
        // term before it ended. Ageing rows must keep that true: no acquire may be under way while it is done.
        const gate = Semaphore.makeUnsafe(32)
        const open = Latch.makeUnsafe(true)

        const expire = (workId: string, token: bigint) =>
          sql.unsafe(
            "UPDATE worklease SET expires_at = clock_timestamp() WHERE work_id = $1 AND fencing_token = $2::bigint",
            [workId, token]
          )

        const compete = Effect.gen(function*() {
          while (!enough()) {
            const workId = workIds[yield* below(workIds.length)]
            const result = yield* Effect.result(open.whenOpen(gate.withPermit(Lease.acquire(workId))))
            if (result._tag === "Failure") {
              assert.strictEqual(result.failure._tag, "LeaseHeld")
              continue
            }
            const { token } = result.success
            acquired++
            tokens.get(workId)!.push(token.fencingToken)
            holders.set(workId, holders.get(workId)! + 1)
            assert.strictEqual(holders.get(workId), 1, `holders of ${workId}`)
            yield* Effect.yieldNow
            assert.strictEqual(holders.get(workId), 1, `holders of ${workId}`)
            holders.set(workId, holders.get(workId)! - 1)
            const how = yield* below(6)
            // Nobody says anything, and the time passes.
            if (how === 0) yield* expire(workId, token.fencingToken)
            else if (how <= 2) yield* Lease.forget(token)
            else yield* Lease.release(token, exits[yield* below(exits.length)])
          }
        })

        const janitor = Effect.gen(function*() {
          const backend = yield* Backend.Backend
          const age = sql.unsafe(
            `UPDATE worklease SET expires_at = expires_at - interval '2 hours' WHERE exit IS NOT NULL`
          )
          const sweep = Effect.map(backend.sweep({ retention: Duration.zero, limit: 100 }), (count) => {
            swept += count
          })
          while (!enough()) {
            // The sweeps are on their way when the acquires set out.
            yield* open.close
            const sweeping = yield* gate.withPermits(32)(
              Effect.andThen(
                age,
                Effect.forEach(repeated(2), () => Effect.forkChild(sweep, { startImmediately: true }))
              )
            )
            yield* open.open
            yield* Effect.forEach(sweeping, Fiber.join)
            yield* Sessions.pause(2)
          }
        })

        yield* Effect.forkChild(Effect.provide(janitor, Sessions.process(url)))
        yield* inProcesses(
          url,
          4,
          { maxConnections: 8 },
          () => Effect.forEach(repeated(8), () => compete, { concurrency: "unbounded", discard: true })
        )

        for (const [workId, sequence] of tokens) {
          for (let i = 1; i < sequence.length; i++) {
            assert.isTrue(sequence[i] > sequence[i - 1], `${workId}: ${sequence[i]} after ${sequence[i - 1]}`)
          }
        }
        assert.isAtLeast(swept, 50)
        assert.strictEqual(yield* deadlocks(sql), 0)
      }).pipe(Random.withSeed("racing")))
  })

  describe("locked rows", () => {
    const locking = Effect.fnUntraced(function*(url: string) {
      const backend = yield* Backend.Backend
      const leases = yield* Effect.forEach(
        repeated(50),
        (i) => Effect.map(Lease.acquire(Count.id(String(i))), ({ token }) => token),
        { concurrency: "unbounded" }
      )
      const locked = leases[17]
      const others = leases.filter((token) => token !== locked)
      const { unlock } = yield* Sessions.lockRow(url, locked.workId)
      return { backend, leases, locked, others, unlock }
    })

    it.live("a batch with one of them answers for all others", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const { backend, leases, locked } = yield* locking(url)
          const ttl = Duration.seconds(30)
          const batch = leases.map(({ fencingToken, holderId, workId }) => ({ workId, holderId, fencingToken, ttl }))
          const state = { version: 1, bytes: new Uint8Array(10) }
          const asBatch = <A>(items: ReadonlyArray<A>) => items as unknown as NonEmptyReadonlyArray<A>
          for (
            const replies of [
              yield* backend.renew(asBatch(batch)),
              yield* backend.checkpoint(asBatch(batch.map((item) => ({ ...item, sequence: BigInt(1), state })))),
              yield* backend.release(
                asBatch(
                  batch.map((item) =>
                    Object.assign({ exit: "finished" as const, interrupted: false, state: Option.none() }, item)
                  )
                )
              )
            ]
          ) {
            for (const [i, reply] of replies.entries()) {
              if (reply instanceof LeaseError.BackendError) assert.fail(reply.message)
              assert.strictEqual(reply._tag, leases[i] === locked ? "Busy" : "Done")
            }
          }
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    for (
      const [what, operation] of [
        ["renewals", Lease.renew],
        ["checkpoints", (token) => Lease.checkpoint(token, { n: 1 })],
        ["releases", (token) => Lease.release(token, "finished")],
        ["releases with a state", (token) => Lease.release(token, "finished", { n: 1 })]
      ] as ReadonlyArray<
        readonly [string, (token: Lease.Token<{ readonly n: number }>) => Effect.Effect<void, unknown, Lease.Leases>]
      >
    ) {
      it.live(`49 ${what} do not wait for the one whose row is locked, which succeeds when it is unlocked`, () =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase()
          yield* Effect.gen(function*() {
            const { locked, others, unlock } = yield* locking(url)
            const stuck = yield* Effect.forkChild(operation(locked), { startImmediately: true })
            yield* Effect.forEach(others, operation, { concurrency: "unbounded", discard: true })
            // Nor do those that come later.
            yield* Effect.forEach(others, operation, { concurrency: "unbounded", discard: true })
            assert.isUndefined(stuck.pollUnsafe())
            yield* unlock
            yield* Fiber.join(stuck)
          }).pipe(Effect.provide(Sessions.process(url)))
        }))

      it.live(`${what} of a row that stays locked end within their deadline, typed`, () =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase()
          const options = { ttl: "6 seconds", operationTimeout: "300 millis" } as const
          yield* Effect.gen(function*() {
            const { locked, others, unlock } = yield* locking(url)
            const started = performance.now()
            const stuck = yield* Effect.forkChild(Effect.flip(operation(locked)), { startImmediately: true })
            yield* Effect.forEach(others, operation, { concurrency: "unbounded", discard: true })
            const error = yield* Fiber.join(stuck)
            assert.isBelow(performance.now() - started, 3_000)
            if (!(error instanceof LeaseError.BackendError)) return assert.fail(String(error))
            assert.strictEqual(error.reason._tag, "TimedOut")
            assert.strictEqual(error.outcome, "rejected")
            assert.strictEqual(error.workId, locked.workId)
            yield* unlock
            yield* operation(locked)
          }).pipe(Effect.provide(Sessions.process(url, options)))
        }))
    }

    it.live("an acquire of a free one waits for nothing, and is refused as held by nobody known", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire("a")
          yield* Lease.release(token, "finished")
          for (const strength of ["UPDATE", "NO KEY UPDATE", "SHARE", "KEY SHARE"] as const) {
            yield* Effect.scoped(Effect.gen(function*() {
              yield* Sessions.lockRow(url, "a", strength)
              const started = performance.now()
              const error = yield* Effect.flip(Lease.acquire("a"))
              assert.isBelow(performance.now() - started, 4_000)
              if (error._tag !== "LeaseHeld") return assert.fail(error.message)
              assert.isUndefined(error.holderId)
              assert.isAbove(Duration.toMillis(error.retryAfter), 0)
            }))
          }
          yield* Lease.acquire("a")
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    it.live("an acquire of a held one says who holds it", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          yield* Lease.acquire("a")
          yield* Sessions.lockRow(url, "a")
          const error = yield* Effect.flip(Lease.acquire("a"))
          if (error._tag !== "LeaseHeld") return assert.fail(error.message)
          assert.strictEqual(error.holderId, "holder")
        }).pipe(Effect.provide(Sessions.process(url, { holderId: "holder" })))
      }))

    it.live("a waiting acquire gets a free one when it is unlocked, and the others of its batch at once", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire("a")
          yield* Lease.release(token, "finished")
          const { unlock } = yield* Sessions.lockRow(url, "a")
          const waiting = yield* Effect.forkChild(Lease.acquire("a", { wait: true }), { startImmediately: true })
          yield* Effect.forEach(["b", "c", "d"], (workId) => Lease.acquire(workId), { concurrency: "unbounded" })
          yield* Sessions.pause(100)
          assert.isUndefined(waiting.pollUnsafe())
          yield* unlock
          yield* Fiber.join(waiting)
        }).pipe(Effect.provide(Sessions.process(url)))
      }))
  })

  describe("a storm of batches in any order", () => {
    for (const serializable of [false, true]) {
      it.live(`deadlocks never, and fails never${serializable ? ", where transactions are serializable by default" : ""}`, () =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase({ serializable })
          const sql = yield* Sessions.session(url)
          const workIds = repeated(40).map((i) => `work-${i}`)
          const terms = new Map<string, Backend.Term>()
          const counts = new Map<string, number>()
          const ttl = Duration.millis(500)

          const happened = (...operations: ReadonlyArray<string>) =>
            operations.reduce((sum, operation) => sum + (counts.get(operation) ?? 0), 0)
          // A storm in which nobody met anybody would prove nothing.
          const wanted: ReadonlyArray<ReadonlyArray<string>> = [
            ["acquire Acquired"],
            ["renew Done"],
            ["checkpoint Done"],
            ["release Done"],
            ["forget Done"],
            ["renew Busy", "checkpoint Busy"]
          ]
          const isOver = Sessions.isOverOnce(() => wanted.every((operations) => happened(...operations) >= 10))

          const storm = (process: number) =>
            Effect.gen(function*() {
              const backend = yield* Backend.Backend
              const some = Effect.map(
                Random.shuffle(workIds),
                (workIds) => workIds.slice(0, 20) as unknown as NonEmptyReadonlyArray<string>
              )
              const someTerms = Effect.map(some, (workIds) =>
                workIds.flatMap((workId) => {
                  const term = terms.get(workId)
                  return term === undefined ? [] : [term]
                }))
              const count = (
                operation: string,
                replies: ReadonlyArray<{ readonly _tag: string } | LeaseError.BackendError>
              ) => {
                for (const reply of replies) {
                  if (reply instanceof LeaseError.BackendError) throw reply
                  const key = `${operation} ${reply._tag}`
                  counts.set(key, (counts.get(key) ?? 0) + 1)
                }
              }
              const onTerms = <A>(
                f: (terms: NonEmptyReadonlyArray<Backend.Term>) => Effect.Effect<A, LeaseError.BackendError>
              ) =>
                Effect.flatMap(someTerms, (terms) =>
                  terms.length === 0 ? Effect.void : f(terms as unknown as NonEmptyReadonlyArray<Backend.Term>))
              const map = <A, B>(items: NonEmptyReadonlyArray<A>, f: (item: A) => B) =>
                items.map(f) as unknown as NonEmptyReadonlyArray<B>

              const operations = [
                Effect.gen(function*() {
                  const ids = yield* some
                  const requests = map(ids, (workId) => ({
                    workId,
                    holderId: `process-${process}`,
                    attempt: `${process}-${performance.now()}-${Math.random()}`,
                    ttl,
                    quarantineAfter: Option.none()
                  }))
                  const replies = yield* backend.acquire(requests)
                  count("acquire", replies)
                  for (const [i, reply] of replies.entries()) {
                    if (reply._tag === "Acquired") {
                      const { fencingToken } = reply
                      const before = terms.get(ids[i])
                      if (before === undefined || before.fencingToken < fencingToken) {
                        terms.set(ids[i], { workId: ids[i], holderId: `process-${process}`, fencingToken })
                      }
                    }
                  }
                }),
                onTerms((terms) =>
                  Effect.map(
                    backend.renew(map(terms, (term) => ({ ...term, ttl }))),
                    (replies) =>
                      count("renew", replies)
                  )
                ),
                onTerms((terms) =>
                  Effect.map(
                    backend.checkpoint(map(terms, (term) => ({
                      ...term,
                      ttl,
                      sequence: BigInt(Math.round(performance.now() * 1000)),
                      state: { version: 1, bytes: new Uint8Array(50) }
                    }))),
                    (replies) => count("checkpoint", replies)
                  )
                ),
                onTerms((terms) =>
                  Effect.map(
                    backend.release(map(terms, (term) => ({
                      ...term,
                      exit: "finished" as const,
                      interrupted: false,
                      state: Option.none()
                    }))),
                    (replies) => count("release", replies)
                  )
                ),
                onTerms(([term]) => Effect.map(backend.forget(term), (reply) => count("forget", [reply]))),
                onTerms(([term]) => Effect.map(backend.read(term), (reply) => count("read", [reply]))),
                onTerms(([term]) =>
                  Effect.asVoid(backend.requestYield({ workId: term.workId, deadline: Option.none() }))
                ),
                Effect.asVoid(backend.sweep({ retention: Duration.zero, limit: 10 })),
                Effect.asVoid(backend.list({ prefix: "", after: Option.none(), limit: 100 }))
              ]
              while (!isOver()) {
                // The batches more often than the rest.
                const next = yield* below(operations.length + 8)
                yield* operations[next < operations.length ? next : next % 4]
              }
            })
          // Rows that a sweep finds, which come and go meanwhile.
          const age = Effect.gen(function*() {
            while (!isOver()) {
              yield* sql.unsafe(`UPDATE worklease SET expires_at = expires_at - interval '2 hours'
                WHERE work_id IN (SELECT work_id FROM worklease WHERE exit = 'forgotten' ORDER BY work_id
                  FOR UPDATE SKIP LOCKED)`)
              yield* Sessions.pause(20)
            }
          })

          yield* Effect.provide(Effect.void, Sessions.process(url))
          yield* Effect.forkChild(age)
          yield* inProcesses(
            url,
            3,
            { maxConnections: 6 },
            (process) => Effect.forEach(repeated(6), () => storm(process), { concurrency: "unbounded", discard: true })
          )
          for (const operations of wanted) assert.isAtLeast(happened(...operations), 10, operations.join(" or "))
          assert.strictEqual(yield* deadlocks(sql), 0)
        }).pipe(Random.withSeed("storm")))
    }
  })

  it.live("where transactions are serializable by default, neighbours' operations do not fail each other's", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase({ serializable: true })
      const sql = yield* Sessions.session(url)
      const tokens = yield* inProcesses(url, 4, { maxConnections: 5 }, (process) =>
        Effect.gen(function*() {
          const tokens = yield* Effect.forEach(
            repeated(25),
            (i) => Effect.map(Lease.acquire(Count.id(`${process}-${i}`)), ({ token }) => token),
            { concurrency: "unbounded" }
          )
          for (let round = 0; round < 20; round++) {
            // Not as one batch: each for itself, from all processes at once.
            yield* Effect.forEach(tokens, (token, i) =>
              Effect.andThen(
                Effect.yieldNow,
                (i + round) % 2 === 0 ? Lease.renew(token) : Lease.checkpoint(token, { n: round })
              ), { concurrency: 5 })
          }
          return tokens
        }))
      assert.lengthOf(tokens.flat(), 100)
      assert.deepStrictEqual(
        yield* sql.unsafe(
          "SELECT count(*)::int AS held, min(sequence)::int AS sequence FROM worklease WHERE exit IS NULL"
        ),
        [{ held: 100, sequence: 10 }]
      )
    }))

  it.live("nor do contenders, where that becomes the default only once their processes know another", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const acquired = yield* inProcesses(url, 4, { maxConnections: 1 }, () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const take = Lease.acquire("a").pipe(
            Effect.flatMap(({ token }) => Effect.as(Lease.release(token, "finished"), 1)),
            Effect.catchTag("LeaseHeld", () => Effect.succeed(0))
          )
          yield* take
          yield* sql.unsafe("SET default_transaction_isolation = 'serializable'")
          const counts = yield* Effect.forEach(repeated(200), () => take)
          assert.deepStrictEqual(
            yield* sql.unsafe("SHOW default_transaction_isolation"),
            [{ default_transaction_isolation: "serializable" }]
          )
          return counts.filter((count) => count === 1).length
        }))
      assert.isAbove(Math.max(...acquired), 0)
    }))

  describe("connections", () => {
    it.live("50 held leases renew through a pool of 2, for five times their ttl, and hold no connection meanwhile", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        const ttl = 2_000
        yield* Effect.gen(function*() {
          yield* Sessions.auditRows(sql)
          yield* Effect.scoped(Effect.gen(function*() {
            const leases = yield* Effect.forEach(repeated(50), (i) => Lease.hold(`work-${i}`), {
              concurrency: "unbounded"
            })
            const lost = yield* Effect.forEach(leases, (lease) => Effect.forkChild(lease.lost))
            yield* Effect.gen(function*() {
              const until = performance.now() + 5 * ttl
              while (performance.now() < until) {
                const refused = yield* Effect.forEach(leases, ({ workId }) => Effect.flip(Lease.acquire(workId)), {
                  concurrency: "unbounded"
                })
                for (const error of refused) assert.strictEqual(error._tag, "LeaseHeld")
                const [sessions] = yield* sql.unsafe<
                  { readonly open: number; readonly transactions: number; readonly advisory: number }
                >(`SELECT count(*)::int AS open,
                    count(*) FILTER (WHERE state LIKE 'idle in transaction%')::int AS transactions,
                    (SELECT count(*)::int FROM pg_locks l JOIN pg_database d ON d.oid = l.database
                      WHERE l.locktype = 'advisory' AND d.datname = current_database()) AS advisory
                  FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'holder'`)
                assert.deepInclude(sessions, { transactions: 0, advisory: 0 })
                assert.isAtMost(sessions!.open, 2)
                yield* Sessions.pause(100)
              }
            }).pipe(Effect.provide(Sessions.process(url, { holderId: "contender" })))
            for (const fiber of lost) assert.isUndefined(fiber.pollUnsafe())
            const windows = yield* Effect.forEach(leases, (lease) => lease.window)
            for (const window of windows) assert.isAbove(Duration.toMillis(window), 0)
          }))
        }).pipe(
          Effect.provide(Sessions.process(url, {
            ttl,
            holderId: "holder",
            applicationName: "holder",
            maxConnections: 2
          }))
        )
        // What really moved the row, and not what only seemed to.
        const rows = yield* sql.unsafe<
          { readonly terms: number; readonly renewals: number; readonly longest: number; readonly moved: boolean }
        >(
          `SELECT count(DISTINCT token)::int AS terms,
            count(*) FILTER (WHERE operation = 'UPDATE' AND exit IS NULL)::int AS renewals,
            max(extract(epoch FROM gap))::float8 * 1000 AS longest,
            bool_and(after > before) FILTER (WHERE operation = 'UPDATE' AND exit IS NULL) AS moved
          FROM (SELECT *, at - lag(at) OVER (PARTITION BY work_id ORDER BY number) AS gap FROM audit) a
          GROUP BY work_id`
        )
        assert.lengthOf(rows, 50)
        for (const row of rows) {
          assert.strictEqual(row.terms, 1)
          assert.isTrue(row.moved)
          // Every third of the ttl.
          assert.isAtLeast(row.renewals, 12)
          assert.isBelow(row.longest, ttl)
        }
        assert.deepStrictEqual(
          yield* sql.unsafe("SELECT count(*)::int AS released FROM worklease WHERE exit = 'finished'"),
          [{ released: 50 }]
        )
      }))

    it.live("a handler that keeps the only connection loses its lease in time, typed, and gets it back afterwards", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        const ttl = 1_000
        yield* Effect.gen(function*() {
          const client = yield* SqlClient.SqlClient
          let left = -Infinity
          const handler = Effect.andThen(client.unsafe("SELECT 1"), Effect.never).pipe(
            Effect.onInterrupt(() =>
              Effect.orDie(Effect.map(
                sql.unsafe<{ readonly left: number }>(
                  "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 * 1000 AS left FROM worklease"
                ),
                ([row]) => {
                  left = row.left
                }
              ))
            )
          )
          const error = yield* Effect.flip(Lease.withLease(client.withTransaction(handler), "a"))
          assert.strictEqual(error._tag, "LeaseLost")
          if (error._tag === "LeaseLost") assert.strictEqual(error.reason._tag, "WindowExhausted")
          // Interrupted while nobody else could have had it.
          assert.isAbove(left, 0)
          yield* Lease.acquire("a", { wait: true })
        }).pipe(Effect.provide(Sessions.process(url, { ttl, maxConnections: 1 })))
      }))
  })
})
