/**
 * A handoff: somebody asks the holder to leave, it does so at its next safe
 * point, and its successor continues there. What shutdowns, deployments and
 * rebalancing are made of.
 *
 * Runs on the memory backend.
 *
 *     node examples/hand-off.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Deferred, Effect, Fiber, Option, Schema } from "effect"
import assert from "node:assert/strict"
import { Checkpoint, Lease, Work, Worker } from "worklease"
import * as Memory from "worklease/layers/Memory"

const Count = Work.make("count", Checkpoint.make(Schema.Struct({ n: Schema.Int })))

// A request reaches the holder with its next renewal or checkpoint at the latest.
const policy = { ttl: "2 seconds", renewEvery: "200 millis" } as const
const processA = Effect.provide(Lease.layerWith({ holderId: "a", ...policy }))
const processB = Effect.provide(Lease.layerWith({ holderId: "b", ...policy }))

/** Counts to 20, ten a second, with a checkpoint at each number. */
const count = (by: string, begun?: Deferred.Deferred<void>) =>
  Worker.run(
    Count.id("sheep"),
    Effect.fnUntraced(function*(work) {
      const start = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.n })
      yield* Console.log(`   ${by} begins at ${start}; the last one: ${work.prior.exit}`)
      for (let n = start + 1; n <= 20; n++) {
        yield* Effect.sleep("100 millis")
        yield* work.checkpoint({ n }) // a requested handoff ends the work here
        if (n === 3 && begun !== undefined) yield* Deferred.succeed(begun, undefined)
      }
      return start
    }),
    { wait: true }
  )

/** Work whose safe points are rarer than its checkpoints says so, and leaves by itself. */
const inPages = Worker.run(
  Count.id("pages"),
  Effect.fnUntraced(function*(work) {
    for (let n = 1;; n++) {
      yield* Effect.sleep("20 millis")
      yield* work.checkpoint({ n })
      const pageIsFull = n % 5 === 0
      if (pageIsFull && (yield* work.yieldRequested)) return yield* work.handOff({ n })
    }
  }),
  { yieldAt: "handOff" }
)

const program = Effect.gen(function*() {
  yield* Console.log("A handoff at the next checkpoint:")
  const begun = yield* Deferred.make<void>()
  const a = yield* Effect.forkChild(processA(count("a", begun)))
  yield* Deferred.await(begun)
  const b = yield* Effect.forkChild(processB(count("b")))
  assert.equal(yield* processB(Lease.requestYield(Count.id("sheep"))), true)

  const yielded = yield* Effect.flip(Fiber.join(a))
  assert.equal(yielded._tag, "Yielded")
  yield* Console.log(`   a: ${yielded.message}`)
  const start = yield* Fiber.join(b)
  assert(start >= 3 && start < 20)
  yield* Console.log(`   b has counted from ${start} to 20.`)

  yield* Console.log("A handoff at the end of a page:")
  const paging = yield* Effect.forkChild(processA(inPages))
  yield* Lease.requestYield(Count.id("pages")).pipe(Effect.repeat({ until: (asked) => asked }), processB)
  assert.equal((yield* Effect.flip(Fiber.join(paging)))._tag, "Yielded")
  const { prior } = yield* processB(Lease.acquire(Count.id("pages")))
  assert.equal(prior.exit, "yielded")
  assert.equal(Option.getOrThrow(prior.state).n % 5, 0)
  yield* Console.log(`   it left after ${Option.getOrThrow(prior.state).n}.`)

  yield* Console.log("A handoff whose deadline passes:")
  const deaf = yield* Worker.run("deaf", () => Effect.never).pipe(processA, Effect.forkChild)
  yield* Lease.requestYield("deaf", { deadline: "300 millis" }).pipe(
    Effect.repeat({ until: (asked) => asked }),
    processB
  )
  assert.equal((yield* Effect.flip(Fiber.join(deaf)))._tag, "Yielded")
  const next = yield* processB(Lease.acquire("deaf"))
  assert.equal(next.prior.exit, "abandoned")
  yield* Console.log("   it was interrupted; its successor is told that it abandoned the work.")

  assert.equal(yield* processA(Lease.requestYield("nobody has this")), false)
})

NodeRuntime.runMain(program.pipe(Effect.provide(Memory.layer)))
