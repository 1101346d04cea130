import { PgClient } from "@effect/sql-pg"
import { assert, describe, it } from "@effect/vitest"
import { Context, Deferred, Duration, Effect, Exit, Fiber, Layer, Logger, Option, Queue, Redacted, Scope } from "effect"
import { Reactivity } from "effect/reactivity"
import { SqlClient } from "effect/sql"
import { TestClock } from "effect/testing"
import { Backend, Lease } from "worklease"
import * as PgliteClient from "worklease/layers/PgliteClient"
import * as Postgres from "worklease/layers/Postgres"
import { freshDatabase } from "../support/Postgres.ts"
import * as Sessions from "../support/Sessions.ts"
import * as TcpProxy from "../support/TcpProxy.ts"

/** So seldom that whoever acquires sooner was told. */
const seldom = { pollInterval: "30 seconds" } as const

const soon = 5_000

/** One process, for as long as the scope is open. */
const start = (url: string, options?: Sessions.ProcessOptions) => Layer.build(Sessions.process(url, options))

/** What a test ends by itself. */
const startEnding = Effect.fnUntraced(function*<A, E>(layer: Layer.Layer<A, E>) {
  const scope = yield* Scope.fork(yield* Effect.scope)
  const context = yield* Layer.buildWithScope(layer, scope)
  return { context, end: Scope.close(scope, Exit.void) }
})

const storage = (context: Context.Context<Backend.Backend>) => Context.get(context, Backend.Backend)

interface Hints {
  /** How many have come. */
  readonly count: () => number
}

/** Waits for hints for a work ID, one after the other, for as long as the scope is open. */
const hintsFor = Effect.fnUntraced(function*(context: Context.Context<Backend.Backend>, workId: string) {
  const wakeup = yield* Option.getOrThrow(storage(context).wakeups)(workId)
  let hints = 0
  yield* Effect.forkScoped(Effect.forever(Effect.tap(wakeup, () => Effect.sync(() => hints++))), {
    startImmediately: true
  })
  return { count: () => hints } as Hints
})

const waitingFor = Effect.fnUntraced(function*(context: Context.Context<Backend.Backend>, workId: string) {
  const hints = yield* hintsFor(context, workId)
  yield* Sessions.eventually("the subscription stands", Effect.sync(() => hints.count() > 0))
  return hints
})

/** Takes a lease and ends it at once. */
const passOn = Effect.fnUntraced(function*(
  context: Context.Context<Backend.Backend>,
  workId: string,
  end: "yielded" | "given-back" | "forget" = "yielded"
) {
  const { acquire, forget, release } = storage(context)
  const attempt = crypto.randomUUID()
  const [reply] = yield* acquire([{
    workId,
    holderId: "a",
    attempt,
    ttl: Duration.minutes(1),
    quarantineAfter: Option.none()
  }])
  if (reply._tag !== "Acquired") return assert.fail(reply._tag)
  const term = { workId, holderId: "a", fencingToken: reply.fencingToken }
  const ended = end === "forget"
    ? yield* forget(term)
    : (yield* release([{ ...term, exit: end, interrupted: false, state: Option.none() }]))[0]
  assert.strictEqual(ended._tag, "Done")
  return term
})

/** As many seconds on the TestClock, with time in between for what they set off. */
const passes = Effect.fnUntraced(function*(seconds: number, millis = 15) {
  for (let i = 0; i < seconds; i++) {
    yield* TestClock.adjust("1 second")
    yield* Sessions.pause(millis)
  }
})

/**
 * A second takes longer and longer: where the machine is slow, a connection has to be opened within what are seconds of
 * that clock.
 */
const passesUntil = Effect.fnUntraced(function*<E, R>(what: string, condition: Effect.Effect<boolean, E, R>) {
  let millis = 15
  const second = Effect.suspend(() => passes(1, millis = Math.min(millis * 1.05, 500)))
  yield* Sessions.eventually(what, Effect.andThen(second, condition), 40_000)
})

const waiters = (sql: SqlClient.SqlClient, table = "worklease_waiters") =>
  Effect.map(
    sql.unsafe<{ readonly work_id: string }>(`SELECT work_id FROM ${table} ORDER BY 1`),
    (rows) => rows.map((row) => row.work_id)
  )

const listeners = (sql: SqlClient.SqlClient) =>
  Effect.map(
    sql.unsafe<{ readonly pid: number }>(
      `SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN "worklease%'`
    ),
    (rows) => rows.map((row) => row.pid)
  )

const sent = (proxy: TcpProxy.TcpProxy, ...texts: ReadonlyArray<string>) =>
  Effect.map(
    proxy.statements,
    (statements) => statements.filter((statement) => texts.some((text) => statement.includes(text))).length
  )

/** A process that waits for the work IDs it registers, and says what it was told since it last said so. */
const listenIn = Effect.fnUntraced(function*(url: string) {
  const client = yield* Effect.provide(PgClient.makeClient({ url: Redacted.make(url) }), Reactivity.layer)
  const sql = yield* Sessions.session(url)
  const queue = yield* client.listen("worklease_test")
  const end = "the end of what was sent"
  return {
    register: (...workIds: ReadonlyArray<string>) =>
      sql.unsafe(
        "INSERT INTO worklease_waiters SELECT unnest($1::text[]), 'test', clock_timestamp() + interval '1 hour'",
        [workIds]
      ),
    told: Effect.gen(function*() {
      yield* sql.unsafe("SELECT pg_notify('worklease_test', $1)", [end])
      const payloads: Array<string> = []
      while (true) {
        const { payload } = yield* Queue.take(queue)
        if (payload === end) return payloads
        // What has become free.
        assert.match(payload, /^f/)
        payloads.push(payload.slice(1))
      }
    })
  }
})

