/** The library's main job, in one process and in no time: work stops in the middle, and another worker continues it. */
import { assert, describe, it } from "@effect/vitest"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import { TestClock } from "effect/testing"
import * as Checkpoint from "../src/Checkpoint.ts"
import * as Lease from "../src/Lease.ts"
import * as TestBackend from "../src/testing/TestBackend.ts"
import * as Work from "../src/Work.ts"
import * as Worker from "../src/Worker.ts"

const records = ["Amsterdam", "Bogotá", "Cairo", "Dhaka", "Edinburgh", "Fez"]

const Import = Work.make("import", Checkpoint.make(Schema.Struct({ next: Schema.Int })))

/** Imports one record a second, and writes down who imported it. */
const importAll = (by: string, journal: Array<string>, started?: Deferred.Deferred<void>) =>
  Worker.run(
    Import.id("cities"),
    Effect.fnUntraced(function*(work) {
      if (started !== undefined) yield* Deferred.succeed(started, undefined)
      const start = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.next })
      for (let i = start; i < records.length; i++) {
        yield* Effect.sleep("1 second")
        journal.push(`${by}: ${records[i]}`)
        yield* work.checkpoint({ next: i + 1 })
      }
      return { prior: work.prior, fencingToken: work.token.fencingToken }
    }),
    { wait: true }
  )

const processA = Lease.layerWith({ holderId: "a", ttl: "30 seconds" })
const processB = Lease.layerWith({ holderId: "b", ttl: "30 seconds" })

describe("a takeover", () => {
  it.effect("begins when the lease expires, not earlier", () =>
    Effect.gen(function*() {
      const backend = yield* TestBackend.TestBackend
      const started = yield* Deferred.make<void>()
      yield* Effect.forkChild(Effect.provide(
        Worker.run("job", () => Effect.andThen(Deferred.succeed(started, undefined), Effect.never)),
        processA
      ))
      yield* Deferred.await(started)
      yield* backend.sever("a")

      const attempt = Effect.provide(Worker.run("job", (work) => Effect.succeed(work.prior)), processB)
      yield* TestClock.adjust("29999 millis")
      const error = yield* Effect.flip(attempt)
      assert(error._tag === "LeaseHeld")
      assert.strictEqual(error.holderId, "a")
      assert.deepStrictEqual(error.retryAfter, Duration.millis(1))

      yield* TestClock.adjust("1 millis")
      const prior = yield* attempt
      assert.strictEqual(prior.exit, "expired")
      assert.strictEqual(prior.termsWithoutProgress, 1)
    }).pipe(Effect.provide(TestBackend.layer)))

  it.effect("continues from the last checkpoint of a worker that crashed", () =>
    Effect.gen(function*() {
      const backend = yield* TestBackend.TestBackend
      const journal: Array<string> = []
      const started = yield* Deferred.make<void>()
      const crashed = yield* Effect.forkChild(Effect.provide(importAll("a", journal, started), processA))
      yield* Deferred.await(started)
      const successor = yield* Effect.forkChild(Effect.provide(importAll("b", journal), processB))

      // Three records are imported, and the fourth is on its way.
      yield* TestClock.adjust("3500 millis")
      yield* backend.sever("a")

      // The last checkpoint was at 3 s, so the lease expires at 33 s; a waiter comes up to 25 ms after that.
      yield* TestClock.adjust("29499 millis")
      assert.isUndefined(successor.pollUnsafe())
      assert.deepStrictEqual(journal, ["a: Amsterdam", "a: Bogotá", "a: Cairo", "a: Dhaka"])
      yield* TestClock.adjust("26 millis")
      yield* TestClock.adjust("3 seconds")
      const { fencingToken, prior } = yield* Fiber.join(successor)

      assert.deepStrictEqual(journal, [
        "a: Amsterdam",
        "a: Bogotá",
        "a: Cairo",
        // It happened, but nothing says so: between two checkpoints, work happens at least once.
        "a: Dhaka",
        "b: Dhaka",
        "b: Edinburgh",
        "b: Fez"
      ])
      assert.strictEqual(prior.exit, "expired")
      assert.deepStrictEqual(prior.state, Option.some({ next: 3 }))
      assert.deepStrictEqual(prior.holderId, Option.some("a"))
      assert.strictEqual(prior.termsWithoutProgress, 0)
      assert.isTrue(fencingToken > Option.getOrThrow(prior.fencingToken))

      // The one that was cut off has noticed by itself.
      const error = yield* Effect.flip(Fiber.join(crashed))
      assert(error._tag === "LeaseLost")
      assert.strictEqual(error.reason._tag, "WindowExhausted")
    }).pipe(Effect.provide(TestBackend.layer)))
})
