import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { interval, simulate, type Simulation, ttl } from "./support/PoolSimulation.ts"

/** More of them: `POOL_SEEDS=1..200 vitest run test/Pool.simulation.test.ts`, or one: `POOL_SEEDS=17`. */
const [firstSeed, lastSeed] = (globalThis.process.env["POOL_SEEDS"] ?? "1..12").split("..").map(Number)
const seeds = Array.from({ length: (lastSeed ?? firstSeed) - firstSeed + 1 }, (_, index) => firstSeed + index)

/** Members come, go, crash and freeze for a while; keys come and go. Then all frozen ones go on, and nothing happens any more. */
const disturb = Effect.fnUntraced(function*(simulation: Simulation, most: number) {
  const { random } = simulation
  const events = random.between(3, 15)
  let restarting = 0
  for (let event = 0; event < events; event++) {
    yield* simulation.pass(random.between(0, random.chance(0.5) ? ttl / 2 : 2 * ttl))
    const living = simulation.living
    const some = living[random.between(0, living.length - 1)]
    switch (random.between(0, 6)) {
      case 0:
      case 1: {
        const joining = random.between(1, Math.max(1, Math.min(most - living.length, 5)))
        for (let i = 0; i < joining && living.length + i < most; i++) {
          yield* simulation.start({ memberId: random.chance(0.3) ? `stable-${restarting++}` : undefined })
        }
        break
      }
      case 2:
        if (living.length > 1) yield* simulation.leave(some)
        break
      case 3:
        if (living.length > 1) yield* simulation.crash(some)
        break
      case 4:
        simulation.freeze(some)
        break
      case 5:
        for (const process of living) yield* simulation.thaw(process)
        break
      case 6: {
        // A restart, as in a deployment.
        yield* random.chance(0.5) ? simulation.leave(some) : simulation.crash(some)
        yield* simulation.pass(random.between(0, ttl))
        yield* simulation.start({ memberId: some.memberId })
        break
      }
    }
    if (random.chance(0.2)) simulation.setKeys(random.between(1, 2 * simulation.keys.length))
  }
  for (const process of simulation.living) yield* simulation.thaw(process)
})

const settle = Effect.fnUntraced(function*(simulation: Simulation) {
  const rounds = yield* simulation.converge()
  const begun = simulation.begun
  yield* simulation.pass(100 * interval)
  return { rounds, movesAfterwards: simulation.begun - begun }
})

describe("Pool, simulated", () => {
  for (
    const [count, before, after] of [[40, 5, 6], [40, 6, 5], [160, 0, 20], [160, 19, 20], [10_000, 4, 5]] as const
  ) {
    it.effect(`${count} work IDs, ${before} members and then ${after}`, () =>
      simulate(1, (simulation) =>
        Effect.gen(function*() {
          simulation.setKeys(count)
          for (let i = 0; i < before; i++) yield* simulation.start()
          if (before > 0) yield* simulation.pass(10 * interval)
          const begun = simulation.begun
          simulation.statements.clear()
          for (let i = before; i < after; i++) yield* simulation.start()
          for (let i = after; i < before; i++) yield* simulation.leave(simulation.living[0])
          const rounds = yield* simulation.converge()
          const moves = simulation.begun - begun
          console.log({ count, before, after, rounds, moves, statements: simulation.statements })
          const settled = simulation.begun
          simulation.statements.clear()
          yield* simulation.pass(100 * interval, interval)
          const quiet = new Map([...simulation.statements].map(([k, n]) => [k, n / after / 100]))
          console.log(quiet)
          assert.strictEqual(simulation.begun, settled)
          assert.isAtMost(rounds, 5)
        })))
  }

  for (const seed of seeds) {
    it.effect(`seed ${seed}: after whatever happens, all is shared in a few rounds, and then nothing moves`, () =>
      simulate(seed, (simulation) =>
        Effect.gen(function*() {
          const { random } = simulation
          const most = random.chance(0.2) ? 50 : random.between(1, 12)
          simulation.setKeys(random.between(1, 10 ** random.between(1, 2)))
          for (let i = random.between(1, Math.min(most, 5)); i > 0; i--) yield* simulation.start()
          yield* disturb(simulation, most)
          const { movesAfterwards, rounds } = yield* settle(simulation)
          console.log(seed, simulation.keys.length, simulation.loads.length, { rounds, movesAfterwards, gap: simulation.longestGap, overlaps: simulation.overlaps })
          assert.strictEqual(simulation.overlaps, 0)
          assert.strictEqual(movesAfterwards, 0)
          assert.isAtMost(rounds, 5)
          assert.isAtMost(simulation.longestGap, ttl + 2 * interval)
        })))
  }
})
