/** Leadership on a real PostgreSQL, between the layers of two processes and one that only looks. */
import { assert, describe, it } from "@effect/vitest"
import { type Context, Effect, Exit, Fiber, Layer, Option, Scope, Stream } from "effect"
import { Leader, Lease } from "worklease"
import { freshDatabase } from "./support/Postgres.ts"
import * as Sessions from "./support/Sessions.ts"

const ttl = "2 seconds"

/** Two that may stand and one that looks, each over a pool of its own. */
const world = Effect.gen(function*() {
  const { url } = yield* freshDatabase()
  const process = (holderId: string) => Layer.build(Sessions.process(url, { holderId, ttl }))
  const sql = yield* Sessions.session(url)
  // The first one migrates.
  return { a: yield* process("a"), b: yield* process("b"), observer: yield* process("observer"), sql, url }
})

/** What the observer is told, in order. */
const observe = Effect.fnUntraced(function*(observer: Context.Context<Lease.Leases>) {
  const seen: Array<string> = []
  yield* Leader.observe("job", { pollInterval: "100 millis" }).pipe(
    Stream.runForEach((leader) =>
      Effect.sync(() =>
        void seen.push(Option.match(leader, { onNone: () => "nobody", onSome: ({ holderId }) => holderId }))
      )
    ),
    Effect.provideContext(observer),
    Effect.forkScoped
  )
  return seen
})

describe("leaders on PostgreSQL", () => {
  it.live("the layer of one process is built at a time; the other one follows as soon as it is closed", () =>
    Effect.gen(function*() {
      const { a, b, observer } = yield* world
      const seen = yield* observe(observer)
      yield* Sessions.eventually("the observer has looked", Effect.sync(() => seen.length === 1))
      const built: Array<string> = []
      let overlaps = 0
      const start = Effect.fnUntraced(function*(id: string, context: Context.Context<Lease.Leases>) {
        const scope = yield* Scope.make()
        yield* Effect.addFinalizer(() => Scope.close(scope, Exit.void))
        yield* Layer.buildWithScope(
          Layer.effectDiscard(Effect.acquireRelease(
            Effect.sync(() => {
              if (built.length > 0) overlaps++
              built.push(id)
            }),
            () => Effect.sync(() => void built.splice(built.indexOf(id), 1))
          )).pipe(Leader.layer("job"), Layer.provide(Layer.succeedContext(context))),
          scope
        )
        return scope
      })
      const scope = yield* start("a", a)
      yield* Sessions.eventually("a leads", Effect.sync(() => built[0] === "a" && seen.at(-1) === "a"))
      yield* start("b", b)
      // For longer than the lease lasts without renewal.
      yield* Sessions.pause(2500)
      assert.deepStrictEqual(built, ["a"])
      yield* Scope.close(scope, Exit.void)
      yield* Sessions.eventually("b leads", Effect.sync(() => built[0] === "b" && seen.at(-1) === "b"), 1500)
      assert.strictEqual(overlaps, 0)
      assert.deepStrictEqual(seen.filter((who) => who !== "nobody"), ["a", "b"])
    }).pipe(Effect.scoped))

  it.live("a request to hand over reaches the leader within a renewal, and the other one follows", () =>
    Effect.gen(function*() {
      const { a, b, observer } = yield* world
      const events: Array<string> = []
      const stand = (id: string, context: Context.Context<Lease.Leases>) =>
        Effect.never.pipe(
          Leader.forever("job", {
            onEvent: (event) =>
              Effect.sync(() => void events.push(`${id} ${event._tag === "Relinquished" ? event.why : event._tag}`))
          }),
          Effect.provideContext(context),
          Effect.forkScoped
        )
      yield* stand("a", a)
      yield* Sessions.eventually("a leads", Effect.sync(() => events.includes("a Elected")))
      yield* stand("b", b)
      yield* Sessions.pause(200)
      assert.isTrue(yield* Effect.provideContext(Lease.requestYield("job"), observer))
      yield* Sessions.eventually("b leads", Effect.sync(() => events.includes("b Elected")), 2000)
      assert.sameMembers(events, ["a Elected", "a yielded", "b Elected"])
    }).pipe(Effect.scoped))

  it.live("a leader that is gone is reported up to its expiry, by the server's clock, and no longer", () =>
    Effect.gen(function*() {
      const { a, observer, sql } = yield* world
      // Nobody renews it, and nobody releases it.
      const { token } = yield* Effect.provideContext(Lease.acquire("job"), a)
      const seen = yield* observe(observer)
      yield* Sessions.eventually("a is seen", Effect.sync(() => seen.at(-1) === "a"))
      const left = Effect.map(
        sql.unsafe<{ readonly left: string }>(
          "SELECT (extract(epoch FROM expires_at - clock_timestamp()) * 1000)::text AS left FROM worklease"
        ),
        ([row]) => Number(row.left)
      )
      yield* Sessions.eventually("nobody is seen", Effect.sync(() => seen.at(-1) === "nobody"))
      const remaining = yield* left
      assert.isBelow(remaining, 250)
      // And what a slow machine takes.
      assert.isAbove(remaining, -1500)
      assert.isTrue(Option.isNone(yield* Effect.provideContext(Lease.holder("job"), observer)))
      // To look has changed nothing.
      const [row] = yield* sql.unsafe<{ readonly fencing_token: bigint }>("SELECT fencing_token FROM worklease")
      assert.strictEqual(BigInt(row.fencing_token), token.fencingToken)
    }).pipe(Effect.scoped))

  for (const strength of ["KEY SHARE", "UPDATE"] as const) {
    it.live(`a leader whose row is locked (${strength}) is seen all the same`, () =>
      Effect.gen(function*() {
        const { a, observer, url } = yield* world
        yield* Effect.never.pipe(Leader.elect("job"), Effect.provideContext(a), Effect.forkScoped)
        yield* Lease.holder("job").pipe(Effect.repeat({ until: Option.isSome }), Effect.provideContext(a))
        yield* Sessions.lockRow(url, "job", strength)
        const held = yield* Effect.provideContext(Lease.holder("job"), observer)
        assert.strictEqual(Option.getOrThrow(held).holderId, "a")
      }).pipe(Effect.scoped))
  }

  it.live("since when it leads is the server's time of the election", () =>
    Effect.gen(function*() {
      const { a, observer, sql } = yield* world
      const now = Effect.map(
        sql.unsafe<{ readonly now: string }>("SELECT (extract(epoch FROM clock_timestamp()) * 1000)::text AS now"),
        ([row]) => Number(row.now)
      )
      const before = yield* now
      const fiber = yield* Effect.never.pipe(Leader.elect("job"), Effect.provideContext(a), Effect.forkChild)
      const held = yield* Lease.holder("job").pipe(
        Effect.repeat({ until: Option.isSome }),
        Effect.provideContext(observer)
      )
      const { holderId, since } = Option.getOrThrow(held)
      assert.strictEqual(holderId, "a")
      assert.isAtLeast(since, Math.floor(before))
      assert.isAtMost(since, yield* now)
      yield* Fiber.interrupt(fiber)
    }).pipe(Effect.scoped))
})
