/**
 * A process of which many fibers want the same lease, and give it on as soon
 * as they have it.
 */
import { Effect, Fiber, Layer, Option, Queue, Schema } from "effect"
import { Lease, Worker } from "worklease"
import * as Counted from "../../support/CountedBackend.ts"
import * as Database from "../Database.ts"
import { monotonicMillis } from "../Measure.ts"
import * as Program from "../Program.ts"

export const Contender = Program.make({
  name: "contender",
  Settings: Schema.Struct({ url: Schema.String, workId: Schema.String, waiters: Schema.Int }),
  Command: Schema.Union([Schema.TaggedStruct("Start", {}), Schema.TaggedStruct("Stop", {})]),
  Event: Schema.Union([
    Schema.TaggedStruct("Ready", {}),
    Schema.TaggedStruct("Ended", {
      terms: Schema.Array(Schema.Struct({ token: Schema.BigInt, from: Schema.Number, to: Schema.Number })),
      acquired: Schema.Int,
      released: Schema.Int,
      /** The milliseconds for which its waiters wanted the lease, all together. */
      waited: Schema.Number,
      /** The statements that were sent: all of them, and those that acquire and release. */
      statements: Schema.Int,
      acquires: Schema.Int,
      releases: Schema.Int,
      failures: Schema.Array(Schema.String)
    })
  ]),
  run: Effect.fnUntraced(function*(settings, { commands, say }) {
    const counts = Counted.make()
    const done = { acquire: 0, release: 0 }
    const terms: Array<{ readonly token: bigint; readonly from: number; readonly to: number }> = []
    const failures: Array<string> = []
    let stopped = false
    let waited = 0
    let statements = 0

    const turn = Worker.run(settings.workId, (work) => {
      const from = monotonicMillis()
      // Others get to run, who must not have the lease meanwhile.
      return Effect.map(Effect.yieldNow, () => {
        terms.push({ token: work.token.fencingToken, from, to: monotonicMillis() })
      })
    }, { wait: true }).pipe(
      Effect.catch((error) => Effect.sync(() => failures.push(error.message)))
    )

    /** One more turn after it is told to stop, and then it ends. */
    const contender = Effect.suspend(() => {
      const start = monotonicMillis()
      return Effect.whileLoop({ while: () => !stopped, body: () => turn, step: () => {} }).pipe(
        Effect.ensuring(Effect.sync(() => {
          waited += monotonicMillis() - start
        }))
      )
    })

    const contend = Effect.gen(function*() {
      yield* say({ _tag: "Ready" })
      yield* Queue.take(commands)
      const contenders = yield* Effect.forEach(
        Array.from({ length: settings.waiters }),
        () => Effect.forkChild(contender)
      )
      yield* Queue.take(commands)
      stopped = true
      const ended = yield* Effect.timeoutOption(Effect.forEach(contenders, Fiber.await), "10 seconds")
      if (Option.isNone(ended)) failures.push("Not all waiters had their turn within 10 s")
      yield* Fiber.interruptAll(contenders)
    })

    const layer = Lease.layer.pipe(
      Layer.provide(Counted.layer(counts, (operation, _, reply) => {
        if (operation === "acquire" && reply === "Acquired") done.acquire++
        if (operation === "release" && reply === "Done") done.release++
      })),
      Layer.provide(Database.storage()),
      Layer.provide(Database.toldClient(settings.url, () => statements++))
    )
    // With the layer, its connections are closed, and the server knows what they have done.
    yield* Effect.provide(contend, layer)
    yield* say({
      _tag: "Ended",
      terms,
      waited,
      statements,
      acquired: done.acquire,
      released: done.release,
      acquires: counts.acquire.statements,
      releases: counts.release.statements,
      failures: failures.slice(0, 5)
    })
    // Until it is read.
    return yield* Effect.never
  })
})