/** What is logged at Warn and above, for as long as the effect runs. */
const warningsOf = <A, E, R>(f: (warnings: ReadonlyArray<unknown>) => Effect.Effect<A, E, R>) =>
  Effect.suspend(() => {
    const warnings: Array<unknown> = []
    const logger = Logger.make(({ logLevel, message }) => {
      if (logLevel === "Warn" || logLevel === "Error" || logLevel === "Fatal") warnings.push(message)
    })
    return Effect.provide(f(warnings), Logger.layer([logger]))
  })

describe("Wake-ups on PostgreSQL", () => {
  describe("hand over at once", () => {
    for (const serializable of [false, true]) {
      it.live(
        `from process to process${serializable ? ", where transactions are serializable by default" : ""}`,
        () =>
          Effect.gen(function*() {
            const { url } = yield* freshDatabase({ serializable })
            const a = yield* start(url, seldom)
            const b = yield* start(url, seldom)
            const sql = yield* Sessions.session(url)
            for (const end of ["yielded", "finished", "retired", "abandoned", "forget"] as const) {
              const { token } = yield* Effect.provide(Lease.acquire("job"), a)
              const successor = yield* Effect.forkChild(Effect.provide(Lease.acquire("job", { wait: true }), b))
              yield* Sessions.eventually("it waits", Effect.map(waiters(sql), (_) => _.length === 1))
              yield* Sessions.pause(100)
              assert.isUndefined(successor.pollUnsafe())
              const releasedAt = performance.now()
              yield* Effect.provide(end === "forget" ? Lease.forget(token) : Lease.release(token, end), a)
              const { token: next } = yield* Fiber.join(successor)
              assert.isBelow(performance.now() - releasedAt, soon)
              yield* Effect.provide(Lease.release(next, "yielded"), b)
            }
          })
      )
    }

    it.live("also when the work never started", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const a = yield* start(url)
        const hints = yield* waitingFor(a, "job")
        yield* passOn(yield* start(url), "job", "given-back")
        yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() === 2))
      }))

    it.live("also if whoever is told does not wait any more: it passes that on", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const [a, b, c] = yield* Effect.forEach([1, 2, 3], () => start(url))
        const hints = yield* waitingFor(b, "job")
        // One of two is told, at random.
        for (let i = 0; i < 8; i++) {
          yield* Effect.scoped(waitingFor(a, "job"))
          const before = hints.count()
          yield* passOn(c, "job")
          yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() > before))
        }
      }))

    it.live("to one of the processes that wait, all who wait there, and nobody else", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const processes = yield* Effect.forEach([1, 2, 3], () => start(url))
        const waiting = yield* Effect.forEach(
          [...processes, ...processes],
          (context) => waitingFor(context, "job"),
          { concurrency: "unbounded" }
        )
        const elsewhere = yield* Effect.forEach(processes, (context) => waitingFor(context, "other"))
        yield* passOn(processes[0], "job")
        const counts = () => waiting.map((hints) => hints.count())
        yield* Sessions.eventually(
          "one is told",
          Effect.sync(() => counts().filter((count) => count === 2).length === 2)
        )
        assert.deepStrictEqual(counts().slice(0, 3), counts().slice(3))
        assert.deepStrictEqual(elsewhere.map((hints) => hints.count()), [1, 1, 1])
      }))

    for (
      const [what, config] of [
        [
          "names that it spoils",
          { transformQueryNames: (name: string) => `${name}x`, transformResultNames: (name: string) => `x${name}` }
        ],
        ["no prepared statements", { prepare: false }],
        ["a new session for each statement", { connectionTTL: 0 }],
        ["connections that several fibers share", { multiplex: true }],
        ["three connections", { maxConnections: 3 }]
      ] as const
    ) {
      it.live(`over a client with ${what}`, () =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase()
          const context = yield* Layer.build(
            Layer.fresh(Postgres.layer).pipe(
              Layer.provideMerge(Layer.fresh(PgClient.layer({ url: Redacted.make(url), ...config })))
            )
          )
          const hints = yield* waitingFor(context, "job")
          for (let i = 2; i < 5; i++) {
            yield* passOn(context, "job")
            yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() === i))
            // Its other connections go on with what they do.
            yield* SqlClient.SqlClient.use((sql) => sql.withTransaction(sql`SELECT 1`)).pipe(Effect.provide(context))
          }
        }))
    }

    it.live("work IDs of the greatest length, with any characters", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const context = yield* start(url)
        for (const workId of ["x".repeat(512), "🦤".repeat(128), "it's \"quoted\" \\ $1", " "]) {
          const hints = yield* waitingFor(context, workId)
          yield* passOn(context, workId)
          yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() === 2))
        }
      }))

    it.live("what was released before the subscription stood", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        const a = yield* start(url, seldom)
        const b = yield* start(proxy.url(url), seldom)
        const { token } = yield* Effect.provide(Lease.acquire("job"), a)
        // It registers on a connection that does not answer: what is missed meanwhile, the first hint makes good.
        yield* proxy.loseReply({ of: "LISTEN", as: "silence" })
        const successor = yield* Effect.forkChild(Effect.provide(Lease.acquire("job", { wait: true }), b))
        yield* Sessions.eventually("the connection hangs", Effect.map(proxy.lostReplies, (lost) => lost === 1))
        yield* Effect.provide(Lease.release(token, "yielded"), a)
        const releasedAt = performance.now()
        yield* Fiber.join(successor)
        assert.isBelow(performance.now() - releasedAt, 20_000)
      }))
  })

  describe("cost nothing that nobody waits for", () => {
    it.live("an acquire that does not wait writes no more and opens no connection", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        const a = yield* start(url)
        const b = yield* start(proxy.url(url))
        const sql = yield* Sessions.session(url)
        const { token } = yield* Effect.provide(Lease.acquire("job"), a)
        const before = yield* proxy.statements
        for (let i = 0; i < 5; i++) yield* Effect.provide(Effect.flip(Lease.acquire("job")), b)
        yield* Effect.provide(Lease.release(token, "yielded"), a)
        yield* Sessions.pause(300)
        assert.lengthOf(yield* proxy.statements, before.length + 5)
        assert.strictEqual(yield* proxy.connections, 1)
        assert.deepStrictEqual(yield* waiters(sql), [])
        assert.deepStrictEqual(yield* listeners(sql), [])
      }))

    it.live("an ending notifies once if somebody waits for that work ID, and else not", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const a = yield* start(url)
        const { register, told } = yield* listenIn(url)
        const sql = yield* Sessions.session(url)
        yield* register("another")
        for (const end of ["yielded", "given-back", "forget"] as const) yield* passOn(a, "job", end)
        assert.deepStrictEqual(yield* told, [])

        yield* register("job")
        for (const end of ["yielded", "given-back", "forget"] as const) {
          yield* passOn(a, "other", end)
          const term = yield* passOn(a, "job", end)
          assert.deepStrictEqual(yield* told, ["job"], end)
          // Nothing has become free by these.
          yield* storage(a).forget({ ...term, holderId: "nobody" })
          if (end === "forget") yield* storage(a).forget(term)
          else yield* storage(a).release([{ ...term, exit: end, interrupted: false, state: Option.none() }])
          yield* storage(a).release([{ ...term, exit: "retired", interrupted: false, state: Option.none() }])
          assert.deepStrictEqual(yield* told, [], `again ${end}`)
        }
        // One statement, several endings.
        const workIds = Array.from({ length: 20 }, (_, i) => `job ${i}`)
        yield* register(workIds[3], workIds[7])
        const replies = yield* storage(a).acquire(
          workIds.map((workId) => ({
            workId,
            holderId: "a",
            attempt: "1",
            ttl: Duration.minutes(1),
            quarantineAfter: Option.none()
          })) as any
        )
        const releases = workIds.map((workId, i) => ({
          workId,
          holderId: "a",
          fencingToken: (replies[i] as Backend.Acquired).fencingToken,
          exit: "yielded",
          interrupted: false,
          state: Option.none()
        }))
        yield* storage(a).release(releases as any)
        assert.deepStrictEqual((yield* told).sort(), [workIds[3], workIds[7]])
        // Whoever registered has died.
        yield* sql.unsafe("UPDATE worklease_waiters SET expires_at = clock_timestamp()")
        yield* passOn(a, "job")
        assert.deepStrictEqual(yield* told, [])
      }))

    it.live("`wakeups: false` writes nothing, listens to nothing and tells nobody", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        const a = yield* start(proxy.url(url), { wakeups: false, pollInterval: "100 millis" })
        const b = yield* start(url)
        const sql = yield* Sessions.session(url)
        const { register, told } = yield* listenIn(url)
        assert.isTrue(Option.isNone(storage(a).wakeups))
        const before = yield* sent(proxy, "_waiters")
        const { token } = yield* Effect.provide(Lease.acquire("job"), b)
        const waiting = yield* Effect.forkChild(Effect.provide(Lease.acquire("job", { wait: true }), a))
        yield* Sessions.eventually("it polls", Effect.map(sent(proxy, "FOR UPDATE OF l"), (count) => count > 2))
        assert.deepStrictEqual(yield* waiters(sql), [])
        yield* Effect.provide(Lease.release(token, "yielded"), b)
        const { token: next } = yield* Fiber.join(waiting)
        yield* register("job")
        yield* Effect.provide(Lease.release(next, "yielded"), a)
        assert.deepStrictEqual(yield* told, [])
        assert.strictEqual(yield* sent(proxy, "_waiters"), before)
        assert.strictEqual(yield* sent(proxy, "LISTEN"), 0)
      }))

    for (const maxConnections of [1, 2]) {
      it.live(`a pool of ${maxConnections} keeps its connections to itself: it polls, and tells others`, () =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase()
          const small = yield* start(url, { maxConnections, pollInterval: "100 millis" })
          const large = yield* start(url)
          assert.isTrue(Option.isNone(storage(small).wakeups))
          const { token } = yield* Effect.provide(Lease.acquire("job"), large)
          const waiting = yield* Effect.forkChild(Effect.provide(Lease.acquire("job", { wait: true }), small))
          yield* Effect.provide(Lease.release(token, "yielded"), large)
          const { token: next } = yield* Fiber.join(waiting)
          const hints = yield* waitingFor(large, "job")
          yield* Effect.provide(Lease.release(next, "yielded"), small)
          yield* Sessions.eventually("the other is told", Effect.sync(() => hints.count() === 2))
        }))
    }

    it.live("a client that cannot listen polls, and tells others", () =>
      Effect.gen(function*() {
        const { layer, url } = yield* freshDatabase()
        const mute = Layer.effect(
          SqlClient.SqlClient,
          Effect.map(SqlClient.SqlClient, (sql) => Object.assign(sql.withoutTransforms(), { listen: undefined }))
        ).pipe(Layer.provide(layer))
        const a = yield* Layer.build(Layer.fresh(Postgres.layer).pipe(Layer.provide(mute)))
        assert.isTrue(Option.isNone(storage(a).wakeups))
        const hints = yield* waitingFor(yield* start(url), "job")
        yield* passOn(a, "job")
        yield* Sessions.eventually("the other is told", Effect.sync(() => hints.count() === 2))
      }))
  })

  describe("cost little while something waits", () => {
    it.live("one connection and a few statements, however many wait", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        const context = yield* start(proxy.url(url))
        const sql = yield* Sessions.session(url)
        const workIds = Array.from({ length: 1200 }, (_, i) => `job ${i}`)
        const waiting = yield* Effect.forEach([...workIds, ...workIds], (workId) => hintsFor(context, workId))
        yield* Sessions.eventually("all stand", Effect.sync(() => waiting.every((hints) => hints.count() === 1)))
        assert.lengthOf(yield* listeners(sql), 1)
        assert.lengthOf(yield* waiters(sql), 1200)
        assert.isAtMost(yield* sent(proxy, "INSERT INTO \"public\".\"worklease_waiters\""), 4)
        for (const workId of [workIds[0], workIds[1199]]) yield* passOn(context, workId)
        yield* Sessions.eventually(
          "who waits for these is told",
          Effect.sync(() => waiting.filter((hints) => hints.count() === 2).length === 4)
        )
      }))

    it.effect("nothing is left soon after, and who waits again before that finds everything in place", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        const context = yield* start(proxy.url(url))
        const sql = yield* Sessions.session(url)
        for (let i = 0; i < 5; i++) {
          yield* Effect.scoped(Effect.andThen(waitingFor(context, "job"), passes(2)))
          yield* passes(1)
        }
        assert.strictEqual(yield* sent(proxy, "LISTEN"), 1)
        assert.strictEqual(yield* sent(proxy, "INSERT INTO \"public\".\"worklease_waiters\""), 1)
        yield* passesUntil("the row has gone", Effect.map(waiters(sql), (_) => _.length === 0))
        yield* passesUntil("and the connection", Effect.map(listeners(sql), (_) => _.length === 0))
        const before = (yield* proxy.statements).length
        yield* passes(60)
        assert.lengthOf(yield* proxy.statements, before)

        // And it begins anew.
        const hints = yield* waitingFor(context, "job")
        yield* passOn(context, "job")
        yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() === 2))
      }))

    it.effect("a row goes soon after nothing waits for it, while others wait on", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        const context = yield* start(proxy.url(url))
        const sql = yield* Sessions.session(url)
        const hints = yield* waitingFor(context, "stays")
        yield* Effect.scoped(Effect.forEach(["a", "b", "c"], (workId) => waitingFor(context, workId)))
        yield* passesUntil("only one row is left", Effect.map(waiters(sql), (_) => _.length === 1))
        assert.isAtMost(yield* sent(proxy, "DELETE FROM \"public\".\"worklease_waiters\""), 2)
        yield* passes(30)
        assert.deepStrictEqual(yield* waiters(sql), ["stays"])
        yield* passOn(context, "stays")
        yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() === 2))
      }))

    it.effect("rows are refreshed for as long as something waits, and those of processes that have died are deleted", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const context = yield* start(url)
        const sql = yield* Sessions.session(url)
        yield* waitingFor(context, "job")
        yield* sql.unsafe(`INSERT INTO worklease_waiters VALUES
          ('job', 'dead', clock_timestamp()), ('other', 'alive', clock_timestamp() + interval '10 seconds')`)
        yield* sql.unsafe(
          "UPDATE worklease_waiters SET expires_at = clock_timestamp() + interval '10 seconds' WHERE work_id = 'job'"
        )
        yield* sql.unsafe("UPDATE worklease_waiters SET expires_at = clock_timestamp() WHERE subscriber = 'dead'")
        yield* passes(21)
        const rows = sql.unsafe<{ readonly row: string }>(
          `SELECT concat_ws(' ', work_id, expires_at > clock_timestamp() + interval '40 seconds') AS row
            FROM worklease_waiters ORDER BY 1`
        )
        yield* Sessions.eventually(
          "what is refreshed is new, what is dead has gone",
          Effect.map(rows, (rows) => rows.map(({ row }) => row).join() === "job t,other f")
        )
      }))

    it.effect("who was frozen for so long that its rows were deleted looks again", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        // A process that is frozen finds that time has passed when its next timer comes.
        let frozenFor = 0
        const context = yield* Sessions.skewed(() => frozenFor)(start(url))
        const sql = yield* Sessions.session(url)
        const hints = yield* waitingFor(context, "job")
        yield* passes(30)
        assert.strictEqual(hints.count(), 1)
        yield* sql.unsafe("DELETE FROM worklease_waiters")
        frozenFor = 120_000
        yield* passesUntil("it looks again", Effect.sync(() => hints.count() > 1))
        assert.deepStrictEqual(yield* waiters(sql), ["job"])
      }))
  })

  describe("heal", () => {
    it.live("when the connection is terminated", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const context = yield* start(url)
        const sql = yield* Sessions.session(url)
        const hints = yield* waitingFor(context, "job")
        for (let i = 1; i <= 3; i++) {
          const before = hints.count()
          const [pid] = yield* listeners(sql)
          yield* sql.unsafe("SELECT pg_terminate_backend($1)", [pid])
          yield* Sessions.eventually(
            "there is another",
            Effect.map(listeners(sql), ([another]) => another !== undefined && another !== pid)
          )
          yield* Sessions.eventually("it looks again", Effect.sync(() => hints.count() > before))
          const again = hints.count()
          yield* passOn(context, "job")
          yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() > again))
        }
      }))

    for (const alone of [false, true]) {
      it.effect(`when the connection is half-open${alone ? "" : ", with every other that the client has open"}`, () =>
        Effect.gen(function*() {
          const { layer, url } = yield* freshDatabase()
          const proxy = yield* TcpProxy.make(url)
          const proxied = PgClient.layer({ url: Redacted.make(proxy.url(url)) })
          const listensByProxy = Layer.effect(
            SqlClient.SqlClient,
            Effect.gen(function*() {
              const { listen } = Context.get(yield* Layer.build(Layer.fresh(proxied)), PgClient.PgClient)
              return Object.assign(yield* SqlClient.SqlClient, { listen })
            })
          ).pipe(Layer.provide(Layer.fresh(layer)))
          const { context, end } = yield* startEnding(
            Layer.fresh(Postgres.layer).pipe(Layer.provide(alone ? listensByProxy : Layer.fresh(proxied)))
          )
          const other = yield* start(url)
          const hints = yield* waitingFor(context, "job")
          yield* passes(1)
          yield* proxy.stall
          yield* proxy.pass
          yield* passOn(other, "job")
          yield* Sessions.pause(100)
          assert.strictEqual(hints.count(), 1)
          yield* passesUntil("it listens again", Effect.map(sent(proxy, "LISTEN"), (count) => count > 1))
          yield* passesUntil("it looks again", Effect.sync(() => hints.count() > 1))
          const again = hints.count()
          yield* passOn(other, "job")
          yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() > again))
          // Nor does the connection that was given up hold up the end.
          const endsAt = performance.now()
          yield* end
          assert.isBelow(performance.now() - endsAt, 10_000)
        }))
    }

    it.effect("when the server is away for a while, without a storm, and it says so once", () =>
      warningsOf((warnings) =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase()
          const proxy = yield* TcpProxy.make(url)
          const context = yield* start(proxy.url(url))
          const hints = yield* waitingFor(context, "job")
          yield* passes(1)
          yield* proxy.refuse
          yield* passes(300)
          assert.lengthOf(warnings, 1)
          assert.strictEqual(hints.count(), 1)
          const before = yield* sent(proxy, "LISTEN")
          yield* proxy.pass
          yield* passesUntil("it listens again", Effect.map(sent(proxy, "LISTEN"), (count) => count === before + 1))
          yield* passesUntil("it looks again", Effect.sync(() => hints.count() > 1))
          const again = hints.count()
          yield* passOn(context, "job")
          yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() > again))
          assert.lengthOf(warnings, 1)
        })
      ))

    it.effect("behind a pooler that does not keep sessions they are rare quiet attempts, and polling", () =>
      warningsOf((warnings) =>
        Effect.gen(function*() {
          const { layer, url } = yield* freshDatabase()
          let listens = 0
          const pooled = Layer.effect(
            SqlClient.SqlClient,
            Effect.map(SqlClient.SqlClient, (sql) =>
              Object.assign(sql.withoutTransforms(), {
                listen: () => Effect.andThen(Effect.sync(() => listens++), Queue.unbounded())
              }))
          ).pipe(Layer.provide(layer))
          const { context: a, end } = yield* startEnding(
            Lease.layer.pipe(Layer.provideMerge(Layer.fresh(Postgres.layer)), Layer.provide(pooled))
          )
          const b = yield* start(url)
          const { token } = yield* Effect.provide(Lease.acquire("job"), b)
          const waiting = yield* Effect.forkChild(Effect.provide(Lease.acquire("job", { wait: true }), a))
          yield* passes(20)
          const before = listens
          yield* passes(300)
          assert.isAtLeast(listens - before, 8)
          assert.isAtMost(listens - before, 20)
          assert.lengthOf(warnings, 1)
          yield* Effect.provide(Lease.release(token, "yielded"), b)
          yield* passesUntil("it polls", Effect.sync(() => waiting.pollUnsafe() !== undefined))
          const ending = yield* Effect.forkChild(end)
          yield* passesUntil("it ends", Effect.sync(() => ending.pollUnsafe() !== undefined))
        })
      ))

    it.effect("without the rights they are one warning, and polling, until the rights are there", () =>
      warningsOf((warnings) =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase()
          const sql = yield* Sessions.session(url)
          const b = yield* start(url)
          const role = `app_${new URL(url).pathname.slice(1)}`
          yield* Effect.acquireRelease(
            sql.unsafe(`CREATE ROLE ${role} LOGIN`),
            () => Effect.ignore(Effect.andThen(sql.unsafe(`DROP OWNED BY ${role}`), sql.unsafe(`DROP ROLE ${role}`)))
          )
          yield* sql.unsafe(
            `GRANT SELECT, INSERT, UPDATE, DELETE ON worklease, worklease_high_water_mark TO ${role}`
          )
          const asRole = new URL(url)
          asRole.username = role
          const a = yield* Layer.build(
            Lease.layer.pipe(
              Layer.provideMerge(Layer.fresh(Postgres.layerStorage())),
              Layer.provide(Layer.fresh(PgClient.layer({ url: Redacted.make(asRole.href) })))
            )
          )
          const { token } = yield* Effect.provide(Lease.acquire("job"), b)
          const waiting = yield* Effect.forkChild(Effect.provide(Lease.acquire("job", { wait: true }), a))
          yield* passes(60)
          assert.lengthOf(warnings, 1)
          yield* Effect.provide(Lease.release(token, "yielded"), b)
          yield* passesUntil("it polls", Effect.sync(() => waiting.pollUnsafe() !== undefined))
          const { token: next } = yield* Fiber.join(waiting)
          // Nobody would be told of it.
          const refused = yield* Effect.flip(Effect.provide(Lease.release(next, "yielded"), a))
          assert.strictEqual(refused._tag === "BackendError" && refused.reason._tag, "PermissionDenied")
          assert.lengthOf(warnings, 1)

          yield* sql.unsafe(`GRANT SELECT, INSERT, UPDATE, DELETE ON worklease_waiters TO ${role}`)
          yield* Effect.provide(Lease.release(next, "yielded"), a)
          const hints = yield* hintsFor(a, "job")
          yield* passesUntil("the subscription stands", Effect.sync(() => hints.count() === 1))
          yield* passesUntil(
            "it is told of its own endings, too",
            Effect.map(passOn(a, "job"), () => hints.count() > 1)
          )
          assert.lengthOf(warnings, 1)
        })
      ))
  })

  describe("end with their layer", () => {
    it.live("at once, while something waits, with nothing left behind", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        for (let i = 0; i < 3; i++) {
          const { context, end } = yield* startEnding(Sessions.process(url))
          yield* waitingFor(context, "job")
          // Neither has an end in mid-subscription.
          if (i > 0) yield* hintsFor(context, "another")
          const endsAt = performance.now()
          yield* end
          assert.isBelow(performance.now() - endsAt, soon)
          assert.deepStrictEqual(yield* waiters(sql), [])
          yield* Sessions.eventually("it is gone", Effect.map(listeners(sql), (_) => _.length === 0))
        }
        const { context, end } = yield* startEnding(Sessions.process(url))
        yield* hintsFor(context, "job")
        const endsAt = performance.now()
        yield* end
        assert.isBelow(performance.now() - endsAt, soon)
      }))

    it.live("in time, also over a network that is gone", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        const { context, end } = yield* startEnding(Sessions.process(proxy.url(url)))
        yield* waitingFor(context, "job")
        yield* Sessions.pause(100)
        yield* proxy.stall
        const endsAt = performance.now()
        yield* end
        assert.isBelow(performance.now() - endsAt, 20_000)
      }))
  })

  describe("tables", () => {
    it.live("two sets in one database are independent", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sets = [{}, { table: "other" }, { schema: "Else where" }, {
          schema: "Else where",
          table: "o'ther \\ \"1\""
        }]
        const processes = yield* Effect.forEach(sets, (options) => start(url, options))
        const hints = yield* Effect.forEach(processes, (context) => waitingFor(context, "job"))
        for (const [index, context] of processes.entries()) {
          yield* passOn(context, "job")
          yield* Sessions.eventually("it is told", Effect.sync(() => hints[index].count() === 2))
          yield* Sessions.pause(50)
          assert.deepStrictEqual(
            hints.map((_) => _.count()),
            sets.map((_, i) => i <= index ? 2 : 1)
          )
        }
      }))

    it.live("are added to those of the first version, with everything in them", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        const statements = Postgres.migrationSql().split(/;\s*(?:\n|$)/).filter((statement) => statement.trim() !== "")
        const first = statements.findIndex((statement) => statement.includes("VALUES (1)"))
        assert.isAbove(first, 0)
        assert.isTrue(statements.slice(first + 1).some((statement) => statement.includes("\"worklease_waiters\"")))
        assert.include(statements[statements.length - 1], "VALUES (2)")
        for (const statement of statements.slice(0, first + 1)) yield* sql.unsafe(statement)
        const old = yield* Layer.build(
          Lease.layer.pipe(
            Layer.provide(Layer.fresh(Postgres.layerStorage({ wakeups: false }))),
            Layer.provide(Layer.fresh(PgClient.layer({ url: Redacted.make(url) })))
          )
        )
        const { token } = yield* Effect.provide(Lease.acquire("job"), old)
        yield* Effect.provide(Lease.acquire("other"), old)
        const rows = sql.unsafe("SELECT to_jsonb(l)::text AS row FROM worklease l ORDER BY 1")
        const before = yield* rows
        const context = yield* start(url, seldom)
        assert.deepStrictEqual(yield* rows, before)
        const waiting = yield* Effect.forkChild(Effect.provide(Lease.acquire("job", { wait: true }), context))
        yield* Sessions.eventually("it waits", Effect.map(waiters(sql), (_) => _.length === 1))
        const again = yield* start(url)
        yield* Effect.provide(Lease.release(token, "yielded"), again)
        const releasedAt = performance.now()
        const { token: next } = yield* Fiber.join(waiting)
        assert.isTrue(next.fencingToken > token.fencingToken)
        assert.isBelow(performance.now() - releasedAt, soon)
      }))

    it.effect("that go away and come back, under another number", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        const context = yield* start(url)
        const hints = yield* waitingFor(context, "job")
        yield* passes(1)
        yield* sql.unsafe("ALTER TABLE worklease_waiters RENAME TO away")
        yield* passes(30)
        yield* sql.unsafe("CREATE TABLE worklease_waiters (LIKE away INCLUDING ALL)")
        const before = hints.count()
        yield* passesUntil("it looks again", Effect.sync(() => hints.count() > before))
        const again = hints.count()
        yield* passOn(context, "job")
        yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() > again))
      }))
  })
})

