/**
 * The window: the time for which a holder may still rely on its lease, judged
 * locally.
 */

import type * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import type * as Renewal from "../Renewal.ts"

/** A moment on both of the process's clocks. */
export class Instant {
  readonly wall: number
  readonly monotonic: bigint

  constructor(clock: Clock.Clock) {
    this.wall = clock.currentTimeMillisUnsafe()
    this.monotonic = clock.monotonicTimeNanosUnsafe()
  }
}

export const now = (clock: Clock.Clock): Instant => new Instant(clock)

/**
 * The larger of both, because either may stand still: the wall clock when it
 * is set back, the monotonic one while the machine is suspended.
 */
export const millisBetween = (from: Instant, to: Instant): number =>
  Math.max(to.wall - from.wall, Number(to.monotonic - from.monotonic) / 1_000_000)

export const elapsedMillis = (clock: Clock.Clock, since: Instant): number => millisBetween(since, now(clock))

export const windowMillis = (policy: Renewal.Policy): number =>
  Duration.toMillis(policy.ttl) - Duration.toMillis(policy.safetyMargin)
