/**
 * A scheduler that runs in one of several processes: the one that leads. The
 * leader crashes, another one takes over; it is asked to hand over, and does;
 * and one whose task hangs gives up by itself.
 *
 * Runs on the memory backend.
 *
 *     node examples/leader-scheduler.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Fiber, Layer, Option, References, Schedule, Stream, SubscriptionRef } from "effect"
import assert from "node:assert/strict"
import { Leader, Lease } from "worklease"
import { TestBackend } from "worklease/testing"

const leases = (holderId: string) => Lease.layerWith({ holderId, ttl: "600 millis", pollInterval: "50 millis" })

/** Whose tasks hang from now on, as if what they wait for were gone. */
const hanging = new Set<string>()

/** Begins to tick when this process is elected, and stops when it no longer leads. */
const Scheduler = (by: string) =>
  Layer.effectDiscard(
    Effect.suspend(() => hanging.has(by) ? Effect.never : Leader.progress).pipe(
      Effect.repeat(Schedule.spaced("20 millis")),
      Effect.forkScoped
    )
  ).pipe(
    Leader.layer("scheduler", {
      giveUpAfter: { stalledFor: "300 millis" },
      onEvent: (event) =>
        Console.log(`   ${by}: ${event._tag}${event._tag === "Relinquished" ? ` (${event.why})` : ""}`)
    }),
    Layer.provide(leases(by))
  )

const program = Effect.gen(function*() {
  const backend = yield* TestBackend.TestBackend

  // A dashboard: it does not stand, and is told who leads.
  const leader = yield* SubscriptionRef.make<Option.Option<Leader.Leader>>(Option.none())
  yield* Leader.observe("scheduler", { pollInterval: "50 millis" }).pipe(
    Stream.runForEach((now) => SubscriptionRef.set(leader, now)),
    Effect.provide(leases("dashboard")),
    Effect.forkScoped
  )
  const leads = (is: (holderId: string) => boolean) =>
    SubscriptionRef.changes(leader).pipe(
      Stream.filter((now) => Option.isSome(now) && is(now.value.holderId)),
      Stream.runHead,
      Effect.map((now) => Option.getOrThrow(Option.flatten(now))),
      Effect.timeout("10 seconds")
    )

  yield* Console.log("Three processes start; one of them leads:")
  for (const by of ["a", "b", "c"]) yield* Effect.forkScoped(Layer.launch(Scheduler(by)))
  const first = yield* leads(() => true)
  yield* Console.log(`   ${first.holderId} leads, under token ${first.fencingToken}`)

  yield* Console.log("It crashes, and another one takes over when its lease has expired:")
  yield* backend.sever(first.holderId)
  const second = yield* leads((holderId) => holderId !== first.holderId)
  assert(second.fencingToken > first.fencingToken)
  yield* Console.log(`   ${second.holderId} leads, under token ${second.fencingToken}`)
  // As a process that has restarted, it stands again.
  yield* backend.heal(first.holderId)

  yield* Console.log("It is asked to hand over, and does; its successor may be told first:")
  assert.equal(yield* Effect.provide(Lease.requestYield("scheduler"), leases("operator")), true)
  const third = yield* leads((holderId) => holderId !== second.holderId)
  yield* Console.log(`   ${third.holderId} leads, under token ${third.fencingToken}`)

  yield* Console.log("Its task hangs; it gives up by itself, so that another one may try:")
  hanging.add(third.holderId)
  const fourth = yield* leads((holderId) => holderId !== third.holderId)
  yield* Console.log(`   ${fourth.holderId} leads, under token ${fourth.fencingToken}`)

  yield* Console.log("One term only, and no waiting: who is second is told who leads:")
  const refused = yield* Effect.void.pipe(Leader.elect("scheduler"), Effect.provide(leases("d")), Effect.flip)
  assert.equal(refused._tag, "LeaseHeld")
  yield* Console.log(`   d: ${refused.message}`)

  const { healthy, leading } = yield* Effect.gen(function*() {
    const report = yield* Effect.forkChild(Leader.elect(Effect.never, "report"))
    yield* Effect.sleep("300 millis")
    const health = yield* Leader.health("report")
    yield* Fiber.interrupt(report)
    return health
  }).pipe(Effect.provide(leases("e")))
  assert.deepEqual([healthy, leading], [true, true])
})

NodeRuntime.runMain(program.pipe(
  Effect.scoped,
  Effect.provide(TestBackend.layer),
  // What it tells is logged as warnings, too.
  Effect.provideService(References.MinimumLogLevel, "Error")
))
