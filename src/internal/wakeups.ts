/**
 * Wake-ups of a store with a channel: hints that a work ID may have become
 * free, and that holders were asked to yield, over one connection that is open
 * only while something waits for either.
 *
 * Whoever ends a term tells only those work IDs that somebody has registered.
 * One fiber keeps the registrations and the connection, and heals both. A hint
 * that is lost costs time: waiters look again by themselves, and holders renew.
 */

import * as Arr from "effect/Array"
import * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Latch from "effect/Latch"
import * as Option from "effect/Option"
import * as Queue from "effect/Queue"
import * as Random from "effect/Random"
import * as Schedule from "effect/Schedule"
import * as Scope from "effect/Scope"
import * as Semaphore from "effect/Semaphore"
import type { Backend } from "../Backend.ts"
import { BackendError, TimedOut } from "../LeaseError.ts"
import { Hints, YieldRequests } from "./hints.ts"

/** What a message begins with that names a work ID which may have become free. */
export const freed = "f"

/** What a message begins with that names a work ID whose holder was asked to yield. */
export const asked = "y"

/**
 * Stands for all work IDs, and is none itself: who is registered for it is told
 * of requests to yield.
 */
export const anyWorkId = ""

/** What the store must do. Every failure is healed by another connection. */
export interface Store {
  /** Opens the connection, which belongs to the scope. A message says what it is and names a work ID, or is a ping. */
  readonly listen: Effect.Effect<Queue.Dequeue<{ readonly payload: string }, unknown>, unknown, Scope.Scope>
  /**
   * From now on, until `registrationTtl` has passed, the endings of these work
   * IDs are told, and requests to yield where `anyWorkId` is one of them.
   */
  readonly register: (workIds: ReadonlyArray<string>) => Effect.Effect<unknown, unknown>
  /** Ends that, and tells somebody else who has registered of each. */
  readonly passOn: (workIds: ReadonlyArray<string>) => Effect.Effect<unknown, unknown>
  /** Ends that, and cleans up what others have left behind. A ping is a message that names no work ID. */
  readonly unregister: (workIds: ReadonlyArray<string>, ping: boolean) => Effect.Effect<unknown, unknown>
}

export interface Wakeups {
  /** As the port has it. */
  readonly subscribe: (workId: string) => Effect.Effect<Effect.Effect<void>, never, Scope.Scope>
  /** As the port has it. */
  readonly yieldRequests: Effect.Effect<Effect.Effect<string>, never, Scope.Scope>
  /** Has to run for as long as there are subscriptions. */
  readonly keep: Effect.Effect<never>
}

/** As a backend provides them, which may have none. */
export const portOf = (wakeups: Wakeups | undefined): Pick<Backend["Service"], "wakeups" | "yieldRequests"> => ({
  wakeups: Option.fromUndefinedOr(wakeups?.subscribe),
  yieldRequests: Option.fromUndefinedOr(wakeups?.yieldRequests)
})

/** How long a registration lasts if it is not refreshed: its process has died. */
export const registrationTtl = Duration.seconds(60)

/** What the statements of a store may take before they are tried again. */
const timeout = Duration.seconds(5)

/** Bounds a statement of a store, or the way to its connection. */
export const inTime = <A, R>(
  operation: string,
  effect: Effect.Effect<A, BackendError, R>
): Effect.Effect<A, BackendError, R> =>
  Effect.timeoutOrElse(effect, {
    duration: timeout,
    orElse: () => Effect.fail(new BackendError({ operation, outcome: "unknown", reason: new TimedOut({}) }))
  })

const refreshEvery = Duration.seconds(20)

/** How long a ping may take to come back. */
const pingTimeout = Duration.seconds(5)

/** What waits again within this time, and up to twice that, finds the registration and the connection. */
const linger = Duration.seconds(3)

const farewellTimeout = Duration.seconds(1)

const maxBatchSize = 500

/** After how many failures in a row an operator is told. */
const warnAfter = 3

const backoff = Schedule.min([Schedule.exponential("250 millis"), Schedule.spaced("30 seconds")]).pipe(
  Schedule.jittered
)

