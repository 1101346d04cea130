/**
 * What a member of a pool has at work: how the work of a work ID is begun and
 * ended, and what is said of it and waited for when it fails.
 */

import * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import type * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import * as Random from "effect/Random"
import type * as Scope from "effect/Scope"
import { CurrentLease, type Lease, type Leases } from "../Lease.ts"
import type * as Renewal from "../Renewal.ts"
import type * as Work from "../Work.ts"
import type { Known } from "./keys.ts"
import { pauseOf } from "./plan.ts"
import { type Term, termOf } from "./term.ts"
import * as Window from "./window.ts"

/** What this process does about a work ID. */
export interface Run extends Known {
  /** Set when its work begins. */
  term: Term | undefined
  isYielding: boolean
  /** It is another's, who did not take it. */
  isAdopted: boolean
  fiber: Fiber.Fiber<unknown, unknown> | undefined
}

export interface Runs {
  /** By work ID. */
  readonly all: ReadonlyMap<string, Run>
  /** Takes a work ID after so many milliseconds, and does its work. It waits for the lease, unless it is adopted. */
  readonly start: (known: Known, pause: number, isAdopted?: boolean) => Effect.Effect<void>
  /** Ends a run: work that has begun leaves at its next safe point. */
  readonly end: (run: Run) => void
  /** The milliseconds for which a work ID that could not be taken is let alone yet. */
  readonly pauseLeft: (workId: string) => number
  /** Forgets what has failed of other work IDs than these. */
  readonly retain: (workIds: ReadonlySet<string>) => void
  /** Warns of what was not worth a message for each. */
  readonly tellTroubles: Effect.Effect<void>
}

export const make = Effect.fnUntraced(function*(options: {
  readonly leases: Leases["Service"]
  readonly work: Work.Work<any>
  readonly run: (lease: Lease<never>, key: string) => Effect.Effect<unknown, unknown, any>
  readonly policy: Renewal.Policy
  readonly quarantineAfter: number | undefined
  /** The milliseconds after which work that was asked to leave is interrupted. */
  readonly handoffTimeout: number
  /** What the work runs in. */
  readonly context: Context.Context<any>
  readonly scope: Scope.Scope
  readonly warn: (message: string, ...cause: ReadonlyArray<Cause.Cause<unknown>>) => Effect.Effect<void>
  /** Called when work has begun, and when a run is over. */
  readonly onTurn: () => void
}): Effect.fn.Return<Runs> {
  const { context, handoffTimeout, leases, onTurn, policy, quarantineAfter, scope, warn, work } = options
  const clock = yield* Clock.Clock
  const all = new Map<string, Run>()
  const failures = new Map<string, { readonly times: number; readonly at: Window.Instant; readonly pause: number }>()
  /** What happens to many at once, as when the backend is out of reach, is told once in a round. */
  const troubles = new Map<string, { readonly workId: string; readonly cause: Cause.Cause<unknown>; count: number }>()

  const execute = (run: Run, pause: number): Effect.Effect<unknown, unknown> => {
    const { key, workId } = run
    const working = leases.run(work.id(key), (lease) => {
      run.term = termOf(lease.token)
      failures.delete(workId)
      onTurn()
      return Effect.scoped(Effect.provideService(options.run(lease as never, key), CurrentLease, lease)).pipe(
        // Nobody else has interrupted it. As an interruption it would not count, and be tried again for ever.
        Effect.catchCauseIf(
          Cause.hasInterruptsOnly,
          () => Effect.die(new Error(`The work of ${JSON.stringify(workId)} interrupted itself`))
        )
      )
    }, { wait: !run.isAdopted, policy, quarantineAfter })
    return (pause > 0 ? Effect.andThen(Effect.sleep(pause), working) : working).pipe(
      Effect.onExit((exit) => {
        all.delete(workId)
        onTurn()
        return Exit.isSuccess(exit) || Cause.hasInterruptsOnly(exit.cause) ? Effect.void : settle(run, exit.cause)
      }),
      Effect.provideContext(context)
    )
  }

  const note = (what: string, workId: string, cause: Cause.Cause<unknown>) => {
    const trouble = troubles.get(what)
    if (trouble === undefined) troubles.set(what, { workId, cause, count: 1 })
    else trouble.count++
  }

  /** What the work itself fails with is paced by what is stored; what it could not begin for is paced here. */
  const settle = (run: Run, cause: Cause.Cause<unknown>): Effect.Effect<void> => {
    const { isAdopted, term, workId } = run
    const quoted = JSON.stringify(workId)
    const error = Option.getOrUndefined(Cause.findErrorOption(cause)) as { readonly _tag?: unknown } | undefined
    if (term !== undefined) {
      if (error?._tag === "Yielded" && (term.handedOff !== undefined || term.overran)) {
        return term.overran ? warn(`${quoted} did not hand over in time, and was interrupted`) : Effect.void
      }
      if (term.loss === undefined) return warn(`the work of ${quoted} failed`, cause)
      note("lost the lease", workId, cause)
      return Effect.void
    }
    // What it lost to another, or what has been quarantined since it was read.
    if ((isAdopted && error?._tag === "LeaseHeld") || error?._tag === "Quarantined") return Effect.void
    const times = (failures.get(workId)?.times ?? 0) + 1
    return Effect.map(Random.next, (jitter) => {
      failures.set(workId, { times, at: Window.now(clock), pause: pauseOf(times, jitter) })
      note("could not begin the work", workId, cause)
    })
  }

  return {
    all,
    start: (known, pause, isAdopted = false) =>
      Effect.suspend(() => {
        const run: Run = { ...known, term: undefined, isYielding: false, isAdopted, fiber: undefined }
        all.set(known.workId, run)
        return Effect.map(Effect.forkIn(execute(run, pause), scope), (fiber) => {
          run.fiber = fiber
        })
      }),
    end: (run) => {
      if (run.isYielding) return
      run.isYielding = true
      if (run.term === undefined) run.fiber?.interruptUnsafe()
      else run.term.requestYieldWithin(handoffTimeout)
    },
    pauseLeft: (workId) => {
      const failure = failures.get(workId)
      return failure === undefined ? 0 : Math.max(0, failure.pause - Window.elapsedMillis(clock, failure.at))
    },
    retain: (workIds) => {
      for (const workId of failures.keys()) if (!workIds.has(workId)) failures.delete(workId)
    },
    tellTroubles: Effect.suspend(() => {
      const told = [...troubles]
      troubles.clear()
      return Effect.forEach(told, ([what, { cause, count, workId }]) => {
        const others = count === 1 ? "" : ` and of ${count - 1} others`
        return warn(`${what} of ${JSON.stringify(workId)}${others}`, cause)
      }, { discard: true })
    })
  }
})
