/**
 * How to test your own workers: two processes, a crash, and a takeover after
 * 30 seconds, deterministically and in no time, because the memory backend
 * runs on Effect's Clock and the test moves it.
 *
 * In a test file this is an `it.effect` of @effect/vitest, which brings the
 * TestClock along; here it is a program.
 *
 *     node examples/test-clock.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Deferred, Effect, Fiber, Layer, Option, Schema } from "effect"
import { TestClock } from "effect/testing"
import assert from "node:assert/strict"
import { Checkpoint, Lease, Work, Worker } from "worklease"
import { TestBackend } from "worklease/testing"

// ---- the code under test

const Mailing = Work.make("mailing", Checkpoint.make(Schema.Struct({ sent: Schema.Int })))

const recipients = ["ann", "bob", "cem", "dee"]

const mail = (send: (recipient: string) => Effect.Effect<void>) =>
  Worker.run(
    Mailing.id("newsletter"),
    Effect.fnUntraced(function*(work) {
      const start = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.sent })
      for (let i = start; i < recipients.length; i++) {
        yield* send(recipients[i])
        yield* work.checkpoint({ sent: i + 1 })
      }
    }),
    { wait: true }
  )

// ---- the test

const processA = Effect.provide(Lease.layerWith({ holderId: "a" }))
const processB = Effect.provide(Lease.layerWith({ holderId: "b" }))

const test = Effect.gen(function*() {
  const backend = yield* TestBackend.TestBackend
  const sent: Array<string> = []
  const sending = yield* Deferred.make<void>()

  // Process a sends two mails, and hangs in the third.
  const a = yield* mail((recipient) =>
    recipient === "cem"
      ? Effect.andThen(Deferred.succeed(sending, undefined), Effect.never)
      : Effect.sync(() => void sent.push(`a to ${recipient}`))
  ).pipe(processA, Effect.forkChild)
  yield* Deferred.await(sending)

  // It crashes: nothing that it calls arrives any more. Interrupting its fiber instead would release the lease.
  yield* backend.sever("a")

  const b = yield* mail((recipient) => Effect.sync(() => void sent.push(`b to ${recipient}`))).pipe(
    processB,
    Effect.forkChild
  )
  yield* TestClock.adjust("29 seconds")
  assert.deepEqual(sent, ["a to ann", "a to bob"])

  // The lease expires 30 seconds after the last checkpoint, and b takes over within 25 ms.
  yield* TestClock.adjust("1025 millis")
  yield* Fiber.join(b)
  assert.deepEqual(sent, ["a to ann", "a to bob", "b to cem", "b to dee"])

  // Meanwhile a has given up by itself: its window ended before b began.
  const lost = yield* Effect.flip(Fiber.join(a))
  assert.equal(lost._tag, "LeaseLost")
  return { sent, lost }
}).pipe(Effect.provide(TestBackend.layer.pipe(Layer.provideMerge(TestClock.layer()))))

NodeRuntime.runMain(Effect.gen(function*() {
  const started = performance.now()
  const { lost, sent } = yield* test
  yield* Console.log(`${sent.join(", ")}\na: ${lost.message}`)
  yield* Console.log(`30 seconds of a test, in ${Math.round(performance.now() - started)} ms`)
}))