describe("Requests to yield on PostgreSQL", () => {
  /** Renewed so seldom that whoever hears sooner was told. */
  const seldomRenewed = { ttl: "40 seconds", renewEvery: "25 seconds" } as const

  /** A lease that is kept, and another process that asks for it. */
  const held = Effect.fnUntraced(function*(
    url: string,
    options?: Sessions.ProcessOptions,
    others?: Sessions.ProcessOptions
  ) {
    const a = yield* start(url, { ...seldomRenewed, ...options })
    const b = yield* start(url, others)
    const scope = yield* Scope.fork(yield* Effect.scope)
    const lease = yield* Effect.provide(Scope.provide(Lease.hold("job"), scope), a)
    return {
      lease,
      context: a,
      end: Scope.close(scope, Exit.void),
      ask: Effect.map(Effect.provide(Lease.requestYield("job"), b), (asked) => assert.isTrue(asked))
    }
  })

  const listens = Effect.fnUntraced(function*(sql: SqlClient.SqlClient) {
    yield* Sessions.eventually(
      "the holder has registered",
      Effect.map(waiters(sql), (workIds) => workIds.length === 1 && workIds[0] === "")
    )
    assert.lengthOf(yield* listeners(sql), 1)
  })

  const told = (
    { awaitYieldRequest }: Lease.Any,
    ask: Effect.Effect<unknown, unknown>
  ) =>
    Effect.gen(function*() {
      const askedAt = performance.now()
      yield* ask
      yield* Effect.timeout(awaitYieldRequest, "10 seconds")
      assert.isBelow(performance.now() - askedAt, soon)
    })

  for (const serializable of [false, true]) {
    it.live(`reach a holder at once${serializable ? ", where transactions are serializable by default" : ""}`, () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase({ serializable })
        const sql = yield* Sessions.session(url)
        const { ask, context, end, lease } = yield* held(url)
        assert.deepStrictEqual(yield* listeners(sql), [])
        yield* listens(sql)
        yield* told(lease, ask)
        // Over the same connection as the wake-ups.
        const hints = yield* Effect.scoped(Effect.gen(function*() {
          const hints = yield* waitingFor(context, "other")
          assert.lengthOf(yield* listeners(sql), 1)
          yield* passOn(context, "other")
          yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() === 2))
          return hints
        }))
        assert.strictEqual(hints.count(), 2)
        yield* end
        yield* Sessions.eventually("nothing is registered", Effect.map(waiters(sql), (_) => _.length === 0))
        yield* Sessions.eventually("and nothing listens", Effect.map(listeners(sql), (_) => _.length === 0))
      }))
  }

  it.live("cost nothing while leases are short", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const proxy = yield* TcpProxy.make(url)
      const context = yield* start(proxy.url(url))
      const before = yield* sent(proxy, "_waiters")
      for (let i = 0; i < 8; i++) {
        yield* Sessions.pause(400).pipe(Lease.withLease(`job ${i}`), Effect.provide(context))
      }
      assert.strictEqual(yield* sent(proxy, "LISTEN"), 0)
      assert.strictEqual(yield* sent(proxy, "INSERT INTO \"public\".\"worklease_waiters\""), 0)
      // Each ending looks whether anybody waits.
      assert.isAtMost((yield* sent(proxy, "_waiters")) - before, 8)
    }))

  it.live("cost one connection, however many leases, and one notification for each process that listens", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const sql = yield* Sessions.session(url)
      const a = yield* start(url, seldomRenewed)
      const b = yield* start(url)
      const leases = yield* Effect.forEach(
        Array.from({ length: 300 }, (_, i) => `job ${i}`),
        (workId) => Effect.provide(Lease.hold(workId), a),
        { concurrency: "unbounded" }
      )
      yield* listens(sql)
      const { register, told } = yield* listenIn(url)
      yield* register("job 7")
      yield* Effect.provide(Lease.requestYield("job 7"), b)
      // Who waits for it does not learn of it.
      assert.deepStrictEqual(yield* told, [])
      yield* Effect.timeout(leases[7].awaitYieldRequest, "10 seconds")
      const asked = yield* Effect.forEach(leases, (lease) => lease.yieldRequested)
      assert.deepStrictEqual(asked.flatMap((asked, i) => asked ? [i] : []), [7])
      // All at once, too.
      yield* Effect.forEach(leases, ({ workId }) => Effect.provide(Lease.requestYield(workId), b), { concurrency: 50 })
      yield* Effect.timeout(Effect.forEach(leases, (lease) => lease.awaitYieldRequest), "10 seconds")
      // That of the test is another.
      assert.lengthOf(yield* listeners(sql), 2)
    }))

  it.live("reach a holder whose connection was terminated, once it listens again", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const sql = yield* Sessions.session(url)
      const { ask, lease } = yield* held(url)
      yield* listens(sql)
      const [pid] = yield* listeners(sql)
      yield* sql.unsafe("SELECT pg_terminate_backend($1)", [pid])
      yield* Sessions.eventually(
        "another connection listens",
        Effect.map(listeners(sql), (pids) => pids.length === 1 && pids[0] !== pid)
      )
      yield* told(lease, ask)
    }))

  const deaf: Record<string, Sessions.ProcessOptions> = {
    "`wakeups: false`": { wakeups: false },
    "a pool of two": { maxConnections: 2 }
  }
  for (const [what, options] of Object.entries(deaf)) {
    it.live(`come with the next renewal to a holder with ${what}, which listens to nothing`, () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        const { ask, context, lease } = yield* held(url, { ttl: "9 seconds", renewEvery: "4 seconds", ...options })
        assert.isTrue(Option.isNone(storage(context).yieldRequests))
        yield* Sessions.pause(1_500)
        yield* ask
        yield* Sessions.pause(1_000)
        assert.isFalse(yield* lease.yieldRequested)
        assert.deepStrictEqual(yield* listeners(sql), [])
        assert.deepStrictEqual(yield* waiters(sql), [])
        yield* Effect.timeout(lease.awaitYieldRequest, "5 seconds")
      }))
  }

  it.live("come with the next renewal where who asks has `wakeups: false`, and tells nobody", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const sql = yield* Sessions.session(url)
      const { ask, lease } = yield* held(url, { ttl: "9 seconds", renewEvery: "4 seconds" }, { wakeups: false })
      yield* listens(sql)
      yield* ask
      yield* Sessions.pause(1_000)
      assert.isFalse(yield* lease.yieldRequested)
      yield* Effect.timeout(lease.awaitYieldRequest, "5 seconds")
    }))
})

