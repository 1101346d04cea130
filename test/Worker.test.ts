import { assert, describe, it } from "@effect/vitest"
import { Cause, Clock, Effect, Exit, Fiber, Layer, Option, Ref, Schema } from "effect"
import { TestClock } from "effect/testing"
import { Checkpoint, Lease, Renewal, Work, Worker } from "worklease"
import * as Memory from "worklease/layers/Memory"
import * as Intercepted from "./support/Intercepted.ts"

const Counter = Work.make("counter", Checkpoint.make(Schema.Struct({ count: Schema.Int })))

const intercepted = Effect.provide(Layer.provideMerge(Lease.layerWith({ holderId: "a" }), Intercepted.layer))

const operations = (log: ReadonlyArray<Intercepted.Sent>) => log.map((sent) => sent.operation)

const failReleases = Effect.flatMap(
  Intercepted.Intercepted,
  ({ intercept }) =>
    intercept((call, { operation }) =>
      operation === "release" ? Effect.fail(Intercepted.unreachable("release", "rejected")) : call
    )
)

describe("Worker", () => {
  it.effect("costs two round trips around the work: one brings the prior, one carries the final state", () =>
    Effect.gen(function*() {
      const { log } = yield* Intercepted.Intercepted
      yield* Worker.run(Counter.id("x"), (work) => work.leaveAs("finished", { count: 1 }))
      assert.deepStrictEqual(operations(log), ["acquire", "release"])
      const prior = yield* Worker.run(Counter.id("x"), (work) => Effect.succeed(work.prior))
      assert.deepStrictEqual(prior.state, Option.some({ count: 1 }))
      assert.deepStrictEqual(prior.holderId, Option.some("a"))
    }).pipe(intercepted))

  it.effect("leaveAs stores the state as it is when it is said, not when that was prepared", () =>
    Effect.gen(function*() {
      const state = { count: 0 }
      yield* Worker.run(Counter.id("x"), (work) => {
        const leave = work.leaveAs("finished", state)
        return Effect.andThen(Effect.sync(() => void (state.count = 7)), leave)
      })
      const prior = yield* Worker.run(Counter.id("x"), (work) => Effect.succeed(work.prior))
      assert.deepStrictEqual(prior.state, Option.some({ count: 7 }))
    }).pipe(intercepted))

  it.effect("the work's error is what the caller sees, although the release fails too", () =>
    Effect.gen(function*() {
      yield* failReleases
      const exit = yield* Effect.exit(Worker.run("job", () => Effect.fail("my own error")))
      assert(Exit.isFailure(exit))
      assert.deepStrictEqual(exit.cause.reasons.map((reason) => Cause.isFailReason(reason) && reason.error), [
        "my own error"
      ])
    }).pipe(intercepted))

  it.effect("so is its defect", () =>
    Effect.gen(function*() {
      yield* failReleases
      const exit = yield* Effect.exit(Worker.run("job", () => Effect.die("my own defect")))
      assert(Exit.isFailure(exit))
      assert.deepStrictEqual(exit.cause.reasons.map((reason) => Cause.isDieReason(reason) && reason.defect), [
        "my own defect"
      ])
    }).pipe(intercepted))

  it.effect("a work function that throws is a defect, and the lease is released", () =>
    Effect.gen(function*() {
      const exit = yield* Effect.exit(Worker.run("job", (): Effect.Effect<void> => {
        throw new Error("thrown")
      }))
      assert(Exit.isFailure(exit) && Cause.hasDies(exit.cause))
      const prior = yield* Worker.run("job", (work) => Effect.succeed(work.prior))
      assert.strictEqual(prior.exit, "abandoned")
    }).pipe(intercepted))

  it.effect("a success keeps its value, although its release fails", () =>
    Effect.gen(function*() {
      yield* failReleases
      assert.strictEqual(yield* Worker.run("job", () => Effect.succeed("value")), "value")
    }).pipe(intercepted))

  it.effect("a success whose final state could not be stored is a BackendError", () =>
    Effect.gen(function*() {
      yield* failReleases
      const error = yield* Effect.flip(Worker.run(Counter.id("x"), (work) => work.leaveAs("finished", { count: 1 })))
      assert.strictEqual(error._tag, "BackendError")
    }).pipe(intercepted))

  it.effect("an unreachable backend at the end delays the caller by two operation timeouts at most", () =>
    Effect.gen(function*() {
      const { intercept } = yield* Intercepted.Intercepted
      yield* intercept((call, { operation }) => operation === "release" ? Effect.never : call)
      const fiber = yield* Effect.forkChild(
        Effect.andThen(Worker.run("job", () => Effect.void), Clock.currentTimeMillis)
      )
      yield* TestClock.adjust("1 minute")
      assert.isAtMost(yield* Fiber.join(fiber), 11_500)
    }).pipe(intercepted))

  it.effect("a checkpoint survives an outage of the backend that is shorter than the window", () =>
    Effect.gen(function*() {
      const { intercept, restore } = yield* Intercepted.Intercepted
      yield* intercept((call, { operation }) =>
        operation === "acquire" ? call : Effect.fail(Intercepted.unreachable(operation, "rejected"))
      )
      const fiber = yield* Effect.forkChild(Worker.run(Counter.id("x"), (work) => work.checkpoint({ count: 1 })))
      yield* TestClock.adjust("20 seconds")
      assert.isUndefined(fiber.pollUnsafe())
      yield* restore
      yield* TestClock.adjust("2 seconds")
      yield* Fiber.join(fiber)
      const prior = yield* Worker.run(Counter.id("x"), (work) => Effect.succeed(work.prior))
      assert.deepStrictEqual(prior.state, Option.some({ count: 1 }))
    }).pipe(intercepted))

  it.effect("a release that finds the lease expired tells of the loss", () =>
    Effect.gen(function*() {
      const { intercept } = yield* Intercepted.Intercepted
      yield* intercept((call, { operation }) =>
        operation === "release" ? Effect.map(call, () => [{ _tag: "Expired" }] as never) : call
      )
      const error = yield* Effect.flip(Worker.run("job", () => Effect.void))
      assert(error._tag === "LeaseLost")
      assert.strictEqual(error.reason._tag, "LeaseExpired")
    }).pipe(intercepted))

  it.effect("an interrupted worker has released its lease, and waits for that, when the interruption returns", () =>
    Effect.gen(function*() {
      const { log } = yield* Intercepted.Intercepted
      const fiber = yield* Effect.forkChild(Worker.run("job", () => Effect.never))
      yield* TestClock.adjust("1 second")
      yield* Fiber.interrupt(fiber)
      assert.deepStrictEqual(operations(log), ["acquire", "release"])
      const prior = yield* Worker.run("job", (work) => Effect.succeed(work.prior))
      assert.deepStrictEqual([prior.exit, prior.termsWithoutProgress], ["abandoned", 0])
    }).pipe(intercepted))

  it.effect("a lease that is used after its work has ended is a mistake that does not hang", () =>
    Effect.gen(function*() {
      const lease = yield* Worker.run(Counter.id("x"), Effect.succeed)
      for (const operation of [lease.checkpoint({ count: 1 }), lease.handOff()]) {
        const exit = yield* Effect.exit(operation)
        assert(Exit.isFailure(exit) && Cause.hasDies(exit.cause))
        assert.include(Cause.pretty(exit.cause), "after its work had ended")
      }
    }).pipe(intercepted))

  it.effect("a loss says why the renewals failed", () =>
    Effect.gen(function*() {
      const { intercept } = yield* Intercepted.Intercepted
      yield* intercept((call, { operation }) =>
        operation === "renew" ? Effect.fail(Intercepted.unreachable("renew", "rejected")) : call
      )
      const fiber = yield* Effect.forkChild(Worker.run("job", () => Effect.never))
      yield* TestClock.adjust("30 seconds")
      const error = Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))
      assert(error._tag === "LeaseLost")
      assert.include(error.message, "cannot be reached")
    }).pipe(intercepted))

  it.effect("the running work finds its lease in CurrentLease", () =>
    Effect.gen(function*() {
      const workId = yield* Worker.run("job", () => Effect.map(Lease.CurrentLease, (lease) => lease.workId))
      assert.strictEqual(workId, "job")
    }).pipe(intercepted))

  it.effect("a requested handoff reaches the work at once, and ends it at its next checkpoint", () =>
    Effect.gen(function*() {
      const { log } = yield* Intercepted.Intercepted
      const counted = yield* Ref.make(0)
      const fiber = yield* Worker.run(Counter.id("x"), (work) =>
        Effect.sleep("3 seconds").pipe(
          Effect.andThen(Ref.updateAndGet(counted, (_) => _ + 1)),
          Effect.flatMap((count) => count < 4 ? Effect.void : work.checkpoint({ count })),
          Effect.forever
        )).pipe(Effect.forkChild)
      yield* TestClock.adjust("1 second")
      assert.isTrue(yield* Lease.requestYield(Counter.id("x")))
      yield* TestClock.adjust("14 seconds")
      const error = Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))
      assert.strictEqual(error._tag, "Yielded")
      // One renewal at once, one that was due before the checkpoint, whose state went with the release.
      assert.deepStrictEqual(operations(log), ["acquire", "renew", "renew", "release"])
      const prior = yield* Worker.run(Counter.id("x"), (work) => Effect.succeed(work.prior))
      assert.strictEqual(prior.exit, "yielded")
      assert.deepStrictEqual(prior.state, Option.some({ count: 4 }))
    }).pipe(intercepted))

  it.effect("work that overruns the deadline of a handoff is interrupted, which counts as no attempt", () =>
    Effect.gen(function*() {
      const fiber = yield* Effect.forkChild(Worker.run("job", () => Effect.never))
      yield* TestClock.adjust("1 second")
      yield* Lease.requestYield("job", { deadline: "20 seconds" })
      yield* TestClock.adjust("19 seconds")
      assert.isUndefined(fiber.pollUnsafe())
      yield* TestClock.adjust("1 second")
      const error = Option.getOrThrow(Exit.findErrorOption(yield* Fiber.await(fiber)))
      assert.strictEqual(error._tag, "Yielded")
      const prior = yield* Worker.run("job", (work) => Effect.succeed(work.prior))
      assert.deepStrictEqual([prior.exit, prior.termsWithoutProgress], ["abandoned", 0])
    }).pipe(intercepted))

  it.live("an event loop that was blocked past the window: nothing more is sent, and the work is lost", () =>
    Effect.gen(function*() {
      const { log } = yield* Intercepted.Intercepted
      const policy = Renewal.makeUnsafe({ ttl: 60 })
      const error = yield* Effect.flip(Worker.run(Counter.id("x"), (work) =>
        Effect.gen(function*() {
          yield* Effect.sync(() => {
            const clock = process.hrtime.bigint()
            while (process.hrtime.bigint() - clock < 80_000_000n) { /* as a long computation does */ }
          })
          yield* work.checkpoint({ count: 1 })
        }), { policy }))
      assert(error._tag === "LeaseLost")
      assert.strictEqual(error.reason._tag, "WindowExhausted")
      assert.notInclude(operations(log), "checkpoint")
      assert.notInclude(operations(log), "renew")
    }).pipe(intercepted))

  it.live("so is work that was blocked and then returned, whatever the backend says to its release", () =>
    Effect.gen(function*() {
      const { intercept } = yield* Intercepted.Intercepted
      yield* intercept((call, { operation }) =>
        operation === "release" ? Effect.map(call, () => [{ _tag: "Done" }] as never) : call
      )
      const policy = Renewal.makeUnsafe({ ttl: 60 })
      const error = yield* Effect.flip(Worker.run("job", () =>
        Effect.sync(() => {
          const clock = process.hrtime.bigint()
          while (process.hrtime.bigint() - clock < 80_000_000n) { /* as a long computation does */ }
        }), { policy }))
      assert.strictEqual(error._tag, "LeaseLost")
    }).pipe(intercepted))

  it.effect("takes what its checkpoint needs from where it was run", () =>
    Effect.gen(function*() {
      const prior = yield* Worker.run(Counter.id("x"), (work) => Effect.succeed(work.prior.exit)).pipe(
        Effect.provide(Lease.layer.pipe(Layer.provide(Memory.layer)))
      )
      assert.strictEqual(prior, "none")
    }))
})