export const makeUnsafe = (store: Store): Wakeups => {
  const hints = new Hints()
  const yieldRequests = new YieldRequests()
  /** Open while something waits. */
  const wanted = Latch.makeUnsafe(false)
  /** The work IDs that wait for their registration, and whether there are any. */
  const pending = new Set<string>()
  const demand = Latch.makeUnsafe(false)
  /** What is registered while the connection stands: the next waiter has nothing to wait for. */
  const registered = new Set<string>()
  /** What may be registered, also since before the connection. */
  const known = new Set<string>()
  /** Those of them that nothing has waited for since the last look. */
  const idle = new Set<string>()
  let isIdle = false
  /** What was told here although nothing waits for it any more, and whether there is any. */
  const misdirected = new Set<string>()
  const isMisdirected = Latch.makeUnsafe(false)
  /** Open once a message has come. */
  const heard = Latch.makeUnsafe(false)
  let isProven = false
  /** One statement at a time, so that none undoes a later one. */
  const turn = Semaphore.makeUnsafe(1)

  const wakeAll = (workIds: Iterable<string>): void => {
    for (const workId of workIds) hints.wake(workId)
  }

  const subscribe: Wakeups["subscribe"] = (workId) =>
    hints.subscribe(
      workId,
      () => {
        idle.delete(workId)
        misdirected.delete(workId)
        isIdle = false
        wanted.openUnsafe()
        if (registered.has(workId)) return true
        pending.add(workId)
        demand.openUnsafe()
        return false
      },
      () => {
        pending.delete(workId)
        if (hints.isEmpty) wanted.closeUnsafe()
      }
    )

  // ---------------------------------------------------------------------------
  // while a connection stands
  // ---------------------------------------------------------------------------

  const receiving = (queue: Queue.Dequeue<{ readonly payload: string }, unknown>) =>
    Effect.forever(Effect.map(Queue.take(queue), ({ payload }) => {
      heard.openUnsafe()
      const workId = payload.slice(1)
      if (payload.startsWith(asked)) return yieldRequests.tell(workId)
      if (!payload.startsWith(freed)) return
      hints.wake(workId)
      if (hints.has(workId)) return
      registered.delete(workId)
      known.delete(workId)
      idle.delete(workId)
      misdirected.add(workId)
      isMisdirected.openUnsafe()
    }))

  /** Each time one process fewer is registered, so that this comes to an end. */
  const passingOn = Effect.forever(Effect.andThen(
    isMisdirected.await,
    turn.withPermit(Effect.suspend(() => {
      const workIds = Array.from(misdirected)
      misdirected.clear()
      isMisdirected.closeUnsafe()
      return workIds.length === 0 ? Effect.void : store.passOn(workIds)
    }))
  ))

  /** While one statement is in flight, the next batch forms. */
  const registering = Effect.forever(Effect.andThen(
    demand.await,
    turn.withPermit(Effect.suspend(() => {
      const batch = Arr.take(pending, maxBatchSize)
      for (const workId of batch) known.add(workId)
      return Effect.map(batch.length === 0 ? Effect.void : store.register(batch), () => {
        for (const workId of batch) {
          pending.delete(workId)
          registered.add(workId)
        }
        if (pending.size === 0) demand.closeUnsafe()
        // They may have become free before.
        wakeAll(batch)
      })
    }))
  ))

  const refreshing = Effect.gen(function*() {
    let refreshedAt = yield* Clock.currentTimeMillis
    while (true) {
      // Whatever anybody has sent meanwhile proves as much.
      const ping = !heard.isOpen()
      heard.closeUnsafe()
      yield* turn.withPermit(store.unregister([], ping))
      if (ping) {
        yield* Effect.timeoutOrElse(heard.await, {
          duration: pingTimeout,
          orElse: () =>
            Effect.fail("Nothing arrives: the connection is half-open, or behind a pooler that does not keep sessions")
        })
      }
      isProven = true
      yield* Effect.sleep(refreshEvery)
      yield* turn.withPermit(
        Effect.suspend(() => Effect.forEach(Arr.chunksOf(registered, maxBatchSize), store.register, { discard: true }))
      )
      const now = yield* Clock.currentTimeMillis
      // The process was frozen, and others have taken it for dead.
      if (now - refreshedAt >= Duration.toMillis(registrationTtl)) wakeAll(registered)
      refreshedAt = now
    }
  })

  /** Ends registrations soon after nothing waits for them, not one by one, and itself when nothing waits at all. */
  const tidying = Effect.gen(function*() {
    while (true) {
      yield* Effect.sleep(linger)
      if (isIdle) return
      isIdle = hints.isEmpty
      yield* turn.withPermit(Effect.suspend(() => {
        const over = Array.from(idle)
        idle.clear()
        for (const workId of over) registered.delete(workId)
        for (const workId of known) if (!hints.has(workId)) idle.add(workId)
        return over.length === 0 ? Effect.void : Effect.map(store.unregister(over, false), () => {
          for (const workId of over) {
            known.delete(workId)
            idle.delete(workId)
          }
        })
      }))
    }
  })

  const connected = (scope: Scope.Scope, onListening: () => void) =>
    Effect.gen(function*() {
      const queue = yield* Scope.provide(store.listen, scope)
      const receiver = yield* Effect.forkIn(receiving(queue), scope, { startImmediately: true })
      onListening()
      registered.clear()
      misdirected.clear()
      isMisdirected.closeUnsafe()
      for (const workId of hints.workIds) pending.add(workId)
      if (pending.size > 0) demand.openUnsafe()
      yield* Effect.raceAllFirst([
        // Also when the client is closed, which interrupts it.
        Effect.flatMap(Fiber.await(receiver), (exit) => Effect.fail(exit)),
        registering,
        passingOn,
        refreshing,
        tidying
      ])
    })

  /** Ends all registrations, and tells whether the connection still answers. */
  const farewell = Effect.suspend(() => {
    heard.closeUnsafe()
    const workIds = Array.from(known)
    return Effect.andThen(
      Effect.map(store.unregister(workIds, true), () => {
        for (const workId of workIds) known.delete(workId)
      }),
      heard.await
    )
  }).pipe(
    Effect.interruptible,
    Effect.timeoutOption(farewellTimeout),
    Effect.exit,
    Effect.map((exit) => Exit.isSuccess(exit) && exit.value._tag === "Some")
  )

  /** One connection, until nothing waits any more or it fails. */
  const session = Effect.uninterruptibleMask(Effect.fnUntraced(function*(restore) {
    const scope = yield* Scope.make()
    let isListening = false
    const exit = yield* Effect.exit(restore(connected(scope, () => {
      isListening = true
    })))
    registered.clear()
    const isBroken = Exit.isFailure(exit) && !Cause.hasInterruptsOnly(exit.cause)
    const answers = isListening && !isBroken && (yield* farewell)
    // A client that ends its listening on a connection which does not answer waits for the answer, and nothing ends
    // that. Where the connection is taken back from it at the same time, it throws it away.
    const closing = yield* Effect.forkDetach(
      Scope.close(answers ? scope : { ...scope, strategy: "parallel" }, exit),
      { startImmediately: true }
    )
    // On a single connection, it waits for an open transaction, which may wait for this.
    yield* Effect.timeoutOption(Effect.interruptible(Fiber.await(closing)), farewellTimeout)
    return yield* exit
  }))

  const keep = Effect.suspend(() => {
    isProven = false
    return Effect.andThen(wanted.await, session)
  }).pipe(
    Effect.catchCause((cause) =>
      isProven
        // It was there: the delays begin anew.
        ? Effect.logDebug("The connection for wake-ups was lost and is opened again", cause).pipe(
          Effect.andThen(Random.nextBetween(0, 250)),
          Effect.flatMap(Effect.sleep)
        )
        : Effect.fail(cause)
    ),
    Effect.retry(
      Schedule.tap(backoff, ({ attempt, input }) =>
        Effect.logWithLevel(attempt === warnAfter ? "Warn" : "Debug")(
          "There are no wake-ups at present, so that waiting acquires poll, and requests to yield come with renewals",
          input
        ))
    ),
    Effect.ignoreCause,
    Effect.forever
  )

  return {
    subscribe,
    yieldRequests: Effect.andThen(subscribe(anyWorkId), yieldRequests.subscribe),
    keep
  }
}