describe("Wake-ups on PGlite", () => {
  it.live("hand over at once", () =>
    Effect.gen(function*() {
      const client = yield* Layer.build(PgliteClient.layer())
      const [a, b] = yield* Effect.forEach([1, 2], () =>
        Layer.build(
          Lease.layerWith(seldom).pipe(
            Layer.provide(Layer.fresh(Postgres.layer)),
            Layer.provide(Layer.succeedContext(client)),
            Layer.fresh
          )
        ))
      const sql = Context.get(client, SqlClient.SqlClient)
      for (let i = 0; i < 3; i++) {
        const { token } = yield* Effect.provide(Lease.acquire("job"), a)
        const successor = yield* Effect.forkChild(Effect.provide(Lease.acquire("job", { wait: true }), b))
        yield* Sessions.eventually("it waits", Effect.map(waiters(sql), (_) => _.length === 1))
        const releasedAt = performance.now()
        yield* Effect.provide(Lease.release(token, "yielded"), a)
        const { token: next } = yield* Fiber.join(successor)
        assert.isBelow(performance.now() - releasedAt, soon)
        yield* Effect.provide(Lease.release(next, "yielded"), b)
      }
    }))

  it.live("tell a holder at once that it is asked to yield", () =>
    Effect.gen(function*() {
      const client = yield* Layer.build(PgliteClient.layer())
      const [a, b] = yield* Effect.forEach([1, 2], () =>
        Layer.build(
          // Renewed so seldom that whoever hears sooner was told.
          Lease.layerWith({ ttl: "40 seconds", renewEvery: "25 seconds" }).pipe(
            Layer.provide(Layer.fresh(Postgres.layer)),
            Layer.provide(Layer.succeedContext(client)),
            Layer.fresh
          )
        ))
      const lease = yield* Effect.provide(Lease.hold("job"), a)
      yield* Sessions.eventually(
        "it has registered",
        Effect.map(waiters(Context.get(client, SqlClient.SqlClient)), (_) => _.length === 1)
      )
      assert.isTrue(yield* Effect.provide(Lease.requestYield("job"), b))
      yield* Effect.timeout(lease.awaitYieldRequest, "10 seconds")
    }))

  it.effect("wait for a transaction that the application has open, and hold up nothing", () =>
    Effect.gen(function*() {
      const client = yield* Layer.build(PgliteClient.layer())
      const sql = Context.get(client, SqlClient.SqlClient)
      const { context, end } = yield* startEnding(
        Layer.fresh(Postgres.layer).pipe(Layer.provide(Layer.succeedContext(client)))
      )
      const openTransaction = Effect.gen(function*() {
        const begun = yield* Deferred.make<void>()
        const done = yield* Deferred.make<void>()
        const transaction = yield* Effect.forkChild(sql.withTransaction(
          Effect.andThen(Deferred.succeed(begun, void 0), Deferred.await(done))
        ))
        yield* Deferred.await(begun)
        return Effect.andThen(Deferred.succeed(done, void 0), Fiber.join(transaction))
      })
      const commit = yield* openTransaction
      const hints = yield* hintsFor(context, "job")
      yield* passes(60)
      assert.strictEqual(hints.count(), 0)
      yield* commit
      yield* Sessions.eventually("the subscription stands", Effect.sync(() => hints.count() === 1))
      yield* passOn(context, "job")
      yield* Sessions.eventually("it is told", Effect.sync(() => hints.count() === 2))

      // Nor does one hold up the end of the layer.
      const commitLater = yield* openTransaction
      const ending = yield* Effect.forkChild(end)
      yield* passesUntil("it has ended", Effect.sync(() => ending.pollUnsafe() !== undefined))
      yield* commitLater
      assert.deepStrictEqual(yield* sql`SELECT 1 AS one`, [{ one: 1 }])
    }))
})
