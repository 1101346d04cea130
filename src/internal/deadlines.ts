/**
 * Many deadlines on one timer: a process with a hundred thousand leases sleeps
 * once, until the next of them is due.
 */

import type * as Clock from "effect/Clock"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import type * as Scope from "effect/Scope"
import type * as Window from "./window.ts"

/** Runs an effect in a fiber that the layer owns. */
export type Run = (effect: Effect.Effect<void>) => Fiber.Fiber<void>

/**
 * Its fibers are interrupted when the scope closes, and nothing begins after
 * that. It is no `FiberSet`, which would enter also a fiber that is over at
 * once, and observe it. Nor has each fiber a finalizer: they would come and go
 * in a `Map`, and V8 keeps what was in a table that a `Map` has outgrown from
 * being collected with the young.
 */
export const makeRun: Effect.Effect<Run, never, Scope.Scope> = Effect.gen(function*() {
  const fork = Effect.runForkWith(yield* Effect.context<never>())
  const running: Array<Running> = []
  let isClosed = false
  yield* Effect.addFinalizer(() => {
    isClosed = true
    return Fiber.interruptAll(running.map(({ fiber }) => fiber))
  })
  return (effect) => {
    if (isClosed) return fork(Effect.interrupt)
    const fiber = fork(effect)
    if (fiber.pollUnsafe() !== undefined) return fiber
    // What it did first has closed the scope, which did not know of it yet.
    if (isClosed) {
      fiber.interruptUnsafe()
      return fiber
    }
    const entry = new Running(fiber, running.length)
    running.push(entry)
    fiber.addObserver(() => {
      const last = running.pop()!
      if (last === entry) return
      running[entry.index] = last
      last.index = entry.index
    })
    return fiber
  }
})

class Running {
  readonly fiber: Fiber.Fiber<void>
  /** Where it is in the list. */
  index: number

  constructor(fiber: Fiber.Fiber<void>, index: number) {
    this.fiber = fiber
    this.index = index
  }
}

export interface Deadline {
  /** By the monotonic clock, in milliseconds from an origin. */
  readonly at: number
  /** How much earlier it may come, in milliseconds, together with another that has slack. */
  readonly slack: number
  readonly onDue: () => void
  /** Where it is in the heap; -1 if it is not in it any more. */
  index: number
  isCancelled: boolean
}

/** What a remainder of arithmetic is rounded up to: a sleep that no clock can tell from none would never end a wait. */
const shortestSleep = 0.001

export class Deadlines {
  private readonly clock: Clock.Clock
  private readonly run: Run
  private readonly origin: bigint
  /** Runs what is due at the same time. */
  private readonly together: (onDue: () => void) => void
  /** A binary heap: none is earlier than the one at half its index. */
  private readonly heap: Array<Deadline> = []
  private sleeping: { readonly until: number; readonly fiber: Fiber.Fiber<void> } | undefined

  constructor(clock: Clock.Clock, run: Run, together: (onDue: () => void) => void = (onDue) => onDue()) {
    this.clock = clock
    this.run = run
    this.origin = clock.monotonicTimeNanosUnsafe()
    this.together = together
  }

  /** Calls back once, `millis` from now, or a little earlier if its slack allows. */
  set(millis: number, onDue: () => void, slack = 0): Deadline {
    return this.setAt(this.now() + Math.max(millis, shortestSleep), onDue, slack)
  }

  setAt(at: number, onDue: () => void, slack = 0): Deadline {
    const deadline: Deadline = { at, slack, onDue, index: -1, isCancelled: false }
    this.up(deadline, this.heap.push(deadline) - 1)
    if (this.sleeping === undefined || deadline.at < this.sleeping.until) this.sleep()
    return deadline
  }

  cancel(deadline: Deadline): void {
    deadline.isCancelled = true
    this.remove(deadline)
    // Without anything to wait for, no timer is left.
    if (this.heap.length === 0) this.wake()
  }

  now(): number {
    return this.timeOf({ monotonic: this.clock.monotonicTimeNanosUnsafe() })
  }

  /** The last moment that has come by now, as far as a timer can tell. */
  dueUntil(): number {
    return this.now() + shortestSleep
  }

  timeOf(instant: Pick<Window.Instant, "monotonic">): number {
    return Number(instant.monotonic - this.origin) / 1_000_000
  }

  private sleep(): void {
    this.wake()
    const until = this.heap[0].at
    const fiber = this.run(
      Effect.andThen(Effect.sleep(Math.max(until - this.now(), shortestSleep)), Effect.sync(() => this.ring()))
    )
    // In a layer that was closed it has not even begun.
    if (fiber.pollUnsafe() === undefined) this.sleeping = { until, fiber }
  }

  private wake(): void {
    const sleeping = this.sleeping
    this.sleeping = undefined
    sleeping?.fiber.interruptUnsafe()
  }

  private ring(): void {
    this.sleeping = undefined
    const dueUntil = this.dueUntil()
    // What they set in turn comes later, even if it is due already: whatever time stands still, this comes to an end.
    const due: Array<Deadline> = []
    let isGathering = false
    for (let next = this.heap[0]; next !== undefined; next = this.heap[0]) {
      if (next.at > dueUntil && !(isGathering && next.at - next.slack <= dueUntil)) break
      isGathering ||= next.slack > 0
      this.remove(next)
      due.push(next)
    }
    try {
      this.together(() => {
        for (let deadline = due.shift(); deadline !== undefined; deadline = due.shift()) {
          if (!deadline.isCancelled) deadline.onDue()
        }
      })
    } finally {
      // Should one of them throw, the others still come.
      for (const deadline of due) this.up(deadline, this.heap.push(deadline) - 1)
      if (this.heap.length > 0 && this.sleeping === undefined) this.sleep()
    }
  }

  private remove(deadline: Deadline): void {
    const { index } = deadline
    if (index < 0) return
    deadline.index = -1
    const last = this.heap.pop()!
    if (last === deadline) return
    if (index > 0 && last.at < this.heap[(index - 1) >> 1].at) this.up(last, index)
    else this.down(last, index)
  }

  private up(deadline: Deadline, index: number): void {
    while (index > 0) {
      const above = (index - 1) >> 1
      if (this.heap[above].at <= deadline.at) break
      this.put(this.heap[above], index)
      index = above
    }
    this.put(deadline, index)
  }

  private down(deadline: Deadline, index: number): void {
    while (true) {
      let below = 2 * index + 1
      if (below >= this.heap.length) break
      if (below + 1 < this.heap.length && this.heap[below + 1].at < this.heap[below].at) below++
      if (this.heap[below].at >= deadline.at) break
      this.put(this.heap[below], index)
      index = below
    }
    this.put(deadline, index)
  }

  private put(deadline: Deadline, index: number): void {
    this.heap[index] = deadline
    deadline.index = index
  }
}
