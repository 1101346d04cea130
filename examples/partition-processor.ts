/**
 * A partition processor: twelve partitions of a log, shared among all
 * processes of a pool. It is scaled from one process to five and back while it
 * runs; no message is lost or processed twice. Then one partition gets a
 * message that nothing can process: it is quarantined, the others go on, and
 * an operator lets it go again.
 *
 * Runs on the memory backend.
 *
 *     node examples/partition-processor.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Exit, Layer, Option, References, Schema, Scope, Stream } from "effect"
import assert from "node:assert/strict"
import { Checkpoint, Lease, Pool, Work } from "worklease"
import * as Memory from "worklease/layers/Memory"

const Partition = Work.make("partition", Checkpoint.make(Schema.Struct({ offset: Schema.Int })))

const partitions = Array.from({ length: 12 }, (_, index) => `${index}`.padStart(2, "0"))

const policy = { ttl: "5 seconds", pollInterval: "50 millis" } as const

/** How often each message of each partition was processed, by its offset. */
const processed = new Map(partitions.map((partition) => [partition, new Array<number>()]))

/** The partition with a message that nothing can process. */
let poisoned: string | undefined

const processMessage = (partition: string, offset: number): Effect.Effect<void> =>
  Effect.suspend(() => {
    if (partition === poisoned) return Effect.die(new Error(`Cannot parse message ${offset} of partition ${partition}`))
    const counts = processed.get(partition)!
    counts[offset] = (counts[offset] ?? 0) + 1
    return Effect.void
  })

/** Processes message after message, and makes a checkpoint after each: it can be handed over there. */
const processPartition = Effect.fnUntraced(function*(
  work: Lease.Lease<{ readonly offset: number }>,
  partition: string
) {
  let offset = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.offset })
  while (true) {
    yield* Effect.sleep("10 millis")
    yield* processMessage(partition, offset)
    yield* work.checkpoint({ offset: ++offset })
  }
})

interface Process {
  readonly holderId: string
  readonly status: Pool.Pool["status"]
  readonly stop: Effect.Effect<void>
}

/** What each process of a deployment does: it joins the pool, and leaves it when it is stopped. */
const startProcess = Effect.fnUntraced(function*(holderId: string) {
  const scope = yield* Scope.fork(yield* Effect.scope)
  const leases = yield* Layer.buildWithScope(Lease.layerWith({ holderId, ...policy }), scope)
  const { status } = yield* Pool.make({
    work: Partition,
    keys: partitions,
    run: processPartition,
    // By default a tenth of the ttl. Shorter ones make for a short example.
    interval: "100 millis",
    quarantineAfter: 2
  }).pipe(Effect.provideContext(leases), Scope.provide(scope))
  const process: Process = { holderId, status, stop: Scope.close(scope, Exit.void) }
  return process
})

/** Waits until the pool stands as it should, as one of its members sees it. */
const awaitStatus = (process: Process, isThere: (all: ReadonlyArray<Pool.Status>) => boolean) =>
  process.status.pipe(
    Stream.filter(isThere),
    Stream.runHead,
    Effect.map(Option.getOrThrow),
    Effect.timeout("20 seconds")
  )

/** Waits until all partitions are at work, and each process has its share of them. */
const awaitBalance = Effect.fnUntraced(function*(processes: ReadonlyArray<Process>) {
  const loadsOf = (all: ReadonlyArray<Pool.Status>) =>
    processes.map(({ holderId }) => all.filter((_) => Option.contains(_.holderId, holderId)).length)
  const all = yield* awaitStatus(processes[0], (all) => {
    const loads = loadsOf(all)
    return all.every(({ state }) => state === "running") && Math.max(...loads) - Math.min(...loads) <= 1 &&
      loads.reduce((a, b) => a + b, 0) === partitions.length
  })
  yield* Console.log(`   ${processes.map(({ holderId }, index) => `${holderId}: ${loadsOf(all)[index]}`).join("  ")}`)
})

const program = Effect.gen(function*() {
  yield* Console.log("One process has all twelve partitions:")
  const running = [yield* startProcess("a")]
  yield* awaitBalance(running)

  yield* Console.log("Scaled up, one process after the other:")
  for (const holderId of ["b", "c", "d", "e"]) {
    running.push(yield* startProcess(holderId))
    yield* awaitBalance(running)
  }

  yield* Console.log("Scaled down again: each one that is stopped hands over what it has.")
  while (running.length > 1) {
    yield* running.pop()!.stop
    yield* awaitBalance(running)
  }

  yield* Console.log("A message that nothing can process gets into partition 03:")
  poisoned = "03"
  const [process] = running
  const stateOf = (all: ReadonlyArray<Pool.Status>) => all.find(({ key }) => key === "03")!
  const found = stateOf(yield* awaitStatus(process, (all) => stateOf(all).state === "quarantined"))
  yield* Console.log(`   partition 03 is quarantined: ${Option.getOrThrow(found.why)}`)
  const others = yield* awaitStatus(process, (all) => all.filter(({ state }) => state === "running").length === 11)
  assert.equal(others.length, 12)

  yield* Console.log("The cause is mended, and an operator lets it go again:")
  poisoned = undefined
  assert.equal(yield* Lease.lift(Partition.id("03")), true)
  yield* awaitBalance(running)
  yield* process.stop

  let messages = 0
  for (const counts of processed.values()) {
    assert(counts.length > 0)
    for (const count of counts) assert.equal(count, 1)
    messages += counts.length
  }
  yield* Console.log(`${messages} messages, each of them processed once.`)
}).pipe(
  Effect.scoped,
  Effect.provide(Lease.layerWith({ holderId: "operator", ...policy }).pipe(Layer.provideMerge(Memory.layer))),
  // The pool warns of what fails, which the example tells itself.
  Effect.provideService(References.MinimumLogLevel, "Error")
)

NodeRuntime.runMain(program)
