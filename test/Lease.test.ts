import { assert, describe, it } from "@effect/vitest"
import {
  Cause,
  Clock,
  Context,
  Deferred,
  Duration,
  Effect,
  Exit,
  Fiber,
  Layer,
  Option,
  Ref,
  Schema,
  Scope
} from "effect"
import { TestClock } from "effect/testing"
import { Backend, Checkpoint, Lease, Renewal, Work, Worker } from "worklease"
import { BackendError, Other } from "worklease/LeaseError"
import { TestBackend } from "worklease/testing"
import * as Intercepted from "./support/Intercepted.ts"

const Counter = Work.make("counter", Checkpoint.make(Schema.Struct({ count: Schema.Int })))

const a = Effect.provide(Lease.layerWith({ holderId: "a" }))
const b = Effect.provide(Lease.layerWith({ holderId: "b" }))

const test = it.effect
const onTestBackend = Effect.provide(TestBackend.layer)
const intercepted = Effect.provide(Layer.provideMerge(Lease.layerWith({ holderId: "a" }), Intercepted.layer))

/** Occupies all places for batches in flight, with acquires whose calls take what the hook makes of them. */
const fillPlaces = Effect.forEach(
  ["place-1", "place-2"],
  (workId) =>
    Effect.forkChild(Effect.exit(Lease.acquire(workId))).pipe(
      Effect.tap(Effect.repeat(Effect.yieldNow, { times: 10 }))
    )
)

const operations = (log: ReadonlyArray<Intercepted.Sent>) => log.map((sent) => sent.operation)

