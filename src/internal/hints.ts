/**
 * Hints, as the port has them: that a work ID may have become free, for those
 * who wait for one, and that holders were asked to yield, for those who keep
 * leases.
 */

import * as Effect from "effect/Effect"
import * as Latch from "effect/Latch"
import type * as Scope from "effect/Scope"

export class Hints {
  private readonly waiting = new Map<string, Set<Latch.Latch>>()

  /** Whether anybody waits for anything. */
  get isEmpty(): boolean {
    return this.waiting.size === 0
  }

  /** What is waited for. */
  get workIds(): Iterable<string> {
    return this.waiting.keys()
  }

  /** Whether anybody waits for a work ID. */
  has(workId: string): boolean {
    return this.waiting.has(workId)
  }

  wake(workId: string): void {
    for (const latch of this.waiting.get(workId) ?? []) latch.openUnsafe()
  }

  /**
   * Waits for hints, as the port has it. `begin` tells whether the first one has
   * come already; `end` follows when nobody waits for the work ID any more.
   */
  subscribe(
    workId: string,
    begin: () => boolean,
    end: () => void
  ): Effect.Effect<Effect.Effect<void>, never, Scope.Scope> {
    return Effect.map(
      Effect.acquireRelease(
        Effect.sync(() => {
          const latch = Latch.makeUnsafe(false)
          const latches = this.waiting.get(workId) ?? new Set()
          this.waiting.set(workId, latches.add(latch))
          // Where it is found waiting already.
          if (begin()) latch.openUnsafe()
          return latch
        }),
        (latch) =>
          Effect.sync(() => {
            const latches = this.waiting.get(workId)
            latches?.delete(latch)
            if (latches?.size !== 0) return
            this.waiting.delete(workId)
            end()
          })
      ),
      (latch) => Effect.andThen(latch.await, Effect.sync(() => latch.closeUnsafe()))
    )
  }
}

/** What one subscriber has not taken yet. */
interface Untaken {
  readonly workIds: Set<string>
  readonly latch: Latch.Latch
}

export class YieldRequests {
  private readonly subscribers = new Set<Untaken>()

  /** Tells all who have subscribed. */
  tell(workId: string): void {
    for (const { latch, workIds } of this.subscribers) {
      workIds.add(workId)
      latch.openUnsafe()
    }
  }

  readonly subscribe: Effect.Effect<Effect.Effect<string>, never, Scope.Scope> = Effect.map(
    Effect.acquireRelease(
      Effect.sync(() => {
        const untaken: Untaken = { workIds: new Set(), latch: Latch.makeUnsafe(false) }
        this.subscribers.add(untaken)
        return untaken
      }),
      (untaken) => Effect.sync(() => this.subscribers.delete(untaken))
    ),
    ({ latch, workIds }) =>
      Effect.andThen(
        latch.await,
        Effect.sync(() => {
          const [workId] = workIds
          workIds.delete(workId)
          if (workIds.size === 0) latch.closeUnsafe()
          return workId
        })
      )
  )
}
