/**
 * Holding a lease without checkpoints: `withLease` around an effect, `hold` for
 * a scope with `guard` around the work, and waiting for a lease that somebody
 * else holds.
 *
 * Runs on the memory backend.
 *
 *     node examples/with-lease.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Deferred, Duration, Effect, Fiber, Option } from "effect"
import assert from "node:assert/strict"
import { Lease } from "worklease"
import * as Memory from "worklease/layers/Memory"

// Two processes, as far as leases are concerned. The backend that they share is provided once, around everything.
const processA = Effect.provide(Lease.layerWith({ holderId: "a" }))
const processB = Effect.provide(Lease.layerWith({ holderId: "b" }))

const program = Effect.gen(function*() {
  yield* Console.log("withLease: one runs the report, the other is told who does")
  const running = yield* Deferred.make<void>()
  const finish = yield* Deferred.make<void>()
  const report = Effect.gen(function*() {
    const lease = yield* Lease.CurrentLease
    yield* Deferred.succeed(running, undefined)
    yield* Deferred.await(finish)
    return `report, written under token ${lease.token.fencingToken}`
  }).pipe(Lease.withLease("nightly-report"))

  const a = yield* Effect.forkChild(processA(report))
  yield* Deferred.await(running)
  const refused = yield* Effect.flip(processB(report))
  assert.equal(refused._tag, "LeaseHeld")
  yield* Console.log(`   b: ${refused.message}`)

  yield* Console.log("wait: b takes the lease as soon as a has released it")
  const b = yield* Lease.acquire("nightly-report", { wait: true }).pipe(processB, Effect.forkChild)
  yield* Deferred.succeed(finish, undefined)
  yield* Console.log(`   a: ${yield* Fiber.join(a)}`)
  const { prior, token } = yield* Fiber.join(b)
  assert.equal(prior.exit, "finished")
  assert.deepEqual(prior.holderId, Option.some("a"))
  assert(token.fencingToken > Option.getOrThrow(prior.fencingToken))
  yield* Console.log(`   b: has it under token ${token.fencingToken}; the last one, a, ${prior.exit}`)

  yield* Console.log("hold: a lease for a scope, with the work in its guard")
  const left = yield* Effect.scoped(Effect.gen(function*() {
    const lease = yield* Lease.hold("cache-warmup")
    // Interrupted if the lease is lost, which is then the typed error LeaseLost.
    yield* lease.guard(Effect.sleep("50 millis"))
    return yield* lease.window
  })).pipe(processA)
  yield* Console.log(
    `   a: done, with ${Math.round(Duration.toSeconds(left))} s of the window left; the scope has released it`
  )
  const next = yield* processB(Lease.acquire("cache-warmup"))
  assert.equal(next.prior.exit, "finished")
})

NodeRuntime.runMain(program.pipe(Effect.provide(Memory.layer)))
