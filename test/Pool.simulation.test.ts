import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { interval, simulate, type Simulation, ttl } from "./support/PoolSimulation.ts"

/** What is drawn: `POOL_SEEDS=1..400` for more and larger ones, `POOL_SEEDS=17..17` for one of them. */
const [firstSeed, lastSeed] = (globalThis.process.env["POOL_SEEDS"] ?? "1..20").split("..").map(Number)
const seeds = Array.from({ length: (lastSeed ?? firstSeed) - firstSeed + 1 }, (_, index) => firstSeed + index)

/** `POOL_FIGURES=1` prints what it took, and adds the largest pool. */
const withFigures = globalThis.process.env["POOL_FIGURES"] !== undefined

/** Rounds last up to a tenth longer, and a simulation looks four times in a round. */
const rounds = (count: number) => count * 1.1 * interval + interval / 4

/** Members come, go, crash and freeze, and keys come and go. At last, those that are frozen go on. */
const disturb = Effect.fnUntraced(function*(simulation: Simulation, most: number, capacity: () => number) {
  const { random } = simulation
  let stable = 0
  for (let events = random.between(3, 15); events > 0; events--) {
    yield* simulation.pass(random.between(0, random.chance(0.5) ? ttl / 2 : 2 * ttl))
    const living = simulation.living
    const one = living[random.between(0, living.length - 1)]
    switch (random.between(0, 6)) {
      case 0:
      case 1: {
        for (let count = Math.min(random.between(1, 5), most - living.length); count > 0; count--) {
          yield* simulation.start({
            memberId: random.chance(0.3) ? `member-${stable++}` : undefined,
            capacity: capacity()
          })
        }
        break
      }
      case 2:
        if (living.length > 1) yield* simulation.leave(one)
        break
      case 3:
        if (living.length > 1) yield* simulation.crash(one)
        break
      case 4:
        simulation.freeze(one)
        break
      case 5:
        for (const process of living) yield* simulation.thaw(process)
        break
      case 6:
        yield* random.chance(0.5) ? simulation.leave(one) : simulation.crash(one)
        yield* simulation.pass(random.between(0, ttl))
        yield* simulation.start({ memberId: one.memberId, capacity: one.capacity })
        break
    }
    if (random.chance(0.2)) simulation.setKeys(random.between(1, 2 * simulation.keys.length))
  }
  for (const process of simulation.living) yield* simulation.thaw(process)
})

describe("Pool, simulated", () => {
  const changes: ReadonlyArray<readonly [count: number, before: number, after: number, moves: number]> = [
    [40, 5, 6, 6],
    [40, 6, 5, 7],
    [160, 0, 20, 160],
    [160, 19, 20, 8],
    [160, 20, 19, 8],
    [5000, 4, 5, 1000],
    ...withFigures ? [[10_000, 0, 50, 10_000], [10_000, 49, 50, 200]] as const : []
  ]
  for (const [count, before, after, fewest] of changes) {
    it.effect(
      `${count} work IDs, ${before} members and then ${after}: ${fewest} begin elsewhere, and then none`,
      () =>
        simulate(1, (simulation) =>
          Effect.gen(function*() {
            simulation.setKeys(count)
            for (let i = 0; i < before; i++) yield* simulation.start()
            if (before > 0) yield* simulation.pass(10 * interval)
            const begun = simulation.begun
            for (let i = before; i < after; i++) yield* simulation.start()
            for (let i = after; i < before; i++) yield* simulation.leave(simulation.living[0])
            const took = yield* simulation.converge()
            const moves = simulation.begun - begun
            simulation.statements.clear()
            yield* simulation.pass(100 * interval, interval)
            const cost = (simulation.statements.get("inspect") ?? 0) / after / 100
            if (withFigures) console.log({ count, before, after, moves, rounds: took, inspectsPerMemberAndRound: cost })
            assert.strictEqual(moves, fewest)
            assert.isAtMost(took, 5)
            assert.strictEqual(simulation.begun, begun + moves)
            // Every round it reads the members, and every tenth one all the rest.
            assert.isAtMost(cost, 1.25)
            assert.strictEqual(simulation.overlaps, 0)
          })),
      600_000
    )
  }

  for (const seed of seeds) {
    it.effect(
      `seed ${seed}: after whatever happens all is shared within a few rounds, and then nothing moves`,
      () =>
        simulate(seed, (simulation) =>
          Effect.gen(function*() {
            const { random } = simulation
            const most = random.chance(0.2) ? 50 : random.between(1, 12)
            simulation.setKeys(random.between(1, 10 ** random.between(1, lastSeed === 20 ? 3 : 4)))
            const isWeighted = random.chance(0.4)
            const capacity = () => isWeighted ? random.between(1, 40) : 10_000
            for (let count = random.between(1, Math.min(most, 5)); count > 0; count--) {
              yield* simulation.start({ capacity: capacity() })
            }
            yield* disturb(simulation, most, capacity)
            const took = yield* simulation.converge()
            const begun = simulation.begun
            yield* simulation.pass(100 * interval)
            if (withFigures) console.log({ seed, rounds: took, gap: simulation.longestGap, begun })
            assert.strictEqual(simulation.overlaps, 0)
            assert.isAtMost(took, 5)
            assert.strictEqual(simulation.begun, begun)
            assert.isAtMost(simulation.longestGap, ttl + rounds(2))
          })),
      600_000
    )
  }
})
