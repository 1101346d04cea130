import { PgClient } from "@effect/sql-pg"
import { assert, describe, it } from "@effect/vitest"
import { Cause, Clock, Duration, Effect, Exit, Fiber, Layer, Option, Random, Redacted, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { inspect } from "node:util"
import { Backend, Checkpoint, Lease, LeaseError, Work, Worker } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import { createDatabase, start } from "../../support/EmbeddedPostgres.ts"
import { freshDatabase, server } from "../support/Postgres.ts"
import * as Sessions from "../support/Sessions.ts"
import * as TcpProxy from "../support/TcpProxy.ts"

const Count = Work.make("count", Checkpoint.make(Schema.Struct({ n: Schema.Number })))

/** Short enough that a test need not wait long for a reply that never comes. */
const impatient = { ttl: "6 seconds", operationTimeout: "300 millis" } as const

const assertBackendError = (
  error: unknown,
  reason: LeaseError.BackendErrorReason["_tag"],
  outcome: "rejected" | "unknown"
): void => {
  if (!(error instanceof LeaseError.BackendError)) return assert.fail(String(error))
  assert.strictEqual(error.reason._tag, reason, error.message)
  assert.strictEqual(error.outcome, outcome, error.message)
}

/** What work comes to that runs while its backend fails: never a defect, and never an error that does not say why. */
const outcomeOf = (exit: Exit.Exit<unknown, { readonly _tag: string }>): string => {
  if (Exit.isSuccess(exit)) return "finished"
  if (Cause.hasDies(exit.cause)) assert.fail(Cause.pretty(exit.cause))
  const error = Option.getOrThrow(Cause.findErrorOption(exit.cause))
  if (error instanceof LeaseError.BackendError) {
    assert.include(["Unreachable", "TimedOut"], error.reason._tag, inspect(error))
  }
  assert.include(["BackendError", "LeaseHeld", "LeaseLost"], error._tag)
  return error._tag
}

interface AuditRow {
  readonly work_id: string
  readonly operation: "INSERT" | "UPDATE"
  readonly token: bigint
  readonly exit: string | null
  readonly sequence: bigint
}

const auditOf = (sql: SqlClient.SqlClient, workId: string) =>
  sql.unsafe<AuditRow>("SELECT * FROM audit WHERE work_id = $1 ORDER BY number", [workId])

describe("Postgres under faults", () => {
  describe("lost replies", () => {
    /** A database with a record of what took effect, and leases behind a proxy. */
    const setUp = Effect.fnUntraced(function*<A, E>(
      test: (
        proxy: TcpProxy.TcpProxy,
        sql: SqlClient.SqlClient,
        url: string
      ) => Effect.Effect<A, E, Lease.Leases | Backend.Backend | SqlClient.SqlClient>,
      options: Sessions.ProcessOptions = impatient
    ) {
      const { url } = yield* freshDatabase()
      const proxy = yield* TcpProxy.make(url)
      const sql = yield* Sessions.session(url)
      return yield* Effect.andThen(Sessions.auditRows(sql), test(proxy, sql, url)).pipe(
        // The client waits seconds for a connection that has fallen silent.
        Effect.ensuring(proxy.cut),
        Effect.provide(Sessions.process(proxy.url(url), options))
      )
    })

    for (const as of ["cut", "silence"] as const) {
      const how = as === "cut" ? "with the connection" : "on a connection that falls silent"

      it.live(`of an acquire, ${how}: the lease is taken once, and the caller has it`, () =>
        setUp(Effect.fnUntraced(function*(proxy, sql) {
          // One that does not exist yet, one to take over, and one that has state.
          const { token: ended } = yield* Lease.acquire(Count.id("again"))
          yield* Lease.release(ended, "yielded", { n: 7 })
          for (const key of ["new", "again"]) {
            const before = (yield* auditOf(sql, `count:${key}`)).length
            yield* proxy.loseReply({ as })
            const { prior, token } = yield* Lease.acquire(Count.id(key))
            const changes = (yield* auditOf(sql, `count:${key}`)).slice(before)
            assert.lengthOf(changes, 1)
            assert.strictEqual(changes[0].token, token.fencingToken)
            assert.strictEqual(prior.exit, key === "new" ? "none" : "yielded")
            assert.deepStrictEqual(prior.state, key === "new" ? Option.none() : Option.some({ n: 7 }))
            yield* Lease.renew(token)
          }
          assert.strictEqual(yield* proxy.lostReplies, 2)
        })))

      it.live(`of a renewal, ${how}: the holder keeps its lease`, () =>
        setUp(Effect.fnUntraced(function*(proxy, sql) {
          const { token } = yield* Lease.acquire("a")
          yield* proxy.loseReply({ as })
          yield* Lease.renew(token)
          assert.strictEqual(yield* proxy.lostReplies, 1)
          yield* Lease.renew(token)
          for (const change of yield* auditOf(sql, "a")) assert.strictEqual(change.token, token.fencingToken)
        })))

      it.live(`of a checkpoint, ${how}: it is stored once, and the next one is too`, () =>
        setUp(Effect.fnUntraced(function*(proxy, sql) {
          const { token } = yield* Lease.acquire(Count.id("a"))
          yield* proxy.loseReply({ as })
          yield* Lease.checkpoint(token, { n: 1 })
          assert.strictEqual(yield* proxy.lostReplies, 1)
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 1 }))
          yield* Lease.checkpoint(token, { n: 2 })
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 2 }))
          const sequences = (yield* auditOf(sql, "count:a")).map((change) => Number(change.sequence))
          assert.deepStrictEqual([...new Set(sequences)], [0, 1, 2])
        })))

      it.live(`of a release, ${how}: the exit is recorded once`, () =>
        setUp(Effect.fnUntraced(function*(proxy, sql) {
          for (const exit of ["finished", "abandoned", "retired", "yielded"] as const) {
            const { token } = yield* Lease.acquire(Count.id(exit))
            yield* proxy.loseReply({ as })
            yield* Lease.release(token, exit, { n: 3 })
            const exits = (yield* auditOf(sql, `count:${exit}`)).flatMap((change) => change.exit ?? [])
            assert.deepStrictEqual(exits, [exit])
            const { prior } = yield* Lease.acquire(Count.id(exit))
            assert.strictEqual(prior.exit, exit)
            assert.deepStrictEqual(prior.state, Option.some({ n: 3 }))
          }
          assert.strictEqual(yield* proxy.lostReplies, 4)
        })))

      it.live(`of a forget, ${how}: it is done once`, () =>
        setUp(Effect.fnUntraced(function*(proxy, sql) {
          const { token } = yield* Lease.acquire("a")
          yield* proxy.loseReply({ as })
          yield* Lease.forget(token)
          assert.strictEqual(yield* proxy.lostReplies, 1)
          assert.deepStrictEqual((yield* auditOf(sql, "a")).flatMap((change) => change.exit ?? []), ["forgotten"])
        })))

      it.live(`of a lift, ${how}: it is done once, and answers the same`, () =>
        setUp(Effect.fnUntraced(function*(proxy, sql) {
          const { token } = yield* Lease.acquire("a")
          yield* Lease.release(token, "abandoned")
          const before = (yield* auditOf(sql, "a")).length
          yield* proxy.loseReply({ as })
          assert.isTrue(yield* Lease.lift("a"))
          assert.strictEqual(yield* proxy.lostReplies, 1)
          assert.lengthOf((yield* auditOf(sql, "a")).slice(before), 1)
          yield* Lease.acquire("a", { quarantineAfter: 1 })
        })))

      it.live(`of any statement of a work, ${how}: the work runs once, to its end`, () =>
        setUp(Effect.fnUntraced(function*(proxy, sql) {
          for (let skip = 0; skip < 4; skip++) {
            let started = 0
            yield* proxy.loseReply({ as, skip })
            const value = yield* Worker.run(
              Count.id(String(skip)),
              Effect.fnUntraced(function*(work) {
                started++
                yield* work.checkpoint({ n: 1 })
                yield* work.checkpoint({ n: 2 })
                yield* work.leaveAs("finished", { n: 3 })
                return "done"
              })
            )
            assert.strictEqual(value, "done")
            assert.strictEqual(started, 1)
            assert.strictEqual(yield* proxy.lostReplies, skip + 1)
            const changes = yield* auditOf(sql, `count:${skip}`)
            assert.lengthOf(new Set(changes.map((change) => change.token)), 1)
            assert.deepStrictEqual(changes.flatMap((change) => change.exit ?? []), ["finished"])
            const { prior } = yield* Lease.acquire(Count.id(String(skip)))
            assert.deepStrictEqual(prior.state, Option.some({ n: 3 }))
          }
        })))
    }

    it.live("of every second statement: nothing is lost but time", () =>
      setUp(
        Effect.fnUntraced(function*(proxy, sql) {
          const flaky = Effect.forever(Effect.andThen(proxy.loseReply({ skip: 1 }), Sessions.pause(20)))
          yield* Effect.forkChild(flaky)
          const exits = yield* Effect.forEach(Array.from({ length: 20 }, (_, i) => i), (i) =>
            Effect.exit(Worker.run(
              Count.id(String(i)),
              Effect.fnUntraced(function*(work) {
                for (let n = 1; n <= 10; n++) {
                  yield* work.checkpoint({ n })
                  yield* Sessions.pause(10)
                }
              })
            )), { concurrency: "unbounded" })
          for (const exit of exits) assert.isTrue(Exit.isSuccess(exit))
          assert.isAtLeast(yield* proxy.lostReplies, 5)
          assert.deepStrictEqual(
            yield* sql.unsafe(`SELECT count(*)::int AS rows, min(sequence)::int AS sequence FROM worklease
              WHERE exit = 'finished'`),
            [{ rows: 20, sequence: 10 }]
          )
          assert.deepStrictEqual(
            yield* sql.unsafe("SELECT count(DISTINCT (work_id, token))::int AS terms FROM audit"),
            [{ terms: 20 }]
          )
        }),
        {}
      ))

    it.live("of a release after which somebody else has taken the lease: it succeeds", () =>
      setUp(Effect.fnUntraced(function*(proxy, sql, url) {
        const { token } = yield* Lease.acquire("a")
        yield* proxy.loseReply({ as: "silence" })
        const release = yield* Effect.forkChild(Lease.release(token, "yielded"), { startImmediately: true })
        const next = yield* Lease.acquire("a", { wait: true }).pipe(
          Effect.provide(Sessions.process(url, { pollInterval: "10 millis" }))
        )
        assert.strictEqual(next.prior.exit, "yielded")
        yield* Fiber.join(release)
        assert.deepStrictEqual((yield* auditOf(sql, "a")).flatMap((change) => change.exit ?? []), ["yielded"])
      })))

    it.live("of an acquire that is interrupted meanwhile: the lease is given back", () =>
      setUp(Effect.fnUntraced(function*(proxy, sql, url) {
        const { token } = yield* Lease.acquire(Count.id("a"))
        yield* Lease.release(token, "abandoned", { n: 1 })
        yield* proxy.loseReply({ as: "silence" })
        const acquire = yield* Effect.forkChild(Lease.acquire(Count.id("a")), { startImmediately: true })
        yield* Sessions.eventually(
          "the lease is taken",
          Effect.map(auditOf(sql, "count:a"), (changes) => changes.at(-1)!.token > token.fencingToken)
        )
        yield* Fiber.interrupt(acquire)
        const { prior } = yield* Lease.acquire(Count.id("a")).pipe(Effect.provide(Sessions.process(url)))
        assert.strictEqual(prior.exit, "abandoned")
        assert.strictEqual(Option.getOrThrow(prior.fencingToken), token.fencingToken)
        assert.deepStrictEqual(prior.state, Option.some({ n: 1 }))
      })))
  })

  describe.concurrent("a server that does not answer", () => {
    /** Comes to work again by itself, although the client keeps its dead connections for some seconds. */
    const healed = <A, E, R>(effect: Effect.Effect<A, E, R>) =>
      effect.pipe(
        Effect.retry({ while: () => Effect.as(Sessions.pause(100), true) }),
        Effect.timeout("20 seconds")
      )

    it.live("every operation ends in time, as one that may have been applied, and works again afterwards", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Count.id("a"))
          const { token: other } = yield* Lease.acquire(Count.id("b"))
          yield* proxy.stall
          const operations: ReadonlyArray<readonly [string, Effect.Effect<unknown, unknown, Lease.Leases>]> = [
            ["acquire", Lease.acquire("c")],
            ["renew", Lease.renew(token)],
            ["checkpoint", Lease.checkpoint(token, { n: 1 })],
            ["readCheckpoint", Lease.readCheckpoint(token)],
            ["release", Lease.release(other, "finished")],
            ["forget", Lease.forget(other)],
            ["requestYield", Lease.requestYield("a")],
            ["lift", Lease.lift("a")]
          ]
          yield* Effect.forEach(operations, ([operation, effect]) =>
            Effect.gen(function*() {
              const started = performance.now()
              const error = yield* Effect.flip(effect)
              assert.isBelow(performance.now() - started, 3_000, operation)
              assertBackendError(error, "TimedOut", "unknown")
              assert.strictEqual((error as LeaseError.BackendError).operation, operation)
            }), { concurrency: "unbounded" })
          // What was open stays dead: only new connections work.
          yield* proxy.pass
          yield* healed(Lease.renew(token))
          yield* Lease.checkpoint(token, { n: 2 })
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 2 }))
          yield* Lease.acquire("d")
        }).pipe(Effect.provide(Sessions.process(proxy.url(url), { ...impatient, ttl: "30 seconds" })))
      }))

    it.live("a held lease is lost before it expires, although nothing answers, and all heals without a restart", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        yield* Effect.provide(Effect.void, Sessions.process(url))
        yield* Effect.forEach(
          [1, 2, 10],
          Effect.fnUntraced(function*(maxConnections) {
            const workId = `with ${maxConnections} connections`
            const proxy = yield* TcpProxy.make(url)
            yield* Effect.gen(function*() {
              let left = -Infinity
              const work = Effect.andThen(proxy.stall, Effect.never).pipe(
                // The server runs on the same machine, so that this clock is its own.
                Effect.onInterrupt(() =>
                  Effect.orDie(Effect.flatMap(Clock.currentTimeMillis, (now) =>
                    Effect.map(
                      sql.unsafe<{ readonly expires_at: number }>(
                        "SELECT extract(epoch FROM expires_at)::float8 * 1000 AS expires_at FROM worklease WHERE work_id = $1",
                        [workId]
                      ),
                      ([row]) => {
                        left = row.expires_at - now
                      }
                    )))
                )
              )
              const started = performance.now()
              const error = yield* Effect.flip(Lease.withLease(work, workId))
              assert.isBelow(performance.now() - started, 6_000)
              assert.strictEqual(error._tag, "LeaseLost")
              if (error._tag === "LeaseLost") assert.strictEqual(error.reason._tag, "WindowExhausted")
              assert.isAbove(left, 0)

              // What was open stays dead: only new connections work.
              yield* proxy.pass
              const { token } = yield* healed(Lease.acquire(workId))
              yield* Lease.renew(token)
            }).pipe(Effect.provide(Sessions.process(proxy.url(url), {
              ttl: "3 seconds",
              // For a slow machine, which interrupts a little late.
              safetyMargin: "1 second",
              maxConnections
            })))
          }),
          { concurrency: "unbounded" }
        )
      }))

    it.live("work that ends meanwhile returns its value in time, and its lease expires", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        yield* Effect.gen(function*() {
          const started = performance.now()
          assert.strictEqual(yield* Worker.run("a", () => Effect.as(proxy.stall, "done")), "done")
          const error = yield* Effect.flip(
            Worker.run("b", () => Effect.andThen(proxy.stall, Effect.fail("its own"))).pipe(
              Effect.provide(Sessions.process(url, impatient))
            )
          )
          assert.strictEqual(error, "its own")
          assert.isBelow(performance.now() - started, 5_000)
          yield* proxy.cut
        }).pipe(Effect.provide(Sessions.process(proxy.url(url), impatient)))
      }))

    it.live("a final state that could not be stored is an error, not a success", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        yield* Effect.gen(function*() {
          const error = yield* Effect.flip(
            Worker.run(
              Count.id("a"),
              Effect.fnUntraced(function*(work) {
                yield* work.leaveAs("finished", { n: 1 })
                yield* proxy.stall
              })
            )
          )
          assertBackendError(error, "TimedOut", "unknown")
          yield* proxy.cut
        }).pipe(Effect.provide(Sessions.process(proxy.url(url), impatient)))
      }))

    for (const existing of [false, true]) {
      it.live(
        `a client that vanishes in the middle of a transaction of its own keeps ${
          existing ? "a row" : "a new work ID"
        } for a moment, and not for ever`,
        () =>
          Effect.gen(function*() {
            const { url } = yield* freshDatabase({ serializable: true })
            const proxy = yield* TcpProxy.make(url)
            yield* Effect.gen(function*() {
              // By now it knows that each operation needs a transaction.
              const { token } = yield* Lease.acquire(existing ? "a" : "another")
              yield* Lease.release(token, "finished")
              yield* proxy.loseReply({ of: "FOR UPDATE OF l SKIP LOCKED", as: "silence", times: 1_000 })
              const acquire = yield* Effect.forkChild(Effect.exit(Lease.acquire("a")))
              yield* Sessions.eventually("its COMMIT is not sent", Effect.map(proxy.lostReplies, (lost) => lost > 0))
              yield* proxy.stall
              yield* healed(Lease.acquire("a")).pipe(
                Effect.timeout("5 seconds"),
                Effect.provide(Sessions.process(url, impatient))
              )
              yield* proxy.cut
              yield* Fiber.join(acquire)
            }).pipe(Effect.provide(Sessions.process(proxy.url(url), impatient)))
          })
      )
    }

    it.live("the reply to a renewal in a transaction of its own is lost with its COMMIT: the lease is kept", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase({ serializable: true })
        const proxy = yield* TcpProxy.make(url)
        yield* Effect.gen(function*() {
          const term = yield* Worker.run(
            Count.id("a"),
            Effect.fnUntraced(function*(work) {
              yield* work.checkpoint({ n: 1 })
              yield* proxy.loseReply({ of: "state_version", as: "silence" })
              yield* work.checkpoint({ n: 2 })
              assert.strictEqual(yield* proxy.lostReplies, 1)
              return work.token.fencingToken
            })
          )
          const { prior } = yield* Lease.acquire(Count.id("a"))
          assert.strictEqual(Option.getOrThrow(prior.fencingToken), term)
          assert.deepStrictEqual(prior.state, Option.some({ n: 2 }))
          yield* proxy.cut
        }).pipe(Effect.provide(Sessions.process(proxy.url(url), impatient)))
      }))

    it.live("what arrives late, after a takeover, changes nothing", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        const sql = yield* Sessions.session(url)
        const rows = sql.unsafe("SELECT to_jsonb(l)::text AS row FROM worklease l")
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Count.id("a"))
          yield* Lease.checkpoint(token, { n: 1 })
          // One connection for each of them: where none is open, nothing is sent.
          const client = yield* SqlClient.SqlClient
          yield* Effect.forEach(Array.from({ length: 10 }), () => client.unsafe("SELECT pg_sleep(0.1)"), {
            concurrency: "unbounded"
          })
          yield* proxy.stall
          yield* Effect.forEach(
            [Lease.renew(token), Lease.checkpoint(token, { n: 99 }), Lease.release(token, "finished", { n: 99 })],
            (effect) => Effect.exit(effect)
          )
          yield* sql.unsafe("UPDATE worklease SET expires_at = clock_timestamp()")
          const { prior } = yield* Lease.acquire(Count.id("a")).pipe(Effect.provide(Sessions.process(url)))
          assert.deepStrictEqual(prior.state, Option.some({ n: 1 }))
          const before = yield* rows
          const sent = (yield* proxy.statements).length
          yield* proxy.resume
          assert.isAtLeast((yield* proxy.statements).length, sent + 3)
          yield* Sessions.eventually(
            "the server has had them all",
            Effect.map(
              sql.unsafe<{ readonly busy: number }>(`SELECT count(*)::int AS busy FROM pg_stat_activity
                WHERE datname = current_database() AND state = 'active' AND pid <> pg_backend_pid()`),
              ([{ busy }]) => busy === 0
            )
          )
          yield* Sessions.pause(100)
          assert.deepStrictEqual(yield* rows, before)
          assert.strictEqual((yield* Effect.flip(Lease.renew(token)))._tag, "Fenced")
        }).pipe(Effect.provide(Sessions.process(proxy.url(url), { ...impatient, applicationName: "late" })))
      }))

    it.live("a checkpoint that arrives late does not overwrite a newer one", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        const sql = yield* Sessions.session(url)
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Count.id("a"))
          yield* proxy.stall
          assertBackendError(yield* Effect.flip(Lease.checkpoint(token, { n: 1 })), "TimedOut", "unknown")
          yield* proxy.pass
          yield* healed(Lease.checkpoint(token, { n: 2 }))
          const rows = sql.unsafe("SELECT to_jsonb(l)::text AS row FROM worklease l")
          const before = yield* rows
          const sent = (yield* proxy.statements).length
          yield* proxy.resume
          assert.isAtLeast((yield* proxy.statements).length, sent + 1)
          yield* Sessions.eventually(
            "the server has had it",
            Effect.map(
              sql.unsafe<{ readonly busy: number }>(`SELECT count(*)::int AS busy FROM pg_stat_activity
                WHERE datname = current_database() AND state = 'active' AND pid <> pg_backend_pid()`),
              ([{ busy }]) => busy === 0
            )
          )
          yield* Sessions.pause(100)
          assert.deepStrictEqual(yield* rows, before)
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 2 }))
        }).pipe(Effect.provide(Sessions.process(proxy.url(url), { ...impatient, ttl: "30 seconds" })))
      }))
  })

  describe.concurrent("a server that goes away", () => {
    it.live("SIGKILL and restart under load: what was acknowledged is there, and nothing hangs, dies or stays broken", () =>
      Effect.gen(function*() {
        const server = yield* start()
        const url = yield* server.createDatabase()
        const acknowledged = new Map<number, number>()
        const tokens = new Map<number, bigint>()
        const outcomes = new Map<string, number>()
        let over = false
        const goesOn = () => !over

        const work = (i: number) =>
          Worker.run(
            Count.id(String(i)),
            Effect.fnUntraced(function*(work) {
              let n = Option.getOrElse(work.prior.state, () => ({ n: 0 })).n
              // What was acknowledged is never gone, and tokens go on.
              assert.isAtLeast(n, acknowledged.get(i) ?? 0)
              assert.isTrue(work.token.fencingToken > (tokens.get(i) ?? BigInt(0)))
              tokens.set(i, work.token.fencingToken)
              while (goesOn()) {
                n++
                yield* work.checkpoint({ n })
                acknowledged.set(i, n)
                yield* Sessions.pause(2)
              }
            })
          )
        const loop = (i: number) =>
          Effect.gen(function*() {
            while (goesOn()) {
              const exit = yield* Effect.exit(work(i))
              const outcome = outcomeOf(exit)
              outcomes.set(outcome, (outcomes.get(outcome) ?? 0) + 1)
              yield* Sessions.pause(20)
            }
          })

        const layer = Sessions.process(url, { ttl: "2 seconds" })
        const workers = yield* Effect.forkChild(
          Effect.forEach(Array.from({ length: 20 }, (_, i) => i), loop, { concurrency: "unbounded" }).pipe(
            Effect.provide(layer)
          )
        )
        const progress = Effect.sync(() => [...acknowledged.values()].reduce((sum, n) => sum + n, 0))
        const progressing = Effect.gen(function*() {
          const before = yield* progress
          yield* Sessions.eventually("work goes on", Effect.map(progress, (now) => now > before + 200))
        })
        yield* progressing
        for (const down of [0, 300, 3_000]) {
          yield* server.kill
          // Longer than a ttl, too.
          yield* Sessions.pause(down)
          yield* server.restart
          yield* progressing
        }
        over = true
        yield* Fiber.join(workers).pipe(Effect.timeout("20 seconds"))
        assert.isAtLeast(outcomes.get("finished") ?? 0, 1)
        const rows = yield* server.execute(
          "SELECT work_id, sequence, exit FROM worklease ORDER BY work_id",
          new URL(url).pathname.slice(1)
        )
        assert.lengthOf(rows, 20)
        for (const row of rows) assert.strictEqual(row.exit, "finished")
      }))

    it.live("a restart shorter than the window costs no lease", () =>
      Effect.gen(function*() {
        const server = yield* start()
        const url = yield* server.createDatabase()
        yield* Effect.gen(function*() {
          const tokens = yield* Effect.forEach(
            Array.from({ length: 10 }, (_, i) => Count.id(String(i))),
            (id) =>
              Worker.run(
                id,
                Effect.fnUntraced(function*(work) {
                  yield* work.checkpoint({ n: 1 })
                  const term = work.token.fencingToken
                  if (work.token.workId === "count:0") {
                    yield* server.kill
                    yield* Sessions.pause(500)
                    yield* server.restart
                  }
                  yield* Sessions.pause(2_000)
                  yield* work.checkpoint({ n: 2 })
                  return term
                })
              ),
            { concurrency: "unbounded" }
          )
          const rows = yield* server.execute(
            "SELECT fencing_token, exit FROM worklease ORDER BY work_id",
            new URL(url).pathname.slice(1)
          )
          assert.deepStrictEqual(rows, tokens.map((token) => ({ fencing_token: token, exit: "finished" })))
        }).pipe(Effect.provide(Sessions.process(url, { ttl: "6 seconds" })))
      }))

    for (const serializable of [false, true]) {
      it.live(
        `sessions that are terminated in the middle: retried or typed, never a defect${
          serializable ? ", where each operation is a transaction" : ""
        }`,
        () =>
          Effect.gen(function*() {
            const { url } = yield* freshDatabase({ serializable })
            const sql = yield* Sessions.session(url)
            const outcomes = new Map<string, number>()
            let terminated = 0
            const isOver = Sessions.isOverOnce(() => terminated >= 20 && outcomes.has("finished"))

            const terminating = Effect.gen(function*() {
              while (!isOver()) {
                const sessions = yield* sql.unsafe<{ readonly busy: boolean }>(
                  `SELECT state <> 'idle' AS busy, pg_terminate_backend(pid) FROM pg_stat_activity
                  WHERE datname = current_database() AND application_name = 'victim' AND random() < 0.5`
                )
                terminated += sessions.filter(({ busy }) => busy).length
                yield* Sessions.pause(yield* Random.nextIntBetween(1, 30))
              }
            })
            const working = Effect.forEach(Array.from({ length: 12 }, (_, i) => i), (i) =>
              Effect.gen(function*() {
                while (!isOver()) {
                  const exit = yield* Effect.exit(Worker.run(
                    Count.id(String(i)),
                    Effect.fnUntraced(function*(work) {
                      let n = Option.getOrElse(work.prior.state, () => ({ n: 0 })).n
                      for (let step = 0; step < 5; step++) yield* work.checkpoint({ n: ++n })
                    })
                  ))
                  const outcome = outcomeOf(exit)
                  outcomes.set(outcome, (outcomes.get(outcome) ?? 0) + 1)
                }
              }), { concurrency: "unbounded" })
            yield* Effect.andThen(Effect.forkChild(terminating), working).pipe(
              Effect.provide(Sessions.process(url, { applicationName: "victim" })),
              Effect.timeout("40 seconds")
            )
            assert.isAtLeast(outcomes.get("finished") ?? 0, 1)
            assert.isAtLeast(terminated, 20)
          }).pipe(Random.withSeed("terminated"))
      )
    }

    it.live("a connection that dies inside a transaction of the library's own: a BackendError, and no defect", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase({ serializable: true })
        const proxy = yield* TcpProxy.make(url)
        const layer = Sessions.process(proxy.url(url))
        // Each statement of the migrations, and then of an operation.
        for (let skip = 1; skip < 10; skip++) {
          yield* proxy.loseReply({ skip })
          const exit = yield* Effect.exit(Effect.scoped(Layer.build(layer)))
          assert.strictEqual(yield* proxy.lostReplies, skip)
          assertBackendError(yield* Effect.flip(exit), "Unreachable", "unknown")
        }
        yield* Effect.gen(function*() {
          const backend = yield* Backend.Backend
          const { token } = yield* Lease.acquire("a")
          const { fencingToken, holderId, workId } = token
          for (let skip = 0; skip < 3; skip++) {
            const lost = yield* proxy.lostReplies
            yield* proxy.loseReply({ skip })
            const exit = yield* Effect.exit(
              backend.renew([{ workId, holderId, fencingToken, ttl: Duration.seconds(30) }])
            )
            assert.strictEqual(yield* proxy.lostReplies, lost + 1)
            assertBackendError(yield* Effect.flip(exit), "Unreachable", "unknown")
          }
          yield* Lease.renew(token)
        }).pipe(Effect.provide(layer))
      }))

    it.live("a connection that dies inside the caller's transaction: the checkpoint in it is a BackendError", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const client = yield* SqlClient.SqlClient
          const { token } = yield* Lease.acquire(Count.id("a"))
          let error: unknown
          const exit = yield* Effect.exit(client.withTransaction(Effect.gen(function*() {
            yield* Effect.exit(client.unsafe("SELECT pg_terminate_backend(pg_backend_pid())"))
            error = yield* Effect.flip(Lease.checkpoint(token, { n: 1 }))
          })))
          // Nothing commits any more on a connection that has died.
          assertBackendError(error, "Unreachable", "rejected")
          assert.isTrue(Exit.isFailure(exit))
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.none())
          yield* Lease.checkpoint(token, { n: 2 })
        }).pipe(Effect.provide(Sessions.process(url)))
      }))
  })

  describe("a database that is not as it should be", () => {
    const storage = (url: string, options?: Lease.LayerOptions & Postgres.Options) =>
      Lease.layerWith(options ?? {}).pipe(
        Layer.provideMerge(Postgres.layerStorage(options ?? {})),
        Layer.provideMerge(PgClient.layer({ url: Redacted.make(url) })),
        Layer.fresh
      )

    it.live("down at the start: Unreachable, and the next attempt works", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        yield* proxy.refuse
        const layer = Layer.build(Sessions.process(proxy.url(url)))
        assertBackendError(yield* Effect.flip(layer), "Unreachable", "rejected")
        yield* Effect.gen(function*() {
          assertBackendError(yield* Effect.flip(Lease.acquire("a")), "Unreachable", "rejected")
          assertBackendError(yield* Effect.flip(Worker.run("a", () => Effect.void)), "Unreachable", "rejected")
          yield* proxy.pass
          yield* layer
          yield* Worker.run("a", () => Effect.void)
        }).pipe(Effect.provide(storage(proxy.url(url))))
      }))

    it.live("tables that are missing at the start: SchemaOutdated names the remedy, which helps without a restart", () =>
      Effect.gen(function*() {
        const { layer, url } = yield* freshDatabase()
        for (const options of [{}, { schema: "not there", table: "elsewhere" }]) {
          yield* Effect.gen(function*() {
            const error = yield* Effect.flip(Lease.acquire("a"))
            assertBackendError(error, "SchemaOutdated", "rejected")
            assert.include(error.message, "layerMigrations")
            assert.include(error.message, "\"a\"")
            assertBackendError(yield* Effect.flip(Lease.hold("a")), "SchemaOutdated", "rejected")
            yield* Effect.provide(Effect.void, Layer.provide(Postgres.layerMigrations(options), layer))
            const { token } = yield* Lease.acquire("a")
            yield* Lease.renew(token)
            yield* Lease.release(token, "finished")
          }).pipe(Effect.provide(storage(url, options)))
        }
      }))

    it.live("tables of an older version, or that go away and come back", () =>
      Effect.gen(function*() {
        const { layer, url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        const migrations = Effect.provide(Effect.void, Layer.provide(Layer.fresh(Postgres.layerMigrations({})), layer))
        yield* migrations
        yield* Effect.gen(function*() {
          yield* Lease.acquire("a")
          yield* sql.unsafe("ALTER TABLE worklease RENAME COLUMN prior_attempt TO other")
          assertBackendError(yield* Effect.flip(Lease.acquire("b")), "SchemaOutdated", "rejected")
          yield* sql.unsafe("ALTER TABLE worklease RENAME COLUMN other TO prior_attempt")
          yield* Lease.acquire("b")
          yield* sql.unsafe("DROP TABLE worklease, worklease_high_water_mark, worklease_waiters, worklease_migrations")
          assertBackendError(yield* Effect.flip(Lease.acquire("b")), "SchemaOutdated", "rejected")
          yield* migrations
          const { token } = yield* Lease.acquire("b")
          yield* Lease.renew(token)
        }).pipe(Effect.provide(storage(url)))
      }))

    it.live("tables that are missing while a lease is held: it is lost in time, typed", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const error = yield* Effect.flip(
            Worker.run(
              "a",
              () => Effect.andThen(sql.unsafe("ALTER TABLE worklease RENAME TO gone"), Effect.never)
            )
          )
          assert.strictEqual(error._tag, "LeaseLost")
        }).pipe(Effect.provide(Sessions.process(url, { ttl: "1 second" })))
      }))

    it.live("what a role may not do is PermissionDenied, names the rights, and changes nothing", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        const role = `reader_${new URL(url).pathname.slice(1)}`
        yield* Effect.acquireRelease(
          sql.unsafe(`CREATE ROLE ${role} LOGIN`),
          () => Effect.ignore(Effect.andThen(sql.unsafe(`DROP OWNED BY ${role}`), sql.unsafe(`DROP ROLE ${role}`)))
        )
        const asRole = new URL(url)
        asRole.username = role
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire("held")
          yield* sql.unsafe(`GRANT SELECT ON ALL TABLES IN SCHEMA public TO ${role}`)
          yield* sql.unsafe("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
          const before = yield* sql.unsafe("SELECT to_jsonb(l)::text AS row FROM worklease l")
          const backend = yield* Backend.Backend
          yield* Effect.gen(function*() {
            for (const workId of ["held", "new"]) {
              const error = yield* Effect.flip(Lease.acquire(workId))
              assertBackendError(error, "PermissionDenied", "rejected")
              assert.include(error.message, "SELECT, INSERT, UPDATE and DELETE")
            }
            const reader = yield* Backend.Backend
            const term = { workId: "held", holderId: token.holderId, fencingToken: token.fencingToken }
            const ttl = Duration.seconds(30)
            for (
              const effect of [
                reader.renew([{ ...term, ttl }]),
                reader.checkpoint([{
                  ...term,
                  ttl,
                  sequence: BigInt(1),
                  state: { version: 1, bytes: new Uint8Array(1) }
                }]),
                reader.release([{ ...term, exit: "finished", interrupted: false, state: Option.none() }]),
                reader.forget(term),
                reader.requestYield({ workId: "held", deadline: Option.none() }),
                reader.lift("held"),
                reader.sweep({ retention: Duration.zero, limit: 1 })
              ]
            ) {
              assertBackendError(
                yield* Effect.flip(effect as Effect.Effect<unknown, unknown>),
                "PermissionDenied",
                "rejected"
              )
            }
            // Reading is allowed.
            assert.lengthOf(yield* reader.list({ prefix: "", after: Option.none(), limit: 10 }), 1)
          }).pipe(Effect.provide(storage(asRole.href)))
          // Nor may it migrate.
          assertBackendError(
            yield* Effect.flip(Layer.build(Layer.provide(
              Postgres.layerMigrations({ table: "another" }),
              PgClient.layer({ url: Redacted.make(asRole.href) })
            ))),
            "PermissionDenied",
            "rejected"
          )
          assert.deepStrictEqual(yield* sql.unsafe("SELECT to_jsonb(l)::text AS row FROM worklease l"), before)
          assert.lengthOf(yield* backend.list({ prefix: "", after: Option.none(), limit: 10 }), 1)
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    it.live("unknown role, unknown database, read-only database, no more connections: typed, and surely not applied", () =>
      Effect.gen(function*() {
        const { url: base } = yield* server
        const { url } = yield* freshDatabase()
        const refused = (url: string) => Effect.flip(Lease.acquire("a")).pipe(Effect.provide(storage(url)))
        const unknownRole = new URL(url)
        unknownRole.username = "nobody_of_that_name"
        assertBackendError(yield* refused(unknownRole.href), "PermissionDenied", "rejected")
        const unknownDatabase = new URL(url)
        unknownDatabase.pathname = "/nothing_of_that_name"
        assertBackendError(yield* refused(unknownDatabase.href), "Unreachable", "rejected")

        yield* Effect.provide(Effect.void, Sessions.process(url))
        const sql = yield* Sessions.session(url)
        const database = new URL(url).pathname.slice(1)
        yield* sql.unsafe(`ALTER DATABASE "${database}" SET default_transaction_read_only = on`)
        assertBackendError(yield* refused(url), "Unreachable", "rejected")
        // A layer that would migrate finds that it need not.
        assertBackendError(
          yield* Effect.flip(Lease.acquire("a")).pipe(Effect.provide(Sessions.process(url))),
          "Unreachable",
          "rejected"
        )
        yield* sql.unsafe(`ALTER DATABASE "${database}" RESET default_transaction_read_only`)

        const full = yield* createDatabase(base)
        yield* Effect.provide(Effect.void, Sessions.process(full))
        const limited = yield* Sessions.session(full)
        const role = `limited_${new URL(full).pathname.slice(1)}`
        yield* Effect.acquireRelease(
          limited.unsafe(`CREATE ROLE ${role} LOGIN CONNECTION LIMIT 0`),
          () => Effect.ignore(limited.unsafe(`DROP ROLE ${role}`))
        )
        const asRole = new URL(full)
        asRole.username = role
        assertBackendError(yield* refused(asRole.href), "Unreachable", "rejected")
      }))
  })
})
