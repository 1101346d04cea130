/**
 * The acquires of one process that wait for the same work ID stand in line: the
 * first one asks for all, and when it has the lease, or gives up, the next one
 * does. So a release is answered by one statement of each process, however many
 * wait there.
 */

import type * as Clock from "effect/Clock"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Scope from "effect/Scope"
import * as Semaphore from "effect/Semaphore"
import type { Backend } from "../Backend.ts"
import * as Window from "./window.ts"

export interface Line {
  /** Waits to be the first, and is that until the scope closes. */
  readonly first: Effect.Effect<void, never, Scope.Scope>
  /** Waits for a hint that the work ID may have become free. */
  readonly wakeup: Effect.Effect<void>
  /** The lease is held for so many milliseconds from now, as far as is known. */
  readonly expectHeld: (millis: number) => void
  /** The milliseconds until it may have expired. */
  readonly untilExpiry: () => number
}

export interface Lines {
  /** Joins the line for a work ID, until the scope closes. */
  readonly join: (workId: string) => Effect.Effect<Line, never, Scope.Scope>
  /** Whether anybody waits for a work ID. */
  readonly isOpen: (workId: string) => boolean
}

export const make = (clock: Clock.Clock, wakeups: Backend["Service"]["wakeups"]): Lines => {
  const lines = new Map<string, { readonly line: Line; readonly scope: Scope.Closeable; waiting: number }>()

  const open = (workId: string) => {
    const scope = Scope.makeUnsafe()
    const turn = Semaphore.makeUnsafe(1)
    let wakeup: Effect.Effect<void> | undefined
    let since = Window.now(clock)
    let held = 0
    // One subscription for all: between two of them a hint could be missed.
    const subscribe = Effect.suspend(() =>
      wakeup !== undefined || Option.isNone(wakeups) ? Effect.void : Effect.map(
        Scope.provide(wakeups.value(workId), scope),
        (subscribed) => {
          wakeup = subscribed
        }
      )
    )
    const line: Line = {
      first: Effect.andThen(turn.takeScoped(1), subscribe),
      wakeup: Effect.suspend(() => wakeup ?? Effect.never),
      expectHeld: (millis) => {
        since = Window.now(clock)
        held = millis
      },
      untilExpiry: () => Math.max(0, held - Window.elapsedMillis(clock, since))
    }
    return { line, scope, waiting: 0 }
  }

  return {
    isOpen: (workId) => lines.has(workId),
    join: (workId) =>
      Effect.map(
        Effect.acquireRelease(
          Effect.sync(() => {
            const opened = lines.get(workId) ?? open(workId)
            lines.set(workId, opened)
            opened.waiting++
            return opened
          }),
          (opened) =>
            Effect.suspend(() => {
              if (--opened.waiting > 0) return Effect.void
              lines.delete(workId)
              return Scope.close(opened.scope, Exit.void)
            })
        ),
        ({ line }) => line
      )
  }
}
