/** 9. A release that nobody waits for, with wake-ups on and off. */
import { Context, Effect, Layer } from "effect"
import { Backend, Lease } from "worklease"
import * as Bench from "../Bench.ts"
import * as Database from "../Database.ts"
import * as Format from "../Format.ts"
import * as Measure from "../Measure.ts"
import { median, ratios, type Spread, spread } from "../Statistics.ts"
import * as Target from "../Target.ts"

const tolerance = 0.05
/** More noise than that excuses nothing. */
const maximumNoise = 0.1

export const target = Target.make({
  number: 9,
  name: "Release with nobody waiting",
  method:
    "Releases with wake-ups on and off (`wakeups: false`, which never notifies), in turns, over the same client and table: " +
    "one by one, and 200 fibers at a time. Also once more with wake-ups off, as a control: how far two series of the very " +
    "same thing are apart is the noise. It passes if the median ratio of the blocks is at most 1.05, and the noise, of which " +
    `no more than ${maximumNoise} counts.`,
  sizes: {
    full: { blocks: 12, turns: 200, batches: 20, batch: 200 },
    quick: { blocks: 5, turns: 60, batches: 6, batch: 200 },
    tiny: { blocks: 2, turns: 4, batches: 1, batch: 5 }
  },
  describe: ({ batch, batches, blocks, turns }) =>
    `${blocks} blocks of ${Format.count(turns)} single releases and ${Format.plural(batches, "batch")} of ${batch}`,
  run: Effect.fnUntraced(function*(size) {
    const url = yield* Bench.database
    return yield* Effect.gen(function*() {
      const withWakeups = yield* leasesOf(true)
      const without = yield* leasesOf(false)
      if (!withWakeups.hasWakeups) {
        return {
          rows: [{
            what: "a release with wake-ups",
            ours: "the backend has none",
            target: `≤ ${1 + tolerance}×`,
            verdict: "fall short" as const
          }]
        }
      }
      const series = { on: withWakeups.leases, off: without.leases, control: without.leases }
      const single = yield* measure(size, series, size.turns, (leases) => releaseOne(leases))
      const batched = yield* measure(size, series, size.batches, (leases) => releaseMany(leases, size.batch))
      return {
        rows: [rowOf("one release, p50", single), rowOf(`in batches of ${size.batch}, each`, batched)],
        notes: [
          `The noise: ${Format.percent(single.noise * 100)} for single releases, ${
            Format.percent(batched.noise * 100)
          } in batches.`
        ]
      }
    }).pipe(Effect.scoped, Effect.provide(Database.client(url)))
  })
})

/** Both over one pool and in one table. */
const leasesOf = Effect.fnUntraced(function*(wakeups: boolean) {
  const context = yield* Layer.build(
    Layer.fresh(Lease.layer.pipe(Layer.provideMerge(Database.storage(wakeups ? {} : { wakeups: false }))))
  )
  return {
    leases: Context.get(context, Lease.Leases),
    hasWakeups: Database.hasWakeups(Context.get(context, Backend.Backend))
  }
})

type Leases = Lease.Leases["Service"]

const releaseOne = (leases: Leases) =>
  Effect.flatMap(leases.acquire("single"), ({ token }) => Measure.millisOf(leases.release(token, "finished")))

/** Answers the time for each of them. */
const releaseMany = Effect.fnUntraced(function*(leases: Leases, count: number) {
  const all = { concurrency: "unbounded" } as const
  const held = yield* Effect.forEach(Array.from({ length: count }), (_, i) => leases.acquire(`many:${i}`), all)
  const millis = yield* Measure.millisOf(
    Effect.forEach(held, ({ token }) => leases.release(token, "finished"), all)
  )
  return millis / count
})

interface Measured {
  readonly on: Spread
  readonly off: Spread
  readonly ratio: Spread
  /** How far the control is from the same without its name, at the median. */
  readonly noise: number
}

const measure = Effect.fnUntraced(function*<E, R>(
  { blocks }: { readonly blocks: number },
  series: { readonly on: Leases; readonly off: Leases; readonly control: Leases },
  turns: number,
  once: (leases: Leases) => Effect.Effect<number, E, R>
): Effect.fn.Return<Measured, E, R | Bench.Bench> {
  const names = ["on", "off", "control"] as const
  const medians = { on: [] as Array<number>, off: [] as Array<number>, control: [] as Array<number> }
  // The first block warms up.
  for (let block = -1; block < blocks; block++) {
    yield* Bench.progress(`block ${block + 1} of ${blocks}`)
    const samples = { on: [] as Array<number>, off: [] as Array<number>, control: [] as Array<number> }
    for (let turn = 0; turn < turns; turn++) {
      // Each comes first, second and last equally often.
      for (let i = 0; i < names.length; i++) {
        const name = names[(turn + i) % names.length]
        samples[name].push(yield* once(series[name]))
      }
    }
    if (block >= 0) { for (const name of names) medians[name].push(median(samples[name])) }
  }
  return {
    on: spread(medians.on),
    off: spread(medians.off),
    ratio: spread(ratios(medians.on, medians.off)),
    noise: median(ratios(medians.control, medians.off).map((ratio) => Math.abs(ratio - 1)))
  }
})

const rowOf = (what: string, { noise, off, on, ratio }: Measured): Target.Row => ({
  what,
  ours: Format.spread(micros, on),
  compared: `wake-ups off ${Format.spread(micros, off)}`,
  ratio: Format.spread(Format.ratio, ratio),
  target: `≤ ${1 + tolerance}× + noise`,
  verdict: Target.verdict(ratio.median <= 1 + tolerance + Math.min(noise, maximumNoise))
})

const micros = (millis: number): string => `${Format.count(millis * 1000)} µs`
