import { assert, describe, it } from "@effect/vitest"
import { Cause, Context, Effect, Exit, Fiber, Layer, Option, Random, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { Checkpoint, Lease, Work, Worker } from "worklease"
import { freshDatabase } from "../support/Postgres.ts"
import * as Sessions from "../support/Sessions.ts"
import * as TcpProxy from "../support/TcpProxy.ts"

const Count = Work.make("count", Checkpoint.make(Schema.Struct({ n: Schema.Number })))

type Token = Lease.Token<{ readonly n: number }>

/** Timers and sockets that keep this process busy. */
const resources = Effect.sync(() => {
  const active = process.getActiveResourcesInfo()
  const count = (kind: string) => active.filter((resource) => resource === kind).length
  return { timers: count("Timeout"), sockets: count("TCPSocketWrap") }
})

const activityOf = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql.unsafe<{ readonly all: number; readonly busy: number; readonly locks: number }>(
      `SELECT count(*)::int AS all, count(*) FILTER (WHERE state <> 'idle')::int AS busy,
        (SELECT count(*)::int FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid
          WHERE a.application_name = 'interrupted') AS locks
      FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'interrupted'`
    ),
    ([row]) => row
  )

/** Lets a random time pass: some turns of the event loop, or some milliseconds. */
const meanwhile = Effect.gen(function*() {
  const turns = yield* Random.nextIntBetween(0, 30)
  for (let i = 0; i < turns; i++) yield* Effect.yieldNow
  if (yield* Random.nextBoolean) yield* Sessions.pause(yield* Random.nextBetween(0, 6))
})

/** How many effects had ended before they were interrupted, and how many ended by it. */
const ended = { before: 0, "by it": 0 }

/** Interrupts an effect after a random time, and answers what it came to. */
const interrupted = Effect.fnUntraced(function*<A, E, R>(effect: Effect.Effect<A, E, R>) {
  const fiber = yield* Effect.forkChild(effect, { startImmediately: yield* Random.nextBoolean })
  yield* meanwhile
  yield* Fiber.interrupt(fiber)
  const exit = yield* Fiber.await(fiber)
  ended[Exit.isSuccess(exit) ? "before" : "by it"]++
  if (Exit.isFailure(exit) && !Cause.hasInterruptsOnly(exit.cause)) assert.fail(Cause.pretty(exit.cause))
  return exit
})

