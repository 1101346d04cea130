import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { TestClock } from "effect/testing"
import * as Memory from "worklease/layers/Memory"
import { keysOf, type Process, start } from "./support/PoolProcess.ts"

const onMemory = Effect.provide(Memory.layer)

const loads = (...processes: ReadonlyArray<Process>) => processes.map(({ working }) => working.size)

describe("Pool", () => {
  it.effect("one process runs all; a second one gets half of it, handed over at checkpoints", () =>
    Effect.gen(function*() {
      const a = yield* start("a")
      yield* TestClock.adjust("1 second")
      assert.deepStrictEqual([...a.working].sort(), [...keysOf(10)])
      const b = yield* start("b")
      yield* TestClock.adjust("10 seconds")
      assert.deepStrictEqual(loads(a, b), [5, 5])
      assert.strictEqual(b.begun.length, 5)
      yield* b.close
      yield* TestClock.adjust("10 seconds")
      assert.deepStrictEqual(loads(a, b), [10, 0])

    }).pipe(onMemory))
})
