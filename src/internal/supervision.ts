/**
 * Work under a lease: run until it ends or has to end, and what it then comes
 * to.
 */

import * as Cause from "effect/Cause"
import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import type * as Backend from "../Backend.ts"
import type { LeaseLost } from "../LeaseError.ts"
import type { Term } from "./term.ts"

/** What an uninterruptible region gives back to the effects inside it. */
export type Restore = <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>

/** Runs the work in a fiber of its own until it ends, or has to end. It is over, with its finalizers, on return. */
export const supervise = <A, E, R>(
  term: Term,
  work: Effect.Effect<A, E, R>,
  restore: Restore,
  /** Whether the caller ends with it, so that fibers which its interruption does not reach have to end, too. */
  isGuard = true
): Effect.Effect<Exit.Exit<A, E>, never, R> =>
  Effect.suspend(() => {
    if (term.stopped || term.loseIfExhausted()) return Effect.succeed(Exit.interrupt())
    return Effect.flatMap(
      Effect.forkChild(restore(work), { startImmediately: true, uninterruptible: "inherit" }),
      (fiber) => {
        const over = Deferred.makeUnsafe<void>()
        const end = () => Deferred.doneUnsafe(over, Effect.void)
        term.running.add(fiber)
        fiber.addObserver(() => {
          term.running.delete(fiber)
          end()
        })
        const unsubscribe = term.whenStopped(end)
        return Effect.exit(restore(Deferred.await(over))).pipe(
          Effect.andThen(Effect.suspend(() => {
            unsubscribe()
            if (fiber.pollUnsafe() !== undefined) return Effect.void
            if (isGuard && term.stopped) term.interrupted()
            return Fiber.interrupt(fiber)
          })),
          Effect.andThen(Fiber.await(fiber))
        )
      }
    )
  })

/** What a guarded effect comes to. */
export const settleExit = <A, E>(term: Term, exit: Exit.Exit<A, E>): Effect.Effect<A, E | LeaseLost> =>
  Effect.suspend((): Effect.Effect<A, E | LeaseLost> => {
    if (term.loseIfExhausted()) return lossOf(term, exit)
    return term.stopped && Exit.isSuccess(exit) ? Effect.interrupt : exit
  })

/**
 * The loss first; what the work itself failed with stays in the cause. Its
 * defects do as failures, for beside a defect the loss could not be caught.
 */
export const lossOf = (term: Term, exit: Exit.Exit<unknown, unknown>): Effect.Effect<never, LeaseLost> => {
  const own: ReadonlyArray<Cause.Reason<unknown>> = Exit.isFailure(exit)
    ? exit.cause.reasons.filter((reason) => !Cause.isInterruptReason(reason))
      .map((reason) => Cause.isDieReason(reason) ? Cause.makeFailReason(reason.defect) : reason)
    : []
  return Effect.failCause(
    Cause.combine(
      Cause.fail(term.loss!),
      Cause.fromReasons(own as ReadonlyArray<unknown> as ReadonlyArray<Cause.Reason<never>>)
    )
  )
}

export const howToLeave = (term: Term, exit: Exit.Exit<unknown, unknown>): {
  readonly exit: Backend.ExitMode
  readonly interrupted: boolean
  readonly state: Option.Option<Backend.Stored>
} => {
  if (term.handedOff !== undefined) return { exit: "yielded", interrupted: false, state: term.handedOff.state }
  if (Exit.isSuccess(exit) && !term.overran) return { ...term.leaving, interrupted: false }
  return {
    exit: "abandoned",
    interrupted: term.overran || (Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause)),
    state: Option.none()
  }
}

/** Ends the work at a safe point: its guard interrupts it, and the calling fiber stops here even without one. */
export const endHere = (term: Term, state: Option.Option<Backend.Stored>): Effect.Effect<never> =>
  Effect.suspend(() => {
    if (term.loss !== undefined) return noReturn(term)
    // Without effect where the work has ended already: in a transaction that has committed since, say.
    term.handOff(state)
    return stopHere
  })

export const stopHere: Effect.Effect<never> = Effect.withFiber((fiber) => {
  fiber.interruptUnsafe(fiber.id)
  return Effect.interruptible(Effect.never)
})

/**
 * Waits for the interruption that a loss brings. It is interruptible even in
 * an uninterruptible region, so that nothing outlives a lost lease by catching
 * its errors; and once the work is being interrupted, it ends fibers that the
 * interruption does not reach, such as the children of such a region.
 */
export const noReturn = (term: Term): Effect.Effect<never> =>
  Effect.andThen(Effect.interruptible(Deferred.await(term.interrupting)), stopHere)
