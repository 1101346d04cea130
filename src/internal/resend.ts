/**
 * Sends one operation again after an unknown outcome. Every operation can be
 * repeated: the backend gives the answer that was lost, and applies nothing
 * twice.
 */

import * as Effect from "effect/Effect"
import * as Schedule from "effect/Schedule"
import { BackendError, TimedOut } from "../LeaseError.ts"

export interface Options {
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
  operation: string,
  send: Effect.Effect<Reply, BackendError>,
  options: Options
): Effect.Effect<Settled<Reply>, BackendError> =>
  Effect.matchEffect(send, {
    onSuccess: (reply) =>
      isSettled(reply, options.unknown === true)
        ? Effect.succeed(reply)
        : sendAgain(operation, send, options, undefined),
    onFailure: (error) => sendAgain(operation, send, options, error)
  })

/** A reply after which nothing is sent again. */
export type Settled<Reply> = Exclude<Reply, { readonly _tag: "Busy" }>

/** The answer of a first sending that was made elsewhere, and what is sent from then on. */
export const startingWith = <A, E>(first: Effect.Effect<A, E>, send: Effect.Effect<A, E>): Effect.Effect<A, E> => {
  let known: typeof first | undefined = first
  return Effect.suspend(() => {
    const answer = known ?? send
    known = undefined
    return answer
  })
}

/** What is changing the row of an acquire may be an earlier sending of this very attempt. */
const isSettled = <Reply extends { readonly _tag: string }>(reply: Reply, unknown: boolean): reply is Settled<Reply> =>
  reply._tag !== "Busy" && !(unknown && reply._tag === "Contended")

/** Goes on after a first sending, which failed or met another transaction. */
const sendAgain = <Reply extends { readonly _tag: string }>(
  operation: string,
  send: Effect.Effect<Reply, BackendError>,
  options: Options,
  failure: BackendError | undefined
): Effect.Effect<Settled<Reply>, BackendError> =>
  Effect.suspend(() => {
    const { workId } = options
    const busy = new BackendError({ operation, workId, outcome: "rejected", reason: new TimedOut({}) })
    let unknown = options.unknown === true
    return startingWith(
      Effect.fail(failure ?? busy),
      Effect.flatMap(send, (reply) => isSettled(reply, unknown) ? Effect.succeed(reply) : Effect.fail(busy))
    ).pipe(
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
          ? new BackendError({ operation: error.operation, workId, outcome: "unknown", reason: error.reason })
          : error
      )
    )
  })

const isTransient = (error: BackendError): boolean =>
  error.reason._tag === "Unreachable" || error.reason._tag === "TimedOut"
