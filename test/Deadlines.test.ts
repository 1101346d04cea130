/** The one timer of a process: many deadlines, set and cancelled at random, against a list that is searched. */
import { assert, describe, it } from "@effect/vitest"
import { Clock, Effect } from "effect"
import { TestClock } from "effect/testing"
import { type Deadline, Deadlines, makeRun } from "../src/internal/deadlines.ts"

const make = Effect.gen(function*() {
  const run = yield* makeRun
  return new Deadlines(yield* Clock.Clock, run)
})

/** A generator of numbers below `below`, the same ones for the same seed. */
const numbersFrom = (seed: number) => (below: number) => {
  seed = (Math.imul(seed, 1_664_525) + 1_013_904_223) >>> 0
  return seed % below
}

describe("Deadlines", () => {
  for (const seed of [1, 2, 3, 4, 5]) {
    it.effect(`come in their order and at their time, and not once cancelled (seed ${seed})`, () =>
      Effect.gen(function*() {
        const deadlines = yield* make
        const next = numbersFrom(seed)
        const open = new Map<number, { readonly at: number; readonly deadline: Deadline }>()
        const come: Array<readonly [id: number, at: number]> = []
        let now = 0
        let id = 0
        for (let step = 0; step < 300; step++) {
          for (let i = next(8); i > 0; i--) {
            const own = ++id
            const millis = 1 + next(500)
            const at = now + millis
            open.set(own, {
              at,
              deadline: deadlines.set(millis, () => {
                come.push([own, at])
                open.delete(own)
              })
            })
          }
          for (const [own, { deadline }] of open) {
            if (next(4) > 0) continue
            deadlines.cancel(deadline)
            open.delete(own)
          }
          const passed = next(60)
          const expected = [...open].filter(([, { at }]) => at <= now + passed).length
          come.length = 0
          yield* TestClock.adjust(passed)
          now += passed
          assert.strictEqual(come.length, expected)
          assert.isTrue(come.every(([, at], index) => at <= now && (index === 0 || come[index - 1][1] <= at)))
        }
      }))
  }

  it.effect("with slack come together with others that have it, and with no others", () =>
    Effect.gen(function*() {
      const deadlines = yield* make
      const come: Array<string> = []
      deadlines.set(1_000, () => come.push("a"), 100)
      deadlines.set(1_090, () => come.push("b"), 100)
      deadlines.set(1_101, () => come.push("c"), 100)
      deadlines.set(950, () => come.push("exact"))
      yield* TestClock.adjust(999)
      assert.deepStrictEqual(come, ["exact"])
      yield* TestClock.adjust(1)
      assert.deepStrictEqual(come, ["exact", "a", "b"])
      yield* TestClock.adjust(100)
      assert.deepStrictEqual(come, ["exact", "a", "b"])
      yield* TestClock.adjust(1)
      assert.deepStrictEqual(come, ["exact", "a", "b", "c"])
    }))

  it.effect("that set another one, due at once, do not keep the time from passing", () =>
    Effect.gen(function*() {
      const deadlines = yield* make
      let times = 0
      const again = () => {
        times++
        deadlines.set(0, again)
      }
      deadlines.set(1, again)
      yield* TestClock.adjust(1)
      assert.strictEqual(times, 1)
      yield* TestClock.adjust(1)
      assert.isAbove(times, 1)
    }))
})
