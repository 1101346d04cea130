/**
 * What the backends have in common: times in microseconds, and errors.
 */

import * as Duration from "effect/Duration"
import { BackendError, type BackendErrorReason } from "../LeaseError.ts"

/** For so long what has ended is never swept. */
export const minimumRetention = Duration.hours(1)

/** From microseconds, which a double holds exactly for two centuries. */
export const toMillis = (micros: string | number | bigint): number => Number(micros) / 1000

/** How long a lease still lasts, or how long ago it ended, by the microseconds until its expiry. */
export const timesOf = (
  isHeld: boolean,
  micros: string | number | bigint
): { readonly remaining: Duration.Duration; readonly sinceEnd: Duration.Duration } => ({
  remaining: Duration.micros(BigInt(isHeld ? micros : 0)),
  sinceEnd: Duration.micros(BigInt(isHeld ? 0 : Math.max(0, -Number(micros))))
})

export const backendError = (
  operation: string,
  outcome: BackendError["outcome"],
  reason: BackendErrorReason
): BackendError => new BackendError({ operation, outcome, reason })
