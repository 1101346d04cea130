/** Batches of operations, while operations in the queue come and go. */
import { assert, describe, it } from "@effect/vitest"
import { Clock, Deferred, Effect, Exit, Option, Scope } from "effect"
import type { NonEmptyReadonlyArray } from "effect/Array"
import { TestClock } from "effect/testing"
import { Deadlines, makeRun } from "../src/internal/deadlines.ts"
import * as Gather from "../src/internal/gather.ts"
import { BackendError, Other } from "../src/LeaseError.ts"

interface Request {
  readonly workId: string
}

/** What was sent, batch by batch; the first one waits for the gate. */
const make = Effect.gen(function*() {
  const clock = yield* Clock.Clock
  const run = yield* makeRun
  const gate = yield* Deferred.make<void>()
  const sent: Array<ReadonlyArray<string>> = []
  const gather = Gather.make<Request, string>({
    operation: "test",
    run,
    clock,
    deadlines: new Deadlines(clock, run),
    send: (requests) => {
      const workIds = requests.map(({ workId }) => workId) as unknown as NonEmptyReadonlyArray<string>
      sent.push(workIds)
      return sent.length === 1 ? Effect.as(Deferred.await(gate), workIds) : Effect.succeed(workIds)
    }
  })
  const answered: Array<string> = []
  /** Returns how to take it back. */
  const call = (workId: string, isWanted?: () => boolean) =>
    gather.call({ workId }, { timeout: 1000, isWanted }, (answer) => {
      answered.push(Exit.isSuccess(answer) ? answer.value : `${workId} failed`)
    })
  return {
    call,
    offer: gather.offer,
    sent,
    answered,
    open: Effect.andThen(Deferred.succeed(gate, undefined), TestClock.adjust(1))
  }
})

describe("Gather", () => {
  it.effect("what is withdrawn from the queue is not sent, and the rest is", () =>
    Effect.gen(function*() {
      const { answered, call, open, sent } = yield* make
      call("a")
      const withdraw = [call("b"), call("c"), call("d")]
      withdraw[1]()
      withdraw[1]()
      yield* open
      assert.deepStrictEqual(sent, [["a"], ["b", "d"]])
      call("e")
      assert.deepStrictEqual(sent, [["a"], ["b", "d"], ["e"]])
      assert.deepStrictEqual(answered, ["a", "b", "d", "e"])
    }))

  it.effect("a queue that was withdrawn as a whole is empty", () =>
    Effect.gen(function*() {
      const { answered, call, offer, open, sent } = yield* make
      call("a")
      call("b")()
      const { withdraw } = offer({ workId: "c" }, { timeout: 1000 })
      assert.isTrue(withdraw())
      assert.isTrue(withdraw())
      call("d")
      yield* open
      call("e")
      assert.deepStrictEqual(sent, [["a"], ["d"], ["e"]])
      assert.deepStrictEqual(answered, ["a", "d", "e"])
    }))

  it.effect("what is withdrawn while it is asked whether it is still wanted leaves the others their places", () =>
    Effect.gen(function*() {
      for (const isWanted of [false, true]) {
        const { answered, call, open, sent } = yield* make
        call("a")
        const withdraw = call("b", () => {
          withdraw()
          for (const workId of ["c", "d"]) call(workId)
          return isWanted
        })
        // The second statement forms while the first one is still on its way.
        yield* TestClock.adjust(1)
        yield* open
        call("e")
        assert.deepStrictEqual(sent.flat(), ["a", "c", "d", "e"])
        assert.deepStrictEqual(answered.sort(), ["a", "c", "d", "e"])
      }
    }))

  it.effect("of one work ID, one operation at a time is sent, in their order", () =>
    Effect.gen(function*() {
      const { call, open, sent } = yield* make
      for (const workId of ["a", "b", "b", "c", "b"]) call(workId)
      yield* open
      assert.deepStrictEqual(sent, [["a"], ["b", "c"], ["b"], ["b"]])
    }))

  it.effect("a layer that is closed by the first answer of a statement leaves nothing of it running", () =>
    Effect.gen(function*() {
      const clock = yield* Clock.Clock
      const scope = yield* Scope.make()
      const run = yield* Scope.provide(makeRun, scope)
      let interrupted = 0
      const gather = Gather.make<Request, string>({
        operation: "test",
        run,
        clock,
        deadlines: new Deadlines(clock, run),
        // Each by itself, of which the second one hangs.
        send: ([{ workId }, ...rest]) =>
          rest.length > 0
            ? Effect.fail(new BackendError({ operation: "test", outcome: "rejected", reason: new Other({}) }))
            : workId === "a"
            ? Effect.succeed([workId])
            : Effect.onInterrupt(Effect.never, () => Effect.sync(() => interrupted++))
      })
      const answered: Array<string> = []
      gather.together(() => {
        gather.call({ workId: "a" }, { timeout: 1000 }, () => {
          Effect.runFork(Scope.close(scope, Exit.void))
          answered.push("a")
        })
        gather.call({ workId: "b" }, { timeout: 1000 }, (answer) => {
          answered.push(Exit.isFailure(answer) ? `b ${Option.getOrThrow(Exit.findErrorOption(answer)).outcome}` : "b")
        })
      })
      yield* Effect.yieldNow
      assert.strictEqual(interrupted, 1)
      // It was on its way.
      assert.deepStrictEqual(answered, ["a", "b unknown"])
    }))
})