describe("Postgres and interruption", () => {
  /** What is interrupted, and what it takes to end a term that it may have left to its caller. */
  const operations: Readonly<
    Record<
      string,
      (
        workId: ReturnType<typeof Count.id>,
        token: Effect.Effect<Token, unknown, Lease.Leases>
      ) => Effect.Effect<void, unknown, Lease.Leases>
    >
  > = {
    acquire: Effect.fnUntraced(function*(workId) {
      const exit = yield* interrupted(Lease.acquire(workId))
      if (Exit.isSuccess(exit)) yield* Lease.release(exit.value.token, "yielded")
    }),
    renew: Effect.fnUntraced(function*(_, acquire) {
      const token = yield* acquire
      yield* interrupted(Lease.renew(token))
      yield* Lease.renew(token)
      yield* Lease.release(token, "yielded")
    }),
    checkpoint: Effect.fnUntraced(function*(_, acquire) {
      const token = yield* acquire
      yield* interrupted(Lease.checkpoint(token, { n: 1 }))
      yield* Lease.checkpoint(token, { n: 2 })
      assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ n: 2 }))
      yield* Lease.release(token, "yielded")
    }),
    readCheckpoint: Effect.fnUntraced(function*(_, acquire) {
      const token = yield* acquire
      yield* interrupted(Lease.readCheckpoint(token))
      yield* Lease.release(token, "yielded")
    }),
    release: Effect.fnUntraced(function*(_, acquire) {
      const token = yield* acquire
      yield* interrupted(Lease.release(token, "yielded", { n: 3 }))
      yield* Lease.release(token, "yielded", { n: 3 })
    }),
    forget: Effect.fnUntraced(function*(_, acquire) {
      const token = yield* acquire
      yield* interrupted(Lease.forget(token))
      yield* Lease.forget(token)
    }),
    hold: Effect.fnUntraced(function*(workId) {
      yield* interrupted(Effect.scoped(Effect.andThen(Lease.hold(workId), meanwhile)))
    }),
    withLease: Effect.fnUntraced(function*(workId) {
      yield* interrupted(Lease.withLease(meanwhile, workId.value))
    }),
    "Worker.run": Effect.fnUntraced(function*(workId) {
      yield* interrupted(Worker.run(
        workId,
        Effect.fnUntraced(function*(work) {
          yield* work.checkpoint({ n: 4 })
          yield* meanwhile
          yield* work.checkpoint({ n: 5 })
          yield* work.leaveAs("finished", { n: 6 })
        })
      ))
    }),
    "a waiting acquire": Effect.fnUntraced(function*(workId, acquire) {
      const token = yield* acquire
      const release = yield* Effect.forkChild(Effect.andThen(meanwhile, Lease.release(token, "yielded")))
      const exit = yield* interrupted(Lease.acquire(workId, { wait: true }))
      yield* Fiber.join(release)
      if (Exit.isSuccess(exit)) yield* Lease.release(exit.value.token, "yielded")
    })
  }

  for (const serializable of [false, true]) {
    it.live(
      `anything at any point: every work ID is acquirable at once, and nothing is left behind${
        serializable ? ", where each operation is a transaction" : ""
      }`,
      () =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase({ serializable })
          const sql = yield* Sessions.session(url)
          const before = yield* resources
          Object.assign(ended, { before: 0, "by it": 0 })
          yield* Effect.gen(function*() {
            const successor = Context.get(yield* Layer.build(Sessions.process(url)), Lease.Leases)
            yield* Effect.forEach(Object.entries(operations), ([name, operation]) =>
              Effect.gen(function*() {
                for (let point = 0; point < 60; point++) {
                  const workId = Count.id(`${name} ${point % 7}`)
                  yield* operation(workId, Effect.map(Lease.acquire(workId), ({ token }) => token)).pipe(
                    Effect.timeout("10 seconds")
                  )
                  // By somebody else, at once. On a slow machine, a transaction may still be on its way back.
                  const { prior, token } = yield* successor.acquire(workId).pipe(
                    Effect.retry({
                      while: (error) => error._tag === "LeaseHeld" && error.holderId === undefined,
                      times: 50
                    })
                  )
                  // What was given back, or left on purpose, counts against nobody.
                  assert.strictEqual(prior.termsWithoutProgress, 0)
                  assert.notStrictEqual(prior.exit, "expired")
                  yield* successor.release(token, "finished")
                }
              }), { concurrency: "unbounded" })
            const { all, busy, locks } = yield* activityOf(sql)
            assert.isAtMost(all, 10)
            assert.strictEqual(busy, 0)
            assert.strictEqual(locks, 0)
          }).pipe(Effect.scoped, Effect.provide(Sessions.process(url, { applicationName: "interrupted" })))
          // Some in time, and some too late.
          assert.isAtLeast(ended["by it"], 100)
          assert.isAtLeast(ended.before, 20)
          assert.deepStrictEqual(
            yield* sql.unsafe("SELECT work_id FROM worklease WHERE exit IS NULL AND expires_at > clock_timestamp()"),
            []
          )
          yield* Sessions.eventually(
            "no connection, timer or socket stays",
            Effect.map(
              Effect.all([activityOf(sql), resources]),
              ([{ all }, { sockets, timers }]) => all === 0 && sockets <= before.sockets && timers <= before.timers
            )
          )
        }).pipe(Random.withSeed(`interruption ${serializable}`))
    )
  }

  it.live("an acquire while nothing answers: it ends in time, and what arrives late is held for a ttl at most", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const proxy = yield* TcpProxy.make(url)
      yield* Effect.gen(function*() {
        yield* Worker.run("warm", () => Effect.void)
        yield* proxy.stall
        const acquire = yield* Effect.forkChild(Lease.acquire("a"), { startImmediately: true })
        yield* Sessions.pause(50)
        const started = performance.now()
        yield* Fiber.interrupt(acquire)
        assert.isBelow(performance.now() - started, 3_000)
        yield* proxy.resume
        yield* Lease.acquire("a", { wait: true }).pipe(
          Effect.provide(Sessions.process(url, { pollInterval: "20 millis" })),
          Effect.timeout("5 seconds")
        )
      }).pipe(Effect.provide(Sessions.process(proxy.url(url), { ttl: "2 seconds" })))
    }))

  it.live("an acquire that waits for a connection: it is not sent when there is one", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      yield* Effect.gen(function*() {
        const sql = yield* SqlClient.SqlClient
        yield* Effect.scoped(Effect.gen(function*() {
          yield* sql.reserve
          const acquire = yield* Effect.forkChild(Lease.acquire("a"), { startImmediately: true })
          yield* Sessions.pause(20)
          yield* Fiber.interrupt(acquire).pipe(Effect.timeout("5 seconds"))
        }))
        // By now, whatever has waited for the connection has had it.
        assert.deepStrictEqual(yield* sql.unsafe("SELECT work_id FROM worklease"), [])
        yield* Effect.provide(Lease.acquire("a"), Sessions.process(url))
      }).pipe(Effect.provide(Sessions.process(url, { maxConnections: 1, operationTimeout: "300 millis" })))
    }))

  it.live("a held lease, in the middle of a renewal that hangs: its release goes out when it can", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const proxy = yield* TcpProxy.make(url)
      yield* Effect.gen(function*() {
        const work = yield* Effect.forkChild(
          Worker.run("a", () => Effect.andThen(proxy.loseReply({ as: "silence" }), Effect.never))
        )
        yield* Sessions.eventually("a renewal hangs", Effect.map(proxy.lostReplies, (lost) => lost === 1))
        yield* Fiber.interrupt(work)
        // Its renewal was sent, and may arrive late; the next holder need not wait for it.
        const { prior } = yield* Effect.provide(Lease.acquire("a"), Sessions.process(url))
        assert.strictEqual(prior.exit, "abandoned")
        assert.strictEqual(prior.termsWithoutProgress, 0)
        yield* proxy.cut
      }).pipe(Effect.provide(Sessions.process(proxy.url(url), { ttl: "6 seconds", renewEvery: "100 millis" })))
    }))
})
