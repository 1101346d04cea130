/**
 * Keeps the leases that are held: renews them in time, and ends the work of
 * those whose window or handoff has run out. No lease has a fiber or a timer of
 * its own for that.
 */

import type * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type { Deadline, Deadlines } from "./deadlines.ts"
import type { Term } from "./term.ts"
import * as Window from "./window.ts"

/** How often the clocks are compared: the monotonic one, which timers follow, may have stood still meanwhile. */
const watchInterval = 1000

/** The milliseconds by which the clocks may part, as they do when one of them is being adjusted, before it matters. */
const insignificant = 10

/** The part of `renewEvery` by which a renewal may come earlier, in one statement with others. */
const slackOf = (renewEvery: number): number => renewEvery / 8

/** How many milliseconds a lease has to be held for it to be worth a connection to listen on. */
const lastingAfter = 1000

/** Begins a renewal, which calls back at its end. Returns how to stop it. */
export type Renew = (onEnd: () => void) => Effect.Effect<void>

interface Kept {
  readonly renew: Renew
  /** By the clock of the deadlines. */
  readonly since: number
  /** Whether it is to be renewed although that is not due. */
  isWanted: boolean
  deadline: Deadline | undefined
  /** Stops the renewal in flight. */
  stop: Effect.Effect<void> | undefined
}

export class Keeper {
  private readonly clock: Clock.Clock
  private readonly deadlines: Deadlines
  /** In the order in which they were taken. */
  private readonly all = new Map<Term, Kept>()
  /** The last term of each work ID. */
  private readonly byWorkId = new Map<string, Term>()
  private watching: Deadline | undefined
  private readonly onLasting: (isLasting: boolean) => void
  private isLasting = false

  /** `onLasting` is told whether there is a lease that has been held for a while, whenever that changes. */
  constructor(clock: Clock.Clock, deadlines: Deadlines, onLasting: (isLasting: boolean) => void) {
    this.clock = clock
    this.deadlines = deadlines
    this.onLasting = onLasting
  }

  keep(term: Term, renew: Renew): void {
    const since = this.deadlines.now()
    this.all.set(term, { renew, since, isWanted: false, deadline: undefined, stop: undefined })
    this.byWorkId.set(term.workId, term)
    if (this.watching === undefined) this.watch(Window.now(this.clock))
    term.onYieldRequest = () => this.look(term)
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
    if (kept.stop === undefined && (kept.isWanted || renewEvery - term.sinceConfirmed <= slack)) this.renew(term, kept)
    const untilRenewal = kept.stop === undefined ? renewEvery - term.sinceConfirmed : Infinity
    const untilYieldDeadline = term.untilYieldDeadline
    const untilEnd = Math.min(term.remaining, untilYieldDeadline > 0 ? untilYieldDeadline : Infinity)
    // A renewal that was over at once may have had it looked at already.
    if (kept.deadline !== undefined) this.deadlines.cancel(kept.deadline)
    kept.deadline = this.deadlines.set(
      Math.min(untilRenewal, untilEnd),
      () => this.look(term),
      untilRenewal < untilEnd ? slack : 0
    )
  }

  /** Renews now, if the lease is kept. A renewal in flight may have been answered before, and is followed by another. */
  renewNow(workId: string): void {
    const term = this.byWorkId.get(workId)
    if (term === undefined) return
    this.all.get(term)!.isWanted = true
    this.look(term)
  }

  /** Waits for a renewal in flight to end: nothing may revive a lease that is released next. */
  letGo(term: Term): Effect.Effect<void> {
    return Effect.suspend(() => {
      const kept = this.all.get(term)
      if (kept === undefined) return Effect.void
      this.all.delete(term)
      if (this.byWorkId.get(term.workId) === term) this.byWorkId.delete(term.workId)
      if (kept.deadline !== undefined) this.deadlines.cancel(kept.deadline)
      if (this.all.size === 0 && this.watching !== undefined) {
        this.deadlines.cancel(this.watching)
        this.watching = undefined
        this.lookAtOldest()
      }
      return kept.stop ?? Effect.void
    })
  }

  private renew(term: Term, kept: Kept): void {
    let isOver = false
    kept.isWanted = false
    const stop = kept.renew(() => {
      isOver = true
      if (kept.stop === undefined) return
      kept.stop = undefined
      this.look(term)
    })
    if (!isOver) kept.stop = stop
  }

  private watch(seen: Window.Instant): void {
    this.watching = this.deadlines.set(watchInterval, () => {
      const now = Window.now(this.clock)
      const leap = now.wall - seen.wall - Number(now.monotonic - seen.monotonic) / 1_000_000
      this.watch(Math.abs(leap) > insignificant ? now : seen)
      if (leap > insignificant) { for (const term of this.all.keys()) this.look(term) }
      this.lookAtOldest()
    })
  }

  private lookAtOldest(): void {
    const [oldest] = this.all.values()
    const isLasting = oldest !== undefined && this.deadlines.now() - oldest.since >= lastingAfter - insignificant
    if (isLasting === this.isLasting) return
    this.isLasting = isLasting
    this.onLasting(isLasting)
  }
}