describe("Lease", () => {
  test("inspect answers once for a work ID that is named twice", () =>
    Effect.gen(function*() {
      yield* Lease.acquire("job")
      assert.deepStrictEqual((yield* Lease.inspect(["job", "job"])).map(({ workId }) => workId), ["job"])
    }).pipe(a, onTestBackend))

  describe("holding", () => {
    test("renews for as long as it is held, first one renewal interval after the start", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        const fiber = yield* Effect.forkChild(Lease.withLease(Effect.never, "job"))
        yield* TestClock.adjust("9999 millis")
        assert.deepStrictEqual(operations(log), ["acquire"])
        yield* TestClock.adjust("1 millis")
        assert.deepStrictEqual(operations(log), ["acquire", "renew"])
        // Five ttl long.
        yield* TestClock.adjust("140 seconds")
        assert.strictEqual(operations(log).filter((_) => _ === "renew").length, 15)
        const held = yield* Effect.flip(b(Lease.acquire("job")))
        assert.strictEqual(held._tag, "LeaseHeld")
        yield* Fiber.interrupt(fiber)
      }).pipe(intercepted))

    test("renewals that fall due close together go in one statement, the first of them at its time", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        for (const workId of ["a", "b", "c"]) {
          yield* Lease.hold(workId)
          yield* TestClock.adjust("600 millis")
        }
        yield* Lease.hold("d")
        const renewals = () =>
          log.filter(({ operation }) => operation === "renew").map(({ items }) => items.map(({ workId }) => workId))
        // Taken at 0, 0.6, 1.2 and 1.8 s.
        yield* TestClock.adjust("8199 millis")
        assert.deepStrictEqual(renewals(), [])
        yield* TestClock.adjust("1 millis")
        assert.deepStrictEqual(renewals(), [["a", "b", "c"]])
        yield* TestClock.adjust("1799 millis")
        assert.deepStrictEqual(renewals().flat().sort(), ["a", "b", "c"])
        yield* TestClock.adjust("1 millis")
        assert.deepStrictEqual(renewals().flat().sort(), ["a", "b", "c", "d"])
        // From then on they fall due together.
        yield* TestClock.adjust("30 seconds")
        assert.isAtMost(renewals().length, 2 + 3 * 2)
      }).pipe(Effect.scoped, intercepted))

    test("a thousand leases are renewed in a few statements a round, and none is lost", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        const leases = yield* Effect.forEach(Array.from({ length: 1_000 }), (_, index) => Lease.hold(`${index}`))
        yield* TestClock.adjust("2 minutes")
        for (const lease of leases) assert.isAbove(Duration.toMillis(yield* lease.window), 15_000)
        const renewals = log.filter(({ operation }) => operation === "renew")
        assert.strictEqual(renewals.reduce((sum, { items }) => sum + items.length, 0), 12_000)
        assert.strictEqual(renewals.length, 24)
      }).pipe(Effect.scoped, intercepted))

    test("a checkpoint extends the lease too, so the next renewal is counted from it", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        yield* Worker.run(Counter.id("x"), (lease) =>
          Effect.forEach([1, 2, 3, 4, 5, 6, 7, 8], (count) =>
            Effect.andThen(Effect.sleep("6 seconds"), lease.checkpoint({ count })))).pipe(Effect.forkChild)
        yield* TestClock.adjust("48 seconds")
        assert.notInclude(operations(log), "renew")
        assert.strictEqual(
          operations(log).filter((_) =>
            _ === "checkpoint"
          ).length,
          8
        )
      }).pipe(intercepted))

    test("tells the window that is left: ttl minus safety margin, from before the last success was sent", () =>
      Effect.gen(function*() {
        const lease = yield* Lease.hold("job")
        assert.strictEqual(Duration.toMillis(yield* lease.window), 27_000)
        yield* TestClock.adjust("4 seconds")
        assert.strictEqual(Duration.toMillis(yield* lease.window), 23_000)
        yield* TestClock.adjust("6 seconds")
        assert.strictEqual(Duration.toMillis(yield* lease.window), 27_000)
      }).pipe(Effect.scoped, intercepted))

    test("the window is counted from before the acquire was sent, not from its answer", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((call) => Effect.delay(call, "2 seconds"))
        const fiber = yield* Effect.forkChild(Effect.scoped(Effect.flatMap(Lease.hold("job"), (_) => _.window)))
        yield* TestClock.adjust("10 seconds")
        assert.strictEqual(Duration.toMillis(yield* Fiber.join(fiber)), 25_000)
      }).pipe(intercepted))

    test("the same holder asking twice is refused", () =>
      Effect.gen(function*() {
        yield* Lease.hold("job")
        const error = yield* Effect.flip(Lease.acquire("job"))
        assert(error._tag === "LeaseHeld")
        assert.strictEqual(error.holderId, "a")
        assert.strictEqual(Duration.toMillis(error.retryAfter), 30_000)
      }).pipe(Effect.scoped, intercepted))

    test("a scope that closes releases: finished, abandoned or abandoned without counting", () =>
      Effect.gen(function*() {
        const leave = (exit: Exit.Exit<void, string>) =>
          Effect.exit(a(Effect.scoped(Effect.andThen(Lease.hold("job"), exit))))
        const prior = b(
          Effect.flatMap(Lease.acquire("job"), ({ prior, token }) => Effect.as(Lease.release(token, "yielded"), prior))
        )
        yield* leave(Exit.void)
        assert.strictEqual((yield* prior).exit, "finished")
        yield* leave(Exit.fail("broken"))
        assert.deepStrictEqual((({ exit, termsWithoutProgress }) => [exit, termsWithoutProgress])(yield* prior), [
          "abandoned",
          1
        ])
        yield* leave(Exit.interrupt())
        assert.deepStrictEqual((({ exit, termsWithoutProgress }) => [exit, termsWithoutProgress])(yield* prior), [
          "abandoned",
          1
        ])
      }).pipe(onTestBackend))

    test("nothing is left behind after the scope has closed: no fiber renews, no timer fires", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        yield* Effect.scoped(Lease.hold("job"))
        const before = log.length
        yield* TestClock.adjust("10 minutes")
        assert.strictEqual(log.length, before)
      }).pipe(intercepted))

    test("the release is sent after the work's finalizers have ended, and renewal goes on until then", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        const fiber = yield* Effect.forkChild(
          Worker.run("job", () => Effect.ensuring(Effect.never, Effect.sleep("2 minutes")))
        )
        yield* TestClock.adjust("1 second")
        const interruption = yield* Effect.forkChild(Fiber.interrupt(fiber))
        yield* TestClock.adjust("119 seconds")
        assert.notInclude(operations(log), "release")
        assert.isAtLeast(operations(log).filter((_) => _ === "renew").length, 11)
        yield* TestClock.adjust("1 second")
        yield* Fiber.join(interruption)
        assert.strictEqual(operations(log).at(-1), "release")
        yield* TestClock.adjust("1 minute")
        assert.strictEqual(operations(log).at(-1), "release")
      }).pipe(intercepted))

    test("a renewal in flight is stopped by the release, which frees the lease at once", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) => operation === "renew" ? Effect.never : call)
        const fiber = yield* Effect.forkChild(Worker.run("job", () => Effect.sleep("11 seconds")))
        yield* TestClock.adjust("11 seconds")
        yield* Fiber.join(fiber)
        assert.strictEqual((yield* b(Lease.acquire("job"))).prior.exit, "finished")
      }).pipe(intercepted))

    test("a renewal that arrives after the release does not revive the lease", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        const gate = yield* Deferred.make<void>()
        const late = yield* Ref.make<ReadonlyArray<unknown>>([])
        yield* intercept((call, { operation }) =>
          operation === "renew"
            ? Effect.uninterruptible(Effect.andThen(
              Deferred.await(gate),
              Effect.tap(call, (replies) => Ref.set(late, replies as ReadonlyArray<unknown>))
            ))
            : call
        )
        const fiber = yield* Effect.forkChild(Worker.run("job", () => Effect.sleep("11 seconds")))
        yield* TestClock.adjust("11 seconds")
        yield* Fiber.join(fiber)
        yield* Deferred.succeed(gate, undefined)
        yield* Effect.yieldNow
        assert.deepStrictEqual(yield* Ref.get(late), [{ _tag: "Expired" }])
        yield* b(Lease.acquire("job"))
      }).pipe(intercepted))
  })

  describe("losing it", () => {
    test("a taken-over lease interrupts the work and fails as LeaseLost with reason Fenced", () =>
      Effect.gen(function*() {
        const backend = yield* Backend.Backend
        const interrupted = yield* Ref.make(false)
        const held = yield* Deferred.make<Lease.AnyToken>()
        const fiber = yield* Lease.CurrentLease.use(({ token }) => Deferred.succeed(held, token)).pipe(
          Effect.andThen(Effect.never),
          Effect.onInterrupt(() => Ref.set(interrupted, true)),
          Lease.withLease("job"),
          a,
          Effect.forkChild
        )
        // Taken from it within its window, in which it relies on what it was last told.
        yield* backend.forget(yield* Deferred.await(held))
        const { token } = yield* b(Lease.acquire("job"))
        yield* TestClock.adjust("9999 millis")
        assert.isUndefined(fiber.pollUnsafe())
        yield* TestClock.adjust("1 millis")
        assert.isDefined(fiber.pollUnsafe())
        const error = Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))
        assert(error._tag === "LeaseLost")
        assert.strictEqual(error.reason._tag, "Fenced")
        assert.isTrue(yield* Ref.get(interrupted))
        // Nor has it released what is its successor's.
        yield* b(Lease.renew(token))
      }).pipe(onTestBackend))

    for (const [reply, reason] of [["Fenced", "Fenced"], ["Expired", "LeaseExpired"]] as const) {
      test(`a renewal answered ${reply} ends it at once, with reason ${reason}`, () =>
        Effect.gen(function*() {
          const { intercept, log } = yield* Intercepted.Intercepted
          yield* intercept((call, { operation }) =>
            operation === "renew" ? Effect.map(call, () => [{ _tag: reply }] as never) : call
          )
          const fiber = yield* Effect.forkChild(Lease.withLease(Effect.never, "job"))
          yield* TestClock.adjust("10 seconds")
          const error = Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))
          assert(error._tag === "LeaseLost")
          assert.strictEqual(error.reason._tag, reason)
          // Nothing more is said for the token, not even a release.
          yield* TestClock.adjust("1 minute")
          assert.deepStrictEqual(operations(log), ["acquire", "renew"])
        }).pipe(intercepted))
    }

    test("a transient renewal error is retried within the window, and one success resets it", () =>
      Effect.gen(function*() {
        const { intercept, restore } = yield* Intercepted.Intercepted
        const lease = yield* Lease.hold("job")
        yield* intercept((_, { operation }) => Effect.fail(Intercepted.unreachable(operation, "rejected")))
        yield* TestClock.adjust("25 seconds")
        yield* restore
        yield* TestClock.adjust("1500 millis")
        assert.isAbove(Duration.toMillis(yield* lease.window), 25_000)
        assert.strictEqual(
          yield* Effect.timeoutOption(lease.lost, 0).pipe(
            Effect.forkChild,
            Effect.flatMap((fiber) => Effect.andThen(TestClock.adjust(0), Fiber.join(fiber))),
            Effect.map(Option.isNone)
          ),
          true
        )
      }).pipe(Effect.scoped, intercepted))

    for (
      const [how, fault] of [
        ["does not answer", Effect.never],
        ["refuses", Effect.fail(Intercepted.unreachable("renew", "rejected"))],
        ["answers nothing certain", Effect.fail(Intercepted.unreachable("renew", "unknown"))],
        ["dies", Effect.die(new Error("a bug in the backend"))]
      ] as const
    ) {
      test(`work is interrupted when its window ends, although the backend ${how}`, () =>
        Effect.gen(function*() {
          const { intercept } = yield* Intercepted.Intercepted
          yield* intercept((call, { operation }) => operation === "renew" ? fault : call)
          const stoppedAt = yield* Ref.make(0)
          const fiber = yield* Effect.never.pipe(
            Effect.onInterrupt(() => Effect.flatMap(Clock.currentTimeMillis, (now) => Ref.set(stoppedAt, now))),
            Lease.withLease("job"),
            Effect.forkChild
          )
          yield* TestClock.adjust("26999 millis")
          assert.isUndefined(fiber.pollUnsafe())
          yield* TestClock.adjust("1 millis")
          const error = Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))
          assert(error._tag === "LeaseLost")
          assert.strictEqual(error.reason._tag, "WindowExhausted")
          assert.strictEqual(yield* Ref.get(stoppedAt), 27_000)
        }).pipe(intercepted))
    }

    test("after a loss nothing is sent for the token, but one best-effort release if only the window ran out", () =>
      Effect.gen(function*() {
        const { intercept, log } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) =>
          operation === "renew" ? Effect.fail(Intercepted.unreachable("renew", "rejected")) : call
        )
        const fiber = yield* Effect.forkChild(Lease.withLease(
          Effect.onInterrupt(Effect.never, () => Effect.sleep("1 minute")),
          "job"
        ))
        yield* TestClock.adjust("27 seconds")
        const sent = log.length
        yield* TestClock.adjust("59 seconds")
        assert.strictEqual(log.length, sent)
        yield* TestClock.adjust("1 second")
        yield* Fiber.await(fiber)
        assert.deepStrictEqual(operations(log.slice(sent)), ["release"])
      }).pipe(intercepted))

    test("a checkpoint that waits for a renewal is not sent once that has told of the loss", () =>
      Effect.gen(function*() {
        const { intercept, log } = yield* Intercepted.Intercepted
        const lease = yield* Lease.hold(Counter.id("x"))
        yield* intercept((call, { operation }) =>
          operation === "renew"
            ? Effect.delay(Effect.succeed([{ _tag: "Expired" as const }]) as unknown as typeof call, "1 second")
            : call
        )
        yield* TestClock.adjust("10 seconds")
        const fiber = yield* Effect.forkChild(lease.guard(lease.checkpoint({ count: 1 })), { startImmediately: true })
        yield* TestClock.adjust("1 second")
        assert.strictEqual((yield* Effect.flip(Fiber.join(fiber)))._tag, "LeaseLost")
        assert.deepStrictEqual(operations(log), ["acquire", "renew"])
      }).pipe(Effect.scoped, intercepted))

    test("a checkpoint that arrives after a later one does not move the window", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        const lease = yield* Lease.hold(Counter.id("x"))
        let calls = 0
        yield* intercept((call, { operation }) =>
          operation === "checkpoint" && ++calls === 1
            ? Effect.succeed([{ _tag: "Busy" as const }]) as unknown as typeof call
            : call
        )
        const first = yield* Effect.forkChild(lease.checkpoint({ count: 1 }), { startImmediately: true })
        yield* lease.checkpoint({ count: 2 })
        const window = Duration.toMillis(yield* lease.window)
        yield* TestClock.adjust("2 seconds")
        yield* Fiber.join(first)
        assert.strictEqual(calls, 3)
        assert.strictEqual(Duration.toMillis(yield* lease.window), window - 2_000)
      }).pipe(Effect.scoped, intercepted))

    test("nor does one that arrives after a later one whose caller did not wait for the answer", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        const lease = yield* Lease.hold(Counter.id("x"))
        let calls = 0
        yield* intercept((call, { operation }) => {
          if (operation !== "checkpoint") return call
          calls++
          return calls === 1
            ? Effect.succeed([{ _tag: "Busy" as const }]) as unknown as typeof call
            : calls === 2
            ? Effect.andThen(call, Effect.never)
            : call
        })
        const first = yield* Effect.forkChild(lease.checkpoint({ count: 1 }), { startImmediately: true })
        const second = yield* Effect.forkChild(lease.checkpoint({ count: 2 }), { startImmediately: true })
        yield* Fiber.interrupt(second)
        const window = Duration.toMillis(yield* lease.window)
        yield* TestClock.adjust("2 seconds")
        yield* Fiber.join(first)
        assert.strictEqual(calls, 3)
        assert.strictEqual(Duration.toMillis(yield* lease.window), window - 2_000)
      }).pipe(Effect.scoped, intercepted))

    test("nor does one that arrives after a later one in a transaction whose commit was not answered yet", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        const backend = yield* Backend.Backend
        const InTransaction = Context.Reference("test/InTransaction", { defaultValue: () => false })
        const committed: Array<Effect.Effect<void>> = []
        const leases = Layer.provide(
          Lease.layerWith({ holderId: "a" }),
          Layer.succeed(Backend.Backend, {
            ...backend,
            transaction: Option.some({
              isOpen: Effect.flatMap(InTransaction, Effect.succeed),
              afterCommit: (effect: Effect.Effect<void>) => Effect.sync(() => void committed.push(effect)),
              outside: Effect.provideService(InTransaction, false),
              exclusive: false
            })
          })
        )
        yield* Effect.gen(function*() {
          const lease = yield* Lease.hold(Counter.id("x"))
          let calls = 0
          yield* intercept((call, { operation }) =>
            operation === "checkpoint" && ++calls === 1
              ? Effect.succeed([{ _tag: "Busy" as const }]) as unknown as typeof call
              : call
          )
          const first = yield* Effect.forkChild(lease.checkpoint({ count: 1 }), { startImmediately: true })
          yield* Effect.provideService(lease.checkpoint({ count: 2 }), InTransaction, true)
          const window = Duration.toMillis(yield* lease.window)
          yield* TestClock.adjust("2 seconds")
          yield* Fiber.join(first)
          assert.strictEqual(calls, 3)
          assert.strictEqual(Duration.toMillis(yield* lease.window), window - 2_000)
          for (const effect of committed) yield* effect
          assert.strictEqual(Duration.toMillis(yield* lease.window), window - 2_000)
        }).pipe(Effect.scoped, Effect.provide(leases))
      }).pipe(Effect.provide(Intercepted.layer)))

    test("an operation of a lost lease does not return, so that no catch or ignore carries on after it", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) => operation === "renew" ? Effect.never : call)
        const lease = yield* Lease.hold(Counter.id("x"))
        yield* TestClock.adjust("1 minute")
        const returned = yield* Ref.make<ReadonlyArray<number>>([])
        const fibers = yield* Effect.forEach(
          [lease.checkpoint({ count: 1 }), lease.handOff({ count: 1 }), lease.lost],
          (operation, index) =>
            Effect.forkChild(Effect.andThen(Effect.ignoreCause(operation), Ref.update(returned, (_) => [..._, index])))
        )
        yield* TestClock.adjust("1 minute")
        // Only `lost` returns: it tells of the loss.
        assert.deepStrictEqual(yield* Ref.get(returned), [2])
        yield* Effect.forEach(fibers, Fiber.interrupt)
      }).pipe(Effect.scoped, intercepted))

    test("lost work ends, although it waits for its children's checkpoints in an uninterruptible part", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) => operation === "renew" ? Effect.never : call)
        const fiber = yield* Worker.run(Counter.id("x"), (work) =>
          Effect.uninterruptible(Effect.andThen(
            Effect.sleep("28 seconds"),
            Effect.forEach([1, 2, 3], (count) => work.checkpoint({ count }), { concurrency: 2 })
          ))).pipe(Effect.forkChild)
        yield* TestClock.adjust("40 seconds")
        assert.strictEqual(Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))._tag, "LeaseLost")
      }).pipe(intercepted))

    test("a guard ends with its lease: the release waits for what runs in it elsewhere", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        const scope = yield* Scope.make()
        const lease = yield* Scope.provide(Lease.hold("job"), scope)
        const events: Array<string> = []
        const elsewhere = yield* Effect.never.pipe(
          Effect.onInterrupt(() => Effect.sync(() => events.push(`ended before release: ${log.length === 1}`))),
          lease.guard,
          Effect.forkChild({ startImmediately: true })
        )
        yield* Scope.close(scope, Exit.void)
        assert.deepStrictEqual(events, ["ended before release: true"])
        yield* Fiber.await(elsewhere)
        assert.isTrue(Exit.hasInterrupts(yield* Effect.exit(lease.guard(Effect.void))))
        assert.strictEqual(Duration.toMillis(yield* lease.window), 0)
      }).pipe(intercepted))

    test("work that is still under way when its layer closes is released first", () =>
      Effect.gen(function*() {
        const running = yield* Deferred.make<void>()
        // As in a program that forks its workers, and is interrupted by a signal.
        const program = yield* Effect.gen(function*() {
          yield* Effect.forkChild(
            Worker.run("job", () => Effect.andThen(Deferred.succeed(running, undefined), Effect.never))
          )
          return yield* Effect.never
        }).pipe(a, Effect.forkChild)
        yield* Deferred.await(running)
        yield* Fiber.interrupt(program)
        const { prior } = yield* b(Lease.acquire("job"))
        assert.deepStrictEqual([prior.exit, prior.termsWithoutProgress], ["abandoned", 0])
      }).pipe(onTestBackend))

    test("an operation of a lost lease stays interruptible, even in an uninterruptible region", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) => operation === "renew" ? Effect.never : call)
        const lease = yield* Lease.hold(Counter.id("x"))
        yield* TestClock.adjust("1 minute")
        const fiber = yield* Effect.forkChild(Effect.uninterruptible(lease.checkpoint({ count: 1 })))
        yield* TestClock.adjust("1 minute")
        assert.isUndefined(fiber.pollUnsafe())
        yield* Fiber.interrupt(fiber)
      }).pipe(Effect.scoped, intercepted))

    test("a checkpoint that was queued before the loss is not sent after it", () =>
      Effect.gen(function*() {
        const { intercept, log } = yield* Intercepted.Intercepted
        const others = yield* Effect.forEach([1, 2], (n) => Lease.acquire(Counter.id(`${n}`)))
        yield* intercept((call, { operation }) =>
          operation === "renew"
            ? Effect.fail(new BackendError({ operation, outcome: "rejected", reason: new Other({}) }))
            : operation === "checkpoint"
            ? Effect.never
            : call
        )
        yield* Effect.forkChild(Worker.run(Counter.id("x"), (work) =>
          Effect.andThen(Effect.sleep("26900 millis"), Effect.uninterruptible(work.checkpoint({ count: 1 })))))
        yield* TestClock.adjust("26 seconds")
        for (const { token } of others) {
          yield* Effect.forkChild(Effect.exit(Lease.checkpoint(token, { count: 0 })))
          yield* Effect.repeat(Effect.yieldNow, { times: 10 })
        }
        yield* TestClock.adjust("30 seconds")
        const checkpointed = log.filter((_) =>
          _.operation === "checkpoint"
        ).flatMap((_) => _.items.map((_) => _.workId))
        assert.include(checkpointed, "counter:2")
        assert.notInclude(checkpointed, "counter:x")
      }).pipe(intercepted))

    it.live("withLease: an effect that blocked the event loop past its window and then returned is lost", () =>
      Effect.gen(function*() {
        const policy = Renewal.makeUnsafe({ ttl: 60 })
        const block = Effect.sync(() => {
          const start = process.hrtime.bigint()
          while (process.hrtime.bigint() - start < 80_000_000n) { /* as a long computation does */ }
        })
        const error = yield* Effect.flip(Lease.withLease(block, "job", { policy }))
        assert.strictEqual(error._tag, "LeaseLost")
      }).pipe(intercepted))

    test("work that ignores every error it can see is lost all the same", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) =>
          operation === "acquire" ? call : Effect.fail(Intercepted.unreachable(operation, "unknown"))
        )
        const fiber = yield* Worker.run(Counter.id("x"), (lease) =>
          lease.checkpoint({ count: 1 }).pipe(Effect.ignoreCause, Effect.delay("1 second"), Effect.forever)).pipe(
            Effect.forkChild
          )
        yield* TestClock.adjust("30 seconds")
        assert.strictEqual(Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))._tag, "LeaseLost")
      }).pipe(intercepted))

    test("work that cannot be interrupted and returns after its window ended is lost, not finished", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) => operation === "renew" ? Effect.never : call)
        const fiber = yield* Effect.uninterruptible(Effect.as(Effect.sleep("28 seconds"), "done")).pipe(
          (work) => Worker.run("job", () => work),
          Effect.forkChild
        )
        yield* TestClock.adjust("40 seconds")
        assert.strictEqual(Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))._tag, "LeaseLost")
      }).pipe(intercepted))

    test("the work's own error stays in the cause, after the loss", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) => operation === "renew" ? Effect.never : call)
        const fiber = yield* Effect.uninterruptible(
          Effect.andThen(Effect.sleep("28 seconds"), Effect.fail("my own error"))
        ).pipe(Lease.withLease("job"), Effect.forkChild)
        yield* TestClock.adjust("40 seconds")
        const exit = yield* Fiber.await(fiber)
        assert(Exit.isFailure(exit))
        const failures = exit.cause.reasons.filter(Cause.isFailReason).map((reason) => reason.error)
        assert.strictEqual(failures.length, 2)
        assert.strictEqual((failures[0] as { readonly _tag: string })._tag, "LeaseLost")
        assert.strictEqual(failures[1], "my own error")
      }).pipe(intercepted))

    test("the loss can be caught, although the work died", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) => operation === "renew" ? Effect.never : call)
        const fiber = yield* Effect.uninterruptible(
          Effect.andThen(Effect.sleep("28 seconds"), Effect.die("my own defect"))
        ).pipe(
          Lease.withLease("job"),
          Effect.catchTag("LeaseLost", (error) => Effect.succeed(error.reason._tag)),
          Effect.forkChild
        )
        yield* TestClock.adjust("40 seconds")
        assert.strictEqual(yield* Fiber.join(fiber), "WindowExhausted")
      }).pipe(intercepted))

    test("a step of the wall clock forward ends a term early at most; a step back changes nothing", () =>
      Effect.gen(function*() {
        const clock = yield* Clock.Clock
        let step = 0
        yield* Effect.gen(function*() {
          const lease = yield* Lease.hold("job")
          yield* TestClock.adjust("1 second")
          step = 10_000
          assert.strictEqual(Duration.toMillis(yield* lease.window), 16_000)
          step = -24 * 3600_000
          assert.strictEqual(Duration.toMillis(yield* lease.window), 26_000)
        }).pipe(
          Effect.scoped,
          Effect.provide(Lease.layerWith({ holderId: "a" })),
          Effect.provideService(Clock.Clock, {
            ...clock,
            currentTimeMillisUnsafe: () => clock.currentTimeMillisUnsafe() + step
          })
        )
      }).pipe(onTestBackend))
  })

  describe("lost replies", () => {
    test("the same attempt, sent again, gets the lease that was already taken: no LeaseHeld for a ttl", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        yield* backend.loseReplies("a", 1)
        const fiber = yield* Effect.forkChild(a(Lease.acquire("job")))
        yield* TestClock.adjust("100 millis")
        const { token } = yield* Fiber.join(fiber)
        const held = yield* Effect.flip(b(Lease.acquire("job")))
        assert(held._tag === "LeaseHeld")
        assert.strictEqual(token.fencingToken, 1n)
      }).pipe(onTestBackend))

    test("a renewal, a checkpoint, a release and a forget get the answer that was lost", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Counter.id("x"))
          const retried = <A, E>(effect: Effect.Effect<A, E, Lease.Leases>) =>
            Effect.gen(function*() {
              yield* backend.loseReplies("a", 2)
              const fiber = yield* Effect.forkChild(effect)
              yield* TestClock.adjust("1 second")
              return yield* Fiber.join(fiber)
            })
          yield* retried(Lease.renew(token))
          yield* retried(Lease.checkpoint(token, { count: 1 }))
          assert.deepStrictEqual(yield* retried(Lease.readCheckpoint(token)), Option.some({ count: 1 }))
          yield* retried(Lease.release(token, "finished", { count: 2 }))
          const next = yield* Lease.acquire(Counter.id("x"))
          assert.strictEqual(next.prior.exit, "finished")
          assert.deepStrictEqual(next.prior.state, Option.some({ count: 2 }))
          yield* retried(Lease.forget(next.token))
          assert.strictEqual((yield* Lease.acquire(Counter.id("x"))).prior.exit, "none")
        }).pipe(a)
      }).pipe(onTestBackend))

    test("a lift gets the answer that was lost", () =>
      Effect.gen(function*() {
        const backend = yield* Backend.Backend
        yield* a(Effect.flip(Worker.run("job", () => Effect.fail("in vain"))))
        let sent = 0
        const losing = Backend.Backend.of({
          ...backend,
          lift: (workId) =>
            Effect.flatMap(
              backend.lift(workId),
              (known) => sent++ < 2 ? Effect.fail(Intercepted.unreachable("lift", "unknown")) : Effect.succeed(known)
            )
        })
        const fiber = yield* Lease.lift("job").pipe(
          a,
          Effect.provideService(Backend.Backend, losing),
          Effect.forkChild
        )
        yield* TestClock.adjust("1 second")
        assert.isTrue(yield* Fiber.join(fiber))
        assert.strictEqual(sent, 3)
        yield* a(Lease.acquire("job", { quarantineAfter: 1 }))
      }).pipe(onTestBackend))

    test("a release whose reply was lost succeeds, although a successor has already begun", () =>
      Effect.gen(function*() {
        const { intercept, restore } = yield* Intercepted.Intercepted
        const context = yield* Effect.context<Backend.Backend>()
        const { token } = yield* Lease.acquire("job")
        const successor = yield* Deferred.make<Lease.Prior<never>>()
        yield* intercept((call, { operation }) =>
          operation !== "release" ? call : call.pipe(
            Effect.andThen(restore),
            Effect.andThen(Effect.flatMap(b(Lease.acquire("job")), ({ prior }) => Deferred.succeed(successor, prior))),
            Effect.orDie,
            Effect.provideContext(context),
            Effect.andThen(Effect.fail(Intercepted.unreachable("release", "unknown")))
          )
        )
        const fiber = yield* Effect.forkChild(Lease.release(token, "finished"))
        yield* TestClock.adjust("1 second")
        yield* Fiber.join(fiber)
        assert.strictEqual((yield* Deferred.await(successor)).exit, "finished")
      }).pipe(intercepted))

    test("an outcome that stays unknown is said to be unknown, although a later sending was rejected", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        let sent = 0
        yield* intercept((_, { operation }) =>
          Effect.suspend(() => Effect.fail(Intercepted.unreachable(operation, sent++ === 0 ? "unknown" : "rejected")))
        )
        const fiber = yield* Effect.forkChild(Lease.acquire("job"))
        yield* TestClock.adjust("1 minute")
        const error = Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))
        assert(error._tag === "BackendError")
        assert.strictEqual(error.outcome, "unknown")
        assert.strictEqual(error.workId, "job")
        assert.isAbove(sent, 2)
      }).pipe(intercepted))

    test("whatever the reason, an operation whose outcome is unknown is sent again", () =>
      Effect.gen(function*() {
        const { intercept, restore } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) =>
          Effect.andThen(
            Effect.andThen(call, restore),
            Effect.fail(new BackendError({ operation, outcome: "unknown", reason: new Other({}) }))
          )
        )
        const fiber = yield* Effect.forkChild(Lease.acquire("job"))
        yield* TestClock.adjust("1 second")
        assert.strictEqual((yield* Fiber.join(fiber)).token.fencingToken, 1n)
      }).pipe(intercepted))

    test("an attempt that meets its own earlier sending, still on its way, is not refused by it", () =>
      Effect.gen(function*() {
        const { intercept, restore } = yield* Intercepted.Intercepted
        let sent = 0
        yield* intercept((call, { operation }) =>
          Effect.suspend(() => {
            if (operation !== "acquire") return call
            sent++
            if (sent === 1) return Effect.andThen(call, Effect.fail(Intercepted.unreachable("acquire", "unknown")))
            return sent === 2 ? Effect.as(restore, [{ _tag: "Contended" }] as never) : call
          })
        )
        const fiber = yield* Effect.forkChild(Lease.acquire("job"))
        yield* TestClock.adjust("1 second")
        assert.strictEqual((yield* Fiber.join(fiber)).token.fencingToken, 1n)
      }).pipe(intercepted))

    test("a rejected acquire fails at once", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((_, { operation }) => Effect.fail(Intercepted.unreachable(operation, "rejected")))
        const error = yield* Effect.flip(Lease.acquire("job"))
        assert(error._tag === "BackendError")
        assert.strictEqual(error.outcome, "rejected")
      }).pipe(intercepted))
  })

  describe("hearing that it was asked to yield", () => {
    const others = Effect.provide(Lease.layerWith({ holderId: "others" }))

    /** Leases over the memory backend, and whether they listen to its hints. */
    const overHints = (
      subscribe: (backend: Backend.Backend["Service"]) => Backend.Backend["Service"]["yieldRequests"]
    ) =>
      Effect.map(Backend.Backend, (backend) => {
        const opened = { now: 0, ever: 0 }
        const counted = Effect.acquireRelease(
          Effect.sync(() => {
            opened.now++
            opened.ever++
          }),
          () => Effect.sync(() => opened.now--)
        )
        const yieldRequests = Option.map(subscribe(backend), (next) => Effect.andThen(counted, next))
        const layer = Lease.layerWith({ holderId: "a" }).pipe(
          Layer.provide(Layer.succeed(Backend.Backend, Backend.Backend.of({ ...backend, yieldRequests })))
        )
        return { opened, layer }
      })

    test("a lease that has been held for a second is renewed at once, and no other", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        const lease = yield* Lease.hold("job")
        yield* Lease.hold("another")
        yield* TestClock.adjust("1 second")
        assert.lengthOf(log, 2)
        assert.isTrue(yield* others(Lease.requestYield("job", { deadline: "20 seconds" })))
        yield* lease.awaitYieldRequest
        assert.deepStrictEqual(log.slice(2).map(({ items, operation }) => [operation, items.map((_) => _.workId)]), [
          ["renew", ["job"]]
        ])
        // A later request replaces the deadline.
        const failed = yield* Effect.forkChild(Effect.exit(lease.guard(Effect.never)))
        assert.isTrue(yield* others(Lease.requestYield("job", { deadline: "3 seconds" })))
        yield* TestClock.adjust("3 seconds")
        assert.isTrue(Exit.isFailure(yield* Fiber.join(failed)))
      }).pipe(Effect.scoped, intercepted))

    test("one that has not hears of it with its next renewal", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        const lease = yield* Lease.hold("job")
        yield* TestClock.adjust("990 millis")
        yield* Effect.repeat(others(Lease.requestYield("job")), { times: 10 })
        yield* TestClock.adjust("9 seconds")
        assert.isFalse(yield* lease.yieldRequested)
        assert.deepStrictEqual(operations(log), ["acquire"])
        yield* TestClock.adjust("10 millis")
        assert.isTrue(yield* lease.yieldRequested)
      }).pipe(Effect.scoped, intercepted))

    test("a hint that is lost costs time: the request comes with the next renewal", () =>
      Effect.gen(function*() {
        const { layer, opened } = yield* overHints(() => Option.some(Effect.succeed(Effect.never)))
        yield* Effect.gen(function*() {
          const lease = yield* Lease.hold("job")
          yield* TestClock.adjust("2 seconds")
          assert.strictEqual(opened.now, 1)
          yield* others(Lease.requestYield("job"))
          yield* TestClock.adjust("7999 millis")
          assert.isFalse(yield* lease.yieldRequested)
          yield* TestClock.adjust("1 millis")
          assert.isTrue(yield* lease.yieldRequested)
        }).pipe(Effect.scoped, Effect.provide(layer))
      }).pipe(onTestBackend))

    test("a hint proves nothing: without a request nobody is asked", () =>
      Effect.gen(function*() {
        const { layer } = yield* overHints(() =>
          Option.some(Effect.succeed(Effect.delay(Effect.succeed("job"), "3 seconds")))
        )
        yield* Effect.gen(function*() {
          const lease = yield* Lease.hold("job")
          yield* TestClock.adjust("1 minute")
          assert.isFalse(yield* lease.yieldRequested)
          assert.isAbove(Duration.toMillis(yield* lease.window), 23_000)
        }).pipe(Effect.scoped, Effect.provide(layer))
      }).pipe(onTestBackend))

    test("one that comes while a renewal is in flight is followed by another", () =>
      Effect.gen(function*() {
        const { intercept, log } = yield* Intercepted.Intercepted
        const lease = yield* Lease.hold("job")
        yield* intercept((call, { operation }) =>
          // It was applied before the request, and its reply is slow.
          operation === "renew"
            ? Effect.flatMap(call, (reply) => Effect.delay(Effect.succeed(reply), "1 second"))
            : call
        )
        yield* TestClock.adjust("10 seconds")
        for (let i = 0; i < 5; i++) {
          yield* others(Lease.requestYield("job"))
          yield* TestClock.adjust("100 millis")
        }
        yield* TestClock.adjust("499 millis")
        assert.deepStrictEqual(operations(log), ["acquire", "renew"])
        yield* TestClock.adjust("1001 millis")
        assert.isTrue(yield* lease.yieldRequested)
        assert.deepStrictEqual(operations(log), ["acquire", "renew", "renew"])
      }).pipe(Effect.scoped, intercepted))

    test("it listens while it has a lease that it has held for a second, and to nothing for short ones", () =>
      Effect.gen(function*() {
        const { layer, opened } = yield* overHints((backend) => backend.yieldRequests)
        yield* Effect.gen(function*() {
          for (let i = 0; i < 20; i++) {
            const short = yield* Effect.forkChild(Lease.withLease(Effect.sleep("980 millis"), `short ${i}`))
            yield* TestClock.adjust("700 millis")
            if (i % 2 === 1) yield* TestClock.adjust("1 second")
            if (i % 2 === 1) yield* Fiber.join(short)
          }
          assert.strictEqual(opened.ever, 0)
          const scope = yield* Scope.make()
          yield* Scope.provide(Lease.hold("long"), scope)
          yield* TestClock.adjust("2 seconds")
          assert.deepStrictEqual(opened, { now: 1, ever: 1 })
          yield* Effect.forkChild(Lease.withLease(Effect.sleep("980 millis"), "short"))
          yield* TestClock.adjust("5 minutes")
          assert.deepStrictEqual(opened, { now: 1, ever: 1 })
          yield* Scope.close(scope, Exit.void)
          yield* TestClock.adjust("1 millis")
          assert.deepStrictEqual(opened, { now: 0, ever: 1 })
        }).pipe(Effect.provide(layer))
      }).pipe(onTestBackend))

    test("it ends with its layer", () =>
      Effect.gen(function*() {
        const { layer, opened } = yield* overHints((backend) => backend.yieldRequests)
        yield* Effect.gen(function*() {
          yield* Effect.forkChild(Worker.run("job", () => Effect.never))
          yield* TestClock.adjust("2 seconds")
          assert.strictEqual(opened.now, 1)
        }).pipe(Effect.provide(layer))
        assert.strictEqual(opened.now, 0)
      }).pipe(onTestBackend))
  })

  describe("acquiring", () => {
    test("an acquire that returns with no window left fails, gives the lease back, and hides no prior", () =>
      Effect.gen(function*() {
        const { intercept, restore } = yield* Intercepted.Intercepted
        const policy = Renewal.makeUnsafe({
          ttl: "9 seconds",
          safetyMargin: "5 seconds",
          operationTimeout: "3 seconds",
          renewEvery: 500
        })
        yield* Worker.run("job", (lease) => lease.leaveAs("retired"))
        // The answer to the second sending is the first one's, whose window has ended by then.
        let sent = 0
        yield* intercept((call, { operation }) =>
          operation === "acquire"
            ? Effect.suspend(() =>
              sent++ === 0
                ? Effect.andThen(call, Effect.fail(Intercepted.unreachable("acquire", "unknown"))).pipe(
                  Effect.delay("2900 millis")
                )
                : Effect.tap(call, () => Effect.sleep("2 seconds"))
            )
            : call
        )
        const fiber = yield* Effect.forkChild(Lease.acquire("job", { policy }))
        yield* TestClock.adjust("20 seconds")
        const error = Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))
        assert.strictEqual(error._tag, "WindowExhausted")
        yield* restore
        const { prior, token } = yield* Lease.acquire("job")
        assert.strictEqual(prior.exit, "retired")
        assert.isAbove(Number(token.fencingToken), 2)
      }).pipe(intercepted))

    test("an interrupted acquire that was not yet answered is given back as soon as it is", () =>
      Effect.gen(function*() {
        const { intercept, log } = yield* Intercepted.Intercepted
        yield* intercept((call, { operation }) =>
          operation === "acquire" ? Effect.tap(call, () => Effect.sleep("3 seconds")) : call
        )
        const fiber = yield* Effect.forkChild(Lease.acquire("job"))
        yield* TestClock.adjust("1 second")
        const interruption = yield* Effect.forkChild(Fiber.interrupt(fiber))
        yield* TestClock.adjust("2 seconds")
        yield* Fiber.join(interruption)
        assert.deepStrictEqual(operations(log), ["acquire", "release"])
        assert.strictEqual((yield* Fiber.await(fiber))._tag, "Failure")
        const again = yield* Effect.forkChild(Lease.acquire("job"))
        yield* TestClock.adjust("3 seconds")
        assert.strictEqual((yield* Fiber.join(again)).prior.exit, "none")
      }).pipe(intercepted))

    test("an acquire that is interrupted in the queue is never sent", () =>
      Effect.gen(function*() {
        const { intercept, log } = yield* Intercepted.Intercepted
        yield* intercept((call) => Effect.delay(call, "1 second"))
        const places = yield* fillPlaces
        assert.strictEqual(log.length, 2)
        const queued = yield* Effect.forkChild(Lease.acquire("job"), { startImmediately: true })
        yield* Fiber.interrupt(queued)
        yield* TestClock.adjust("10 seconds")
        yield* Effect.forEach(places, Fiber.join)
        assert.deepStrictEqual(log.flatMap((sent) => sent.items.map((item) => item.workId)), [
          "place-1",
          "place-2"
        ])
      }).pipe(intercepted))

    test("a prior state that cannot be decoded is given back; the bytes stay", () =>
      Effect.gen(function*() {
        const other = Work.make("counter", Checkpoint.make(Schema.Struct({ count: Schema.String })))
        yield* Worker.run(Counter.id("x"), (lease) => lease.checkpoint({ count: 5 }))
        for (
          const attempt of [
            Lease.acquire(other.id("x")),
            Effect.scoped(Lease.hold(other.id("x"))),
            Worker.run(other.id("x"), () => Effect.die("never starts"))
          ]
        ) {
          const error = yield* Effect.flip(attempt as Effect.Effect<unknown, { readonly _tag: string }, Lease.Leases>)
          assert.strictEqual(error._tag, "CheckpointDecodeError")
        }
        const prior = yield* Worker.run(Counter.id("x"), (lease) => Effect.succeed(lease.prior))
        assert.deepStrictEqual(prior.state, Option.some({ count: 5 }))
        assert.strictEqual(prior.exit, "finished")
      }).pipe(intercepted))

    test("the lease is lost while the prior state is decoded: the work never starts", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        const stored = yield* Checkpoint.make(Schema.Int).encode("w:x", 1)
        const hanging: Checkpoint.Checkpoint<number> = {
          ...Checkpoint.make(Schema.Int),
          decode: () => Effect.never,
          encode: () => Effect.succeed(stored)
        }
        const work = Work.make("w", hanging)
        yield* Worker.run(work.id("x"), (lease) => lease.checkpoint(1))
        yield* intercept((call, { operation }) => operation === "renew" ? Effect.never : call)
        const fiber = yield* Effect.forkChild(Worker.run(work.id("x"), () => Effect.die("never starts")))
        yield* TestClock.adjust("5 minutes")
        assert.strictEqual(Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))._tag, "LeaseLost")
      }).pipe(intercepted))

    test("a plain work ID has no state, and leaves that of others as it is", () =>
      Effect.gen(function*() {
        yield* Worker.run(Counter.id("x"), (lease) => lease.checkpoint({ count: 5 }))
        const prior = yield* Worker.run("counter:x", (lease) => Effect.succeed(lease.prior))
        assert.deepStrictEqual(prior.state, Option.none())
        assert.deepStrictEqual(
          yield* Worker.run(Counter.id("x"), (lease) => Effect.succeed(lease.prior.state)),
          Option.some({ count: 5 })
        )
      }).pipe(intercepted))

    for (
      const [why, workId] of [
        ["Empty", ""],
        ["TooLong", "x".repeat(513)],
        ["TooLong", "é".repeat(257)],
        ["ContainsNul", "a\0b"],
        ["LoneSurrogate", "a\ud800b"]
      ] as const
    ) {
      test(`refuses a work ID that is ${why} (${workId.length} characters) before anything is sent`, () =>
        Effect.gen(function*() {
          const { log } = yield* Intercepted.Intercepted
          for (
            const effect of [
              Lease.acquire(workId),
              Effect.scoped(Lease.hold(workId)),
              Lease.withLease(Effect.void, workId),
              Worker.run(workId, () => Effect.void),
              Lease.requestYield(workId)
            ]
          ) {
            const error = yield* Effect.flip(effect as Effect.Effect<unknown, { readonly _tag: string }, Lease.Leases>)
            assert.strictEqual(error._tag, "InvalidWorkId")
            assert.strictEqual((error as unknown as { readonly why: string }).why, why)
          }
          assert.deepStrictEqual(log, [])
        }).pipe(intercepted))
    }

    test("accepts work IDs of 512 bytes, and of surrogate pairs", () =>
      Effect.gen(function*() {
        yield* Lease.acquire("é".repeat(256))
        yield* Lease.acquire("👩‍🚀")
      }).pipe(intercepted))
  })

  describe("waiting", () => {
    test("takes an expired lease within 25 ms of the holder's expiry", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        yield* a(Lease.acquire("job"))
        yield* backend.sever("a")
        const fiber = yield* Effect.forkChild(
          b(Effect.andThen(Lease.acquire("job", { wait: true }), Clock.currentTimeMillis))
        )
        yield* TestClock.adjust("29999 millis")
        assert.isUndefined(fiber.pollUnsafe())
        yield* TestClock.adjust("26 millis")
        assert.isAtLeast(yield* Fiber.join(fiber), 30_000)
      }).pipe(onTestBackend))

    test("takes a released lease at once, where the backend gives hints", () =>
      Effect.gen(function*() {
        const { token } = yield* Lease.acquire("job")
        const fiber = yield* Effect.forkChild(Lease.acquire("job", { wait: true }))
        yield* TestClock.adjust("10 seconds")
        yield* Lease.release(token, "yielded")
        const { prior } = yield* Fiber.join(fiber)
        assert.strictEqual(prior.exit, "yielded")
      }).pipe(a, onTestBackend))

    test("misses no release between its first refusal and its subscription to hints", () =>
      Effect.gen(function*() {
        const { intercept, restore } = yield* Intercepted.Intercepted
        const context = yield* Effect.context<Lease.Leases>()
        const { token } = yield* Lease.acquire("job")
        const release = Effect.provideContext(Effect.orDie(Lease.release(token, "finished")), context)
        yield* intercept((call, { operation }) =>
          operation === "acquire" ? Effect.tap(call, () => Effect.andThen(restore, release)) : call
        )
        yield* Lease.acquire("job", { wait: true })
      }).pipe(intercepted))

    test("takes a released lease within the poll interval, where it gives none", () =>
      Effect.gen(function*() {
        const { token } = yield* Lease.acquire("job")
        const fiber = yield* Effect.forkChild(Lease.acquire("job", { wait: true }))
        yield* TestClock.adjust("10 seconds")
        yield* Lease.release(token, "yielded")
        yield* TestClock.adjust("2 seconds")
        yield* Fiber.join(fiber)
      }).pipe(
        Effect.provide(
          Lease.layerWith({ pollInterval: "2 seconds" }).pipe(
            Layer.provide(Layer.effect(
              Backend.Backend,
              Effect.map(Backend.Backend, (backend) => ({ ...backend, wakeups: Option.none() }))
            ))
          )
        ),
        onTestBackend
      ))

    test("a hundred waiters: one winner each time, and every one gets its turn", () =>
      Effect.gen(function*() {
        let holding = 0
        const most = yield* Ref.make(0)
        const turn = Lease.withLease(
          Effect.gen(function*() {
            holding++
            yield* Ref.update(most, (_) => Math.max(_, holding))
            yield* Effect.sleep("10 millis")
            holding--
          }),
          "job",
          { wait: true }
        )
        const fiber = yield* Effect.forkChild(
          Effect.forEach(Array.from({ length: 100 }), () => turn, { concurrency: "unbounded", discard: true })
        )
        yield* TestClock.adjust("10 seconds")
        yield* Fiber.join(fiber)
        assert.strictEqual(yield* Ref.get(most), 1)
      }).pipe(a, onTestBackend))

    test("only LeaseHeld keeps it waiting", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* Lease.acquire("job")
        yield* intercept((_, { operation }) =>
          Effect.fail(new BackendError({ operation, outcome: "rejected", reason: new Other({}) }))
        )
        const error = yield* Effect.flip(Lease.acquire("job", { wait: true }))
        assert.strictEqual(error._tag, "BackendError")
      }).pipe(intercepted))

    test("an interrupted waiter leaves nothing behind", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        const { token } = yield* Lease.acquire("job")
        const fiber = yield* Effect.forkChild(Lease.acquire("job", { wait: true }))
        yield* TestClock.adjust("5 seconds")
        yield* Fiber.interrupt(fiber)
        yield* Lease.release(token, "finished")
        const sent = log.length
        yield* TestClock.adjust("1 minute")
        assert.strictEqual(log.length, sent)
      }).pipe(intercepted))
  })

  describe("waiting in one process", () => {
    const acquiresOf = (log: ReadonlyArray<Intercepted.Sent>) =>
      operations(log).filter((operation) => operation === "acquire").length

    test("200 stand in line: the first one asks for all, and a release is passed on, in order, with few statements", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        const { token } = yield* b(Lease.acquire("job"))
        const order: Array<number> = []
        const waiting = yield* Effect.forEach(
          Array.from({ length: 200 }),
          (_, index) =>
            Effect.forkChild(
              Effect.gen(function*() {
                const { token } = yield* Lease.acquire("job", { wait: true })
                order.push(index)
                yield* Lease.release(token, "yielded")
              }),
              { startImmediately: true }
            )
        )
        yield* TestClock.adjust("5 seconds")
        assert.deepStrictEqual(order, [])
        // Once at first, once when the subscription stands, and then each second.
        assert.isAtMost(acquiresOf(log), 10)
        const before = acquiresOf(log)
        yield* b(Lease.release(token, "yielded"))
        yield* Effect.forEach(waiting, Fiber.join)
        assert.deepStrictEqual(order, Array.from({ length: 200 }, (_, index) => index))
        assert.isAtMost(acquiresOf(log) - before, 2 * 200)
      }).pipe(intercepted))

    test("when the first one is interrupted, or fails, the next one asks", () =>
      Effect.gen(function*() {
        const { intercept, log, restore } = yield* Intercepted.Intercepted
        const { token } = yield* b(Lease.acquire("job"))
        const wait = Effect.forkChild(Lease.acquire("job", { wait: true }), { startImmediately: true })
        const [first, second, third] = yield* Effect.all([wait, wait, wait])
        yield* TestClock.adjust("1 second")
        yield* Fiber.interrupt(first)
        const before = acquiresOf(log)
        yield* TestClock.adjust("1 second")
        assert.isAbove(acquiresOf(log), before)
        yield* intercept((call, { operation }) =>
          operation === "acquire"
            ? Effect.fail(new BackendError({ operation, outcome: "rejected", reason: new Other({}) }))
            : call
        )
        yield* TestClock.adjust("1 second")
        assert.strictEqual((yield* Effect.flip(Fiber.join(second)))._tag, "BackendError")
        yield* restore
        assert.isUndefined(third.pollUnsafe())
        yield* b(Lease.release(token, "yielded"))
        yield* TestClock.adjust("1 second")
        assert.strictEqual((yield* Fiber.join(third)).token.workId, "job")
      }).pipe(intercepted))

    test("a lease whose holder vanished is taken at its expiry, also by the last one in line", () =>
      Effect.gen(function*() {
        yield* b(Lease.acquire("job"))
        const wait = Effect.forkChild(Lease.acquire("job", { wait: true }), { startImmediately: true })
        const fibers = yield* Effect.all(Array.from({ length: 5 }, () => wait))
        for (const fiber of fibers.slice(0, 4)) yield* Fiber.interrupt(fiber)
        yield* TestClock.adjust("30 seconds")
        yield* TestClock.adjust("25 millis")
        assert.isDefined(fibers[4].pollUnsafe())
      }).pipe(intercepted))
  })

  describe("interrupting anything at any point", () => {
    const hops = (count: number) =>
      Effect.forEach(Array.from({ length: count }), () => Effect.yieldNow, { discard: true })

    const programs: Record<string, Effect.Effect<unknown, unknown, Lease.Leases>> = {
      "Worker.run": Worker.run(Counter.id("x"), (work) =>
        Effect.gen(function*() {
          yield* work.checkpoint({ count: 1 })
          yield* hops(2)
          yield* work.checkpoint({ count: 2 })
          yield* work.leaveAs("finished", { count: 3 })
        })),
      "withLease": Lease.withLease(hops(5), "counter:x"),
      "hold": Effect.scoped(Effect.andThen(Lease.hold(Counter.id("x")), hops(5))),
      "a waiting hold": Effect.scoped(Effect.andThen(Lease.hold(Counter.id("x"), { wait: true }), hops(5))),
      "handOff": Worker.run(Counter.id("x"), (work) => Effect.andThen(hops(3), work.handOff({ count: 1 })))
    }

    for (const [name, program] of Object.entries(programs)) {
      test(`${name}: nothing stays, and the work ID is acquirable at once`, () =>
        Effect.gen(function*() {
          const { intercept, log, restore } = yield* Intercepted.Intercepted
          for (let point = 0; point < 60; point++) {
            // Every call takes a while before and after it takes effect.
            yield* intercept((call) => Effect.tap(Effect.andThen(hops(4), call), () => hops(4)))
            const fiber = yield* Effect.forkChild(program)
            yield* hops(point)
            yield* Fiber.interrupt(fiber)
            yield* restore
            const { token } = yield* Lease.acquire(Counter.id("x"))
            yield* Lease.release(token, "finished")
            const sent = log.length
            yield* TestClock.adjust("1 minute")
            assert.strictEqual(log.length, sent, `something was still sent after an interruption at point ${point}`)
          }
        }).pipe(intercepted))
    }

    test("an acquire on its own: nothing stays, and the work ID is free at once unless it returned", () =>
      Effect.gen(function*() {
        const { intercept, restore } = yield* Intercepted.Intercepted
        for (let point = 0; point < 40; point++) {
          yield* intercept((call) => Effect.tap(Effect.andThen(hops(4), call), () => hops(4)))
          const fiber = yield* Effect.forkChild(Lease.acquire(Counter.id(`${point}`)))
          yield* hops(point)
          yield* Fiber.interrupt(fiber)
          yield* restore
          const exit = yield* Fiber.await(fiber)
          const next = yield* Effect.exit(Lease.acquire(Counter.id(`${point}`)))
          assert.strictEqual(Exit.isSuccess(next), Exit.isFailure(exit), `at point ${point}`)
        }
      }).pipe(intercepted))
  })

  describe("gathering", () => {
    test("while one batch is in flight, the next one forms, with at most one item per work ID", () =>
      Effect.gen(function*() {
        const { intercept, log } = yield* Intercepted.Intercepted
        yield* intercept((call) => Effect.andThen(Effect.yieldNow, call))
        yield* Effect.forEach(["a", "b", "b", "c", "d"], (workId) => Effect.exit(Lease.acquire(workId)), {
          concurrency: "unbounded"
        })
        assert.deepStrictEqual(log.map((sent) => sent.items.map((item) => item.workId)), [["a"], ["b", "c", "d"], [
          "b"
        ]])
      }).pipe(intercepted))

    test("a batch holds at most 500 items", () =>
      Effect.gen(function*() {
        const { intercept, log } = yield* Intercepted.Intercepted
        yield* intercept((call) => Effect.andThen(Effect.yieldNow, call))
        yield* Effect.forEach(Array.from({ length: 1200 }), (_, index) => Lease.acquire(`job-${index}`), {
          concurrency: "unbounded",
          discard: true
        })
        const sizes = log.map((sent) => sent.items.length)
        assert.strictEqual(Math.max(...sizes), 500)
        assert.strictEqual(sizes.reduce((sum, size) => sum + size), 1200)
        assert.isAtMost(sizes.length, 5)
      }).pipe(intercepted))

    test("large states go in batches of a few mebibytes", () =>
      Effect.gen(function*() {
        const { intercept, log } = yield* Intercepted.Intercepted
        const work = Work.make("bytes", Checkpoint.bytes())
        const tokens = yield* Effect.forEach(["a", "b", "c", "d", "e", "f"], (key) =>
          Effect.map(Lease.acquire(work.id(key)), ({ token }) => token))
        yield* intercept((call) =>
          Effect.andThen(Effect.yieldNow, call)
        )
        yield* Effect.forEach(tokens, (token) => Lease.checkpoint(token, new Uint8Array(900 * 1024)), {
          concurrency: "unbounded",
          discard: true
        })
        assert.deepStrictEqual(
          log.filter((sent) => sent.operation === "checkpoint").map((sent) => sent.items.length),
          [1, 2, 2, 1]
        )
      }).pipe(intercepted))

    test("one bad item that has the whole batch refused does not fail its neighbours", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        yield* intercept((call, { items }) =>
          Effect.andThen(
            Effect.yieldNow,
            items.some((item) => item.workId === "bad")
              ? Effect.fail(new BackendError({ operation: "acquire", outcome: "rejected", reason: new Other({}) }))
              : call
          )
        )
        const exits = yield* Effect.forEach(
          ["first", "a", "bad", "c"],
          (workId) => Effect.exit(Lease.acquire(workId)),
          {
            concurrency: "unbounded"
          }
        )
        assert.deepStrictEqual(exits.map((exit) => exit._tag), ["Success", "Success", "Failure", "Success"])
      }).pipe(intercepted))

    test("an interrupted fiber neither cancels the batch nor keeps its place", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        const { token: one } = yield* Lease.acquire("one")
        const { token: two } = yield* Lease.acquire("two")
        yield* intercept((call) => Effect.delay(call, "1 second"))
        const first = yield* Effect.forkChild(Lease.renew(one), { startImmediately: true })
        const second = yield* Effect.forkChild(Lease.renew(two), { startImmediately: true })
        yield* TestClock.adjust("500 millis")
        yield* Fiber.interrupt(first)
        yield* TestClock.adjust("500 millis")
        yield* Fiber.join(second)
        for (let i = 0; i < 20; i++) {
          const fiber = yield* Effect.forkChild(Lease.renew(one))
          yield* TestClock.adjust("1 second")
          yield* Fiber.join(fiber)
        }
      }).pipe(intercepted))

    test("batches that hang hold up nobody for longer than their timeout", () =>
      Effect.gen(function*() {
        const { intercept, restore } = yield* Intercepted.Intercepted
        const gate = yield* Deferred.make<void>()
        yield* intercept((call) => Effect.uninterruptible(Effect.andThen(Deferred.await(gate), call)))
        const hanging = yield* fillPlaces
        yield* TestClock.adjust("1 second")
        yield* restore
        const others = yield* Effect.forkChild(Effect.forEach(
          Array.from({ length: 10 }),
          (_, index) => Lease.acquire(`other-${index}`),
          { concurrency: "unbounded" }
        ))
        yield* TestClock.adjust("4 seconds")
        yield* Fiber.join(others)
        yield* Deferred.succeed(gate, undefined)
        yield* TestClock.adjust("1 minute")
        yield* Effect.forEach(hanging, Fiber.join)
      }).pipe(intercepted))
  })
})
