/**
 * How rates and latencies are measured, for both sides alike.
 */
import { Effect, Fiber } from "effect"
import * as Statistics from "./Statistics.ts"

/** Milliseconds on a clock that all processes of a machine share (on Linux, CLOCK_MONOTONIC). */
export const monotonicMillis = (): number => Number(process.hrtime.bigint()) / 1e6

/** What loops count, until they are told to stop. */
export interface Meter {
  /** How many loops have begun: the time runs when all have. */
  begun: number
  count: number
  stopped: boolean
}

/** Does something again and again, until the meter stops. */
export const loop = <E, R>(
  meter: Meter,
  once: (turn: number) => Effect.Effect<unknown, E, R>
): Effect.Effect<void, E, R> =>
  Effect.suspend(() => {
    meter.begun++
    let turn = 0
    return Effect.whileLoop({
      while: () => !meter.stopped,
      body: () => once(turn++),
      step: () => {
        meter.count++
      }
    })
  })

/** How often per second so many loops get round, all together, after a time to warm up. */
export const rate = Effect.fnUntraced(function*<E, R>(
  options: { readonly loops: number; readonly seconds: number; readonly warmUp: number },
  run: (meter: Meter) => Effect.Effect<unknown, E, R>
): Effect.fn.Return<number, E, R> {
  const meter: Meter = { begun: 0, count: 0, stopped: false }
  const fiber = yield* Effect.forkChild(run(meter))
  const measure = Effect.gen(function*() {
    while (meter.begun < options.loops) yield* Effect.sleep(5)
    yield* Effect.sleep(options.warmUp * 1000)
    const before = meter.count
    const start = monotonicMillis()
    yield* Effect.sleep(options.seconds * 1000)
    return (meter.count - before) / (monotonicMillis() - start) * 1000
  })
  // Loops that fail end the measurement.
  const broken = Effect.andThen(Fiber.join(fiber), Effect.die("The loops ended before they were told to"))
  const result = yield* Effect.raceFirst(measure, broken)
  meter.stopped = true
  yield* Fiber.join(fiber)
  return result
})

/** How long an effect takes, in milliseconds. */
export const timed = <A, E, R>(
  effect: Effect.Effect<A, E, R>
): Effect.Effect<readonly [millis: number, value: A], E, R> =>
  Effect.suspend(() => {
    const start = performance.now()
    return Effect.map(effect, (value) => [performance.now() - start, value] as const)
  })

/** How long an effect takes, in milliseconds, where its result is of no interest. */
export const millisOf = <A, E, R>(effect: Effect.Effect<A, E, R>): Effect.Effect<number, E, R> =>
  Effect.map(timed(effect), ([millis]) => millis)

/** Rounds in which each side is measured in turn, so that noise hits all of them alike: one number per round. */
export const interleave = Effect.fnUntraced(function*<Sides extends Readonly<Record<string, Side>>>(
  rounds: number,
  sides: Sides
): Effect.fn.Return<
  { readonly [S in keyof Sides]: ReadonlyArray<number> },
  Effect.Error<ReturnType<Sides[keyof Sides]>>,
  Effect.Services<ReturnType<Sides[keyof Sides]>>
> {
  const names = Object.keys(sides) as Array<keyof Sides>
  const samples = Object.fromEntries(names.map((name) => [name, []])) as unknown as {
    readonly [S in keyof Sides]: Array<number>
  }
  for (let round = 0; round < rounds; round++) {
    for (const name of names) samples[name].push(yield* sides[name](round) as ReturnType<Sides[keyof Sides]>)
  }
  return samples
})

type Side = (round: number) => Effect.Effect<number, any, any>

/** The latencies of two things that are done one after the other, again and again, in so many blocks. */
export const alternate = Effect.fnUntraced(function*<E1, R1, E2, R2>(
  options: { readonly blocks: number; readonly turns: number; readonly warmUp: number },
  ours: (turn: number) => Effect.Effect<number, E1, R1>,
  theirs: (turn: number) => Effect.Effect<number, E2, R2>
): Effect.fn.Return<
  { readonly ours: Latencies; readonly theirs: Latencies; readonly ratio: Statistics.Spread },
  E1 | E2,
  R1 | R2
> {
  let turn = 0
  const block = Effect.fnUntraced(function*(turns: number) {
    const samples = { ours: [] as Array<number>, theirs: [] as Array<number> }
    for (let i = 0; i < turns; i++) {
      samples.ours.push(yield* ours(turn))
      samples.theirs.push(yield* theirs(turn))
      turn++
    }
    return samples
  })
  yield* block(options.warmUp)
  const blocks = []
  for (let i = 0; i < options.blocks; i++) blocks.push(yield* block(options.turns))
  const p50 = {
    ours: blocks.map((_) => Statistics.median(_.ours)),
    theirs: blocks.map((_) => Statistics.median(_.theirs))
  }
  return {
    ours: latencies(blocks.map((_) => _.ours)),
    theirs: latencies(blocks.map((_) => _.theirs)),
    ratio: Statistics.spread(Statistics.ratios(p50.ours, p50.theirs))
  }
})

export interface Latencies {
  /** The median of the blocks' medians, and how far they were apart. */
  readonly p50: Statistics.Spread
  readonly p90: number
  readonly p99: number
}

const latencies = (blocks: ReadonlyArray<ReadonlyArray<number>>): Latencies => ({
  p50: Statistics.spread(blocks.map(Statistics.median)),
  p90: Statistics.percentile(blocks.flat(), 90),
  p99: Statistics.percentile(blocks.flat(), 99)
})
