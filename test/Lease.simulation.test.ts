/**
 * Processes whose calls and replies are lost, late or refused at random, and
 * whose states are slow to encode: two never work at the same time, tokens
 * increase, and no holder relies on a lease for longer than it is stored.
 */
import { assert, describe, it } from "@effect/vitest"
import { Cause, Clock, Duration, Effect, Exit, Fiber, Layer, Option, Schema, SchemaGetter } from "effect"
import { TestClock } from "effect/testing"
import { Backend, Checkpoint, Lease, Work, Worker } from "worklease"
import * as Intercepted from "./support/Intercepted.ts"

/** xorshift32 */
const randomOf = (seed: number) => {
  let x = seed
  return (below: number) => {
    x ^= x << 13
    x ^= x >>> 17
    x ^= x << 5
    return (x >>> 0) % below
  }
}

const simulate = Effect.fnUntraced(function*(seed: number) {
  const random = randomOf(seed * 7919)
  const upTo = (millis: number) => Duration.millis(random(millis))
  const { intercept, restore } = yield* Intercepted.Intercepted
  const backend = yield* Backend.Backend
  const log: Array<string> = []

  const SlowInt = Schema.Int.pipe(Schema.encodeTo(Schema.Int, {
    decode: SchemaGetter.passthrough<number>(),
    encode: SchemaGetter.transformEffect((n: number) => {
      const kind = random(4)
      return Effect.as(kind === 0 ? Effect.sleep(upTo(6000)) : kind === 1 ? Effect.yieldNow : Effect.void, n)
    })
  }))
  const Counter = Work.make("counter", Checkpoint.make(Schema.Struct({ count: SlowInt })))

  // From mostly well to hardly ever.
  const wellBelow = [55, 10, 0][seed % 3]
  yield* intercept((call, { items, operation }) => {
    const noted = <A>(what: string, effect: A): A => {
      log.push(`${operation} of ${items[0].workId} by ${items[0].holderId}: ${what}`)
      return effect
    }
    const replies = (_tag: string) => Effect.succeed(items.map(() => ({ _tag }))) as unknown as typeof call
    const fault = random(45 + wellBelow)
    if (fault < 7) return noted("late reply", Effect.tap(call, Effect.sleep(upTo(7000))))
    if (fault < 14) return noted("late call", Effect.andThen(Effect.sleep(upTo(7000)), call))
    if (fault < 20) {
      return noted("lost reply", Effect.andThen(call, Effect.fail(Intercepted.unreachable(operation, "unknown"))))
    }
    if (fault < 25) return noted("lost call", Effect.fail(Intercepted.unreachable(operation, "unknown")))
    if (fault < 30) return noted("not sent", Effect.fail(Intercepted.unreachable(operation, "rejected")))
    if (fault < 33) return noted("hangs", Effect.never)
    if (fault < 35) return noted("applied, and hangs", Effect.andThen(call, Effect.never))
    if (fault < 42) return noted("row is locked", replies(operation === "acquire" ? "Contended" : "Busy"))
    return noted("well", call)
  })

  const held = new Map<string, Lease.Lease<{ readonly count: number }>>()
  const lastToken = new Map<string, bigint>()
  let begun = 0

  const work = (holderId: string) =>
    Effect.fnUntraced(function*(lease: Lease.Lease<{ readonly count: number }>) {
      const { token, workId } = lease
      begun++
      assert.isTrue(token.fencingToken > (lastToken.get(workId) ?? 0n), `the tokens of ${workId} increase`)
      lastToken.set(workId, token.fencingToken)
      assert.isFalse(held.has(workId), `nobody else works on ${workId}`)
      held.set(workId, lease)
      log.push(`${holderId} begins with ${workId}`)
      let count = 0
      const checkpoint = Effect.suspend(() => Effect.exit(lease.checkpoint({ count: ++count })))
      const step = Effect.suspend((): Effect.Effect<unknown, unknown> => {
        const kind = random(80)
        if (kind < 16) return Effect.sleep(upTo(8000))
        if (kind < 32) return checkpoint
        if (kind < 48) return Effect.forkDetach(lease.guard(checkpoint), { startImmediately: true })
        if (kind < 64) return Effect.timeoutOption(checkpoint, upTo(3000))
        if (kind === 64) return Effect.fail("failed")
        if (kind === 65) return lease.handOff({ count: ++count })
        return Effect.sleep(upTo(1000))
      })
      yield* Effect.repeat(step, { times: 40 }).pipe(
        Effect.onExit(() =>
          Effect.sync(() => {
            log.push(`${holderId} ends with ${workId}`)
            held.delete(workId)
          })
        )
      )
    })

  const process = (holderId: string) =>
    Effect.suspend(() =>
      Effect.exit(Worker.run(Counter.id(["x", "y"][random(2)]), work(holderId), { wait: random(2) === 0 }))
    ).pipe(
      Effect.tap((exit) => Exit.isFailure(exit) && Cause.hasDies(exit.cause) ? exit : Effect.sleep(upTo(2000))),
      Effect.forever,
      Effect.provide(Layer.fresh(Lease.layerWith({ holderId })))
    )

  const processes = yield* Effect.forEach(["a", "b", "c"], (holderId) => Effect.forkChild(process(holderId)))
  const story = () => `with seed ${seed}, after\n${log.slice(-60).join("\n")}`
  for (let i = 0; i < 1000; i++) {
    yield* TestClock.adjust(Duration.millis(1 + random(700)))
    const now = yield* Clock.currentTimeMillis
    for (const process of processes) {
      const exit = process.pollUnsafe()
      if (exit !== undefined) assert.fail(`${String(exit)}, ${story()}`)
    }
    for (const lease of held.values()) {
      const window = Duration.toMillis(yield* lease.window)
      if (window <= 0) continue
      const [{ term }] = yield* backend.inspect({ workIds: [lease.workId], states: false })
      const { expiresAt, fencingToken, status } = Option.getOrThrow(term)
      assert.isTrue(
        fencingToken === lease.token.fencingToken && status === "held" && expiresAt - now >= window,
        `${lease.workId} is ${status} for ${expiresAt - now} ms, and its holder relies on ${window} ms, ${story()}`
      )
    }
  }
  assert.isAbove(begun, 0)
  yield* restore
  const end = yield* Effect.forkChild(Effect.forEach(processes, Fiber.interrupt, { concurrency: "unbounded" }))
  yield* TestClock.adjust("30 seconds")
  assert.isDefined(end.pollUnsafe(), `all end, ${story()}`)
})

describe("Lease, with random faults", () => {
  for (let seed = 1; seed <= 30; seed++) {
    it.effect(`seed ${seed}`, () => Effect.provide(simulate(seed), Intercepted.layer))
  }
})
