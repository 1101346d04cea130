/**
 * The rules of the contract: how they become tests, and how time passes in one.
 */

import { assert, type Vitest } from "@effect/vitest"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import type * as Scope from "effect/Scope"
import * as TestClock from "effect/testing/TestClock"
import type * as Backend from "../../Backend.ts"
import type { Options } from "../BackendContract.ts"

/** The options, as the tests use them. */
export class Store extends Context.Service<Store, {
  readonly ttl: Duration.Duration
  readonly standsStill: boolean
  readonly advance: (duration: Duration.Duration) => Effect.Effect<void>
  readonly setBack: (duration: Duration.Duration) => Effect.Effect<void>
  readonly raiseToken: (workId: string, fencingToken: bigint) => Effect.Effect<void>
  readonly lock: (workId: string) => Effect.Effect<void, never, Scope.Scope>
}>()("worklease/testing/BackendContract/Store") {}

export const storeLayer = <R, E>(options: Options<R, E>): Layer.Layer<Store, never, Backend.Backend | R> =>
  Layer.effect(
    Store,
    Effect.map(Effect.context<Backend.Backend | R>(), (context) => {
      const provided = <R2 = never>(effect: Effect.Effect<unknown, unknown, Backend.Backend | R | R2>) =>
        Effect.updateContext(
          Effect.asVoid(Effect.orDie(effect)),
          // The test's own scope, not the layer's.
          (current: Context.Context<R2>) => Context.merge(context, current) as Context.Context<Backend.Backend | R | R2>
        )
      return {
        ttl: Duration.fromInputUnsafe(options.ttl ?? (options.advance === undefined ? "1 seconds" : "30 seconds")),
        standsStill: options.standsStill === true && options.advance !== undefined,
        advance: (duration) =>
          options.advance === undefined ? live(Effect.sleep(duration)) : provided<never>(options.advance(duration)),
        setBack: (duration) => provided<never>(options.setBack!(duration)),
        raiseToken: (workId, fencingToken) => provided<never>(options.raiseToken!(workId, fencingToken)),
        lock: (workId) => provided<Scope.Scope>(options.lock!(workId))
      }
    })
  )

type Body<Args extends Array<unknown> = []> = (
  ...args: Args
) => Generator<Effect.Effect<any, any, Backend.Backend | Store | Scope.Scope>, void, any>

export type Rule<Args extends Array<unknown> = []> = (name: string, body: Body<Args>) => void

/** How the tests of a group are defined; all but `rule` depend on options. */
export interface Rules {
  readonly rule: Rule
  readonly whenStanding: Rule
  readonly whenTravelling: Rule
  readonly whenSetBack: Rule<[setBack: (duration: Duration.Input) => Effect.Effect<void, never, Store>]>
  readonly whenRaised: Rule<[raise: (workId: string, token: bigint) => Effect.Effect<void, never, Store>]>
  readonly whenLocking: Rule<[lock: (workId: string) => Effect.Effect<void, never, Store | Scope.Scope>]>
  readonly whenLockingAndTravelling: Rules["whenLocking"]
}

export const makeRules = (
  it: Vitest.MethodsNonLive<Backend.Backend | Store>,
  options: { readonly [K in keyof Options]?: unknown }
): Rules => {
  const when = (...conditions: ReadonlyArray<unknown>): Rule => (name, body) => {
    if (conditions.some((condition) => condition === undefined || condition === false)) return
    it.effect(name, () => Effect.gen(body))
  }
  const withArgs = <Args extends Array<unknown>>(rule: Rule, ...args: Args): Rule<Args> => (name, body) =>
    rule(name, () => body(...args))
  const { advance, lock, raiseToken, setBack, standsStill } = options
  const lockRow = (workId: string) => Effect.flatMap(Store, (_) => _.lock(workId))
  return {
    rule: when(),
    whenStanding: when(standsStill, advance),
    whenTravelling: when(advance),
    whenSetBack: withArgs(
      when(setBack, advance),
      (duration) => Effect.flatMap(Store, (_) => _.setBack(Duration.fromInputUnsafe(duration)))
    ),
    whenRaised: withArgs(
      when(raiseToken),
      (workId, token) => Effect.flatMap(Store, (_) => _.raiseToken(workId, token))
    ),
    whenLocking: withArgs(when(lock), lockRow),
    whenLockingAndTravelling: withArgs(when(lock, advance), lockRow)
  }
}

export const live = TestClock.withLive

/** Lets time pass, for the store and for the library. */
export const pass = (duration: Duration.Input) =>
  Effect.flatMap(Store, ({ advance }) => {
    const decoded = Duration.fromInputUnsafe(duration)
    // The store first, so that what the library then sends finds it in its time.
    return Effect.andThen(advance(decoded), TestClock.adjust(decoded))
  })

export const passTtls = (ttls: number) => Effect.flatMap(Store, ({ ttl }) => pass(Duration.times(ttl, ttls)))

/** Lets time pass until the next renewal is due. One millisecond more, for a ttl that has no exact third. */
export const passRenewal = Effect.flatMap(
  Store,
  ({ ttl }) => pass(Duration.sum(Duration.times(ttl, 1 / 3), Duration.millis(1)))
)

const patience = Duration.seconds(10)

/** Waits, in real time, for what is on its way. */
export const eventually = <E, R>(what: string, condition: Effect.Effect<boolean, E, R>): Effect.Effect<void, E, R> =>
  Effect.flatMap(condition, (holds) => holds ? Effect.void : Effect.fail(notYet)).pipe(
    Effect.tapError(() => live(Effect.sleep("2 millis"))),
    Effect.retry({ while: (error) => error === notYet }),
    Effect.raceFirst(
      Effect.andThen(
        live(Effect.sleep(patience)),
        Effect.die(new Error(`In ${Duration.format(patience)}, not yet: ${what}`))
      )
    ),
    Effect.catchIf((error): error is typeof notYet => error === notYet, (error) => Effect.die(error))
  )

const notYet = "not yet" as const

/** Fails, in real time, what waits where it should not. */
export const promptly = <A, E, R>(effect: Effect.Effect<A, E, R>): Effect.Effect<A, E, R> =>
  Effect.raceFirst(
    effect,
    Effect.andThen(live(Effect.sleep("5 seconds")), Effect.die(new Error("It waits for the lock")))
  )

/** Does something again and again until a fiber has ended. */
export const meanwhile = <R>(fiber: Fiber.Fiber<unknown, unknown>, effect: Effect.Effect<unknown, never, R>) =>
  eventually("the fiber has ended", Effect.as(effect, false).pipe(Effect.map(() => isOver(fiber))))

export const isOver = (fiber: Fiber.Fiber<unknown, unknown>): boolean => fiber.pollUnsafe() !== undefined

/** Exactly, where the store's clock stands still; else within what a slow machine takes. */
export const assertNear = (actual: Duration.Duration, expected: Duration.Duration) =>
  Effect.map(Store, ({ standsStill, ttl }) => {
    const ahead = Duration.toMillis(expected) - Duration.toMillis(actual)
    assert.isTrue(
      ahead >= 0 && (standsStill ? ahead === 0 : ahead < Duration.toMillis(ttl) / 4),
      `${Duration.format(actual)} is not ${Duration.format(expected)}`
    )
  })
