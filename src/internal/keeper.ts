/**
 * Keeps the leases that are held: renews them in time, and ends the work of
 * those whose window or handoff has run out. No lease has a fiber or a timer of
 * its own for that.
 */

import type * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import type { Deadline, Deadlines, Run } from "./deadlines.ts"
import type { Term } from "./term.ts"
import * as Window from "./window.ts"

/** How often the clocks are compared: the monotonic one, which timers follow, may have stood still meanwhile. */
const watchInterval = 1000

/** The milliseconds that the clocks may differ by, for one of them has no finer unit. */
const clockUnit = 1

/** The part of `renewEvery` by which a renewal may come earlier, in one statement with others. */
const slackOf = (renewEvery: number): number => renewEvery / 8

interface Kept {
  readonly renew: Effect.Effect<void>
  deadline: Deadline | undefined
  renewal: Fiber.Fiber<void> | undefined
}

export class Keeper {
  private readonly clock: Clock.Clock
  private readonly deadlines: Deadlines
  private readonly run: Run
  private readonly all = new Map<Term, Kept>()
  private watching: Deadline | undefined
  private seen: Window.Instant

  constructor(options: {
    readonly clock: Clock.Clock
    readonly deadlines: Deadlines
    readonly run: Run
  }) {
    this.clock = options.clock
    this.deadlines = options.deadlines
    this.run = options.run
    this.seen = Window.now(options.clock)
  }

  /** `renew` renews once, and never fails. */
  keep(term: Term, renew: Effect.Effect<void>): void {
    this.all.set(term, { renew, deadline: undefined, renewal: undefined })
    if (this.watching === undefined) {
      this.seen = Window.now(this.clock)
      this.watch()
    }
    this.look(term)
  }

  /** Does what is due, and comes back when more will be. */
  look(term: Term): void {
    const kept = this.all.get(term)
    if (kept === undefined) return
    if (kept.deadline !== undefined) this.deadlines.cancel(kept.deadline)
    if (term.loseIfExhausted()) return
    if (term.untilYieldDeadline <= 0) term.overrun()
    const renewEvery = Duration.toMillis(term.policy.renewEvery)
    const slack = slackOf(renewEvery)
    // A checkpoint extends the lease too, so the next renewal is counted from it.
    if (kept.renewal === undefined && renewEvery - term.sinceConfirmed <= slack) {
      const renewal = this.run(kept.renew)
      if (renewal.pollUnsafe() === undefined) {
        kept.renewal = renewal
        renewal.addObserver(() => {
          kept.renewal = undefined
          this.look(term)
        })
      }
    }
    const untilRenewal = kept.renewal === undefined ? renewEvery - term.sinceConfirmed : Infinity
    const untilYieldDeadline = term.untilYieldDeadline
    const untilEnd = Math.min(term.remaining, untilYieldDeadline > 0 ? untilYieldDeadline : Infinity)
    kept.deadline = this.deadlines.set(
      Math.min(untilRenewal, untilEnd),
      () => this.look(term),
      untilRenewal < untilEnd ? slack : 0
    )
  }

  /** Waits for a renewal in flight to end: nothing may revive a lease that is released next. */
  letGo(term: Term): Effect.Effect<void> {
    return Effect.suspend(() => {
      const kept = this.all.get(term)
      if (kept === undefined) return Effect.void
      this.all.delete(term)
      if (kept.deadline !== undefined) this.deadlines.cancel(kept.deadline)
      if (this.all.size === 0 && this.watching !== undefined) {
        this.deadlines.cancel(this.watching)
        this.watching = undefined
      }
      return kept.renewal === undefined ? Effect.void : Fiber.interrupt(kept.renewal)
    })
  }

  private watch(): void {
    this.watching = this.deadlines.set(watchInterval, () => {
      this.watch()
      const now = Window.now(this.clock)
      const leap = now.wall - this.seen.wall - Number(now.monotonic - this.seen.monotonic) / 1_000_000
      if (Math.abs(leap) <= clockUnit) return
      this.seen = now
      if (leap > 0) { for (const term of this.all.keys()) this.look(term) }
    })
  }
}
