import { assert, describe, it } from "@effect/vitest"
import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import { TestClock } from "effect/testing"
import * as Checkpoint from "../../src/Checkpoint.ts"
import * as Lease from "../../src/Lease.ts"
import * as TestBackend from "../../src/testing/TestBackend.ts"
import * as Work from "../../src/Work.ts"
import * as Worker from "../../src/Worker.ts"

const a = Effect.provide(Lease.layerWith({ holderId: "a" }))
const b = Effect.provide(Lease.layerWith({ holderId: "b" }))

const Count = Work.make("count", Checkpoint.make(Schema.Int))

/** Work that a test can wait for, and that never ends by itself. */
const endless = (started: Deferred.Deferred<void>) =>
  Worker.run("job", () => Effect.andThen(Deferred.succeed(started, undefined), Effect.never))

describe("TestBackend", () => {
  describe("sever", () => {
    it.effect("keeps the lease until it expires, however the work ends", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const started = yield* Deferred.make<void>()
        const work = yield* Effect.forkChild(a(endless(started)))
        yield* Deferred.await(started)
        yield* backend.sever("a")
        // No time passes: nothing that a test leaves behind may wait for its clock.
        yield* Fiber.interrupt(work)
        yield* TestClock.adjust("29999 millis")
        assert.strictEqual((yield* Effect.flip(b(Lease.acquire("job"))))._tag, "LeaseHeld")
        yield* TestClock.adjust("1 millis")
        assert.strictEqual((yield* b(Lease.acquire("job"))).prior.exit, "expired")
      }).pipe(Effect.provide(TestBackend.layer)))

    it.effect("lets work run until its window ends, and then lose its lease", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const started = yield* Deferred.make<void>()
        const work = yield* Effect.forkChild(a(endless(started)))
        yield* Deferred.await(started)
        yield* backend.sever("a")
        yield* TestClock.adjust("26999 millis")
        assert.isUndefined(work.pollUnsafe())
        yield* TestClock.adjust("1 millis")
        assert.strictEqual((yield* Effect.flip(Fiber.join(work)))._tag, "LeaseLost")
      }).pipe(Effect.provide(TestBackend.layer)))

    it.effect("concerns one holder, for new leases too", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        yield* backend.sever("a")
        const error = yield* Effect.flip(a(Lease.acquire("job")))
        assert(error._tag === "BackendError")
        assert.strictEqual(error.reason._tag, "Unreachable")
        assert.strictEqual(error.outcome, "rejected")
        yield* b(Lease.acquire("job"))
      }).pipe(Effect.provide(TestBackend.layer)))

    it.effect("never answers an operation in the middle of the work", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Count.id("x"))
          yield* backend.sever("a")
          const checkpoint = yield* Effect.forkChild(Effect.flip(Lease.checkpoint(token, 1)))
          yield* TestClock.adjust("4 seconds")
          assert.isUndefined(checkpoint.pollUnsafe())
          yield* TestClock.adjust("16 seconds")
          const error = yield* Fiber.join(checkpoint)
          assert(error._tag === "BackendError")
          assert.strictEqual(error.outcome, "unknown")
          assert.strictEqual(error.reason._tag, "TimedOut")
          // It did not arrive.
          yield* backend.heal("a")
          assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.none())
        }).pipe(a)
      }).pipe(Effect.provide(TestBackend.layer)))
  })

  it.effect("heal ends it", () =>
    Effect.gen(function*() {
      const backend = yield* TestBackend.TestBackend
      yield* backend.sever("a")
      yield* backend.heal("a")
      yield* a(Lease.acquire("job"))
    }).pipe(Effect.provide(TestBackend.layer)))

  it.effect("loseReplies applies the calls, and the library asks for the answers again", () =>
    Effect.gen(function*() {
      const backend = yield* TestBackend.TestBackend
      yield* Effect.gen(function*() {
        yield* backend.loseReplies("a", 1)
        const acquired = yield* Effect.forkChild(Lease.acquire(Count.id("x")))
        yield* TestClock.adjust("1 second")
        const { token } = yield* Fiber.join(acquired)
        yield* backend.loseReplies("a", 2)
        const checkpointed = yield* Effect.forkChild(Lease.checkpoint(token, 7))
        yield* TestClock.adjust("1 second")
        yield* Fiber.join(checkpointed)
        assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some(7))
      }).pipe(a)
    }).pipe(Effect.provide(TestBackend.layer)))
})
