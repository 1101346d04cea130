/**
 * Sends one operation again after an unknown outcome. Every operation can be
 * repeated: the backend gives the answer that was lost, and applies nothing
 * twice.
 */

import * as Effect from "effect/Effect"
import * as Schedule from "effect/Schedule"
import { BackendError, TimedOut } from "../LeaseError.ts"

export interface Options {
  readonly operation: string
  readonly workId: string
  /** The milliseconds within which it may be sent again. */
  readonly remaining: () => number
  /** Whether an operation that was surely not applied, because the backend was out of reach, is sent again too. */
  readonly persistent: boolean
  /** Whether it was sent before, with an unknown outcome. */
  readonly unknown?: boolean
}

const pacing = Schedule.min([Schedule.exponential("10 millis"), Schedule.spaced("1 second")]).pipe(Schedule.jittered)

export const resend = <Reply extends { readonly _tag: string }>(
  send: Effect.Effect<Reply, BackendError>,
  options: Options
): Effect.Effect<Exclude<Reply, { readonly _tag: "Busy" }>, BackendError> =>
  Effect.suspend(() => {
    let unknown = options.unknown === true
    const busy = new BackendError({
      operation: options.operation,
      workId: options.workId,
      outcome: "rejected",
      reason: new TimedOut({})
    })
    return send.pipe(
      Effect.flatMap((reply) =>
        // What is changing the row of an acquire may be an earlier sending of this very attempt.
        reply._tag === "Busy" || (unknown && reply._tag === "Contended")
          ? Effect.fail(busy)
          : Effect.succeed(reply as Exclude<Reply, { readonly _tag: "Busy" }>)
      ),
      Effect.retry({
        schedule: pacing,
        while: (error) => {
          unknown = unknown || error.outcome === "unknown"
          // Once an attempt may have been applied, a later refusal settles nothing.
          return options.remaining() > 0 &&
            (error === busy || error.outcome === "unknown" || ((unknown || options.persistent) && isTransient(error)))
        }
      }),
      Effect.mapError((error) =>
        unknown && error.outcome === "rejected"
          ? new BackendError({
            operation: error.operation,
            workId: options.workId,
            outcome: "unknown",
            reason: error.reason
          })
          : error
      )
    )
  })

const isTransient = (error: BackendError): boolean =>
  error.reason._tag === "Unreachable" || error.reason._tag === "TimedOut"
