/**
 * What one lease encodes and decodes: the checkpoint of its work, with the
 * services that it needs.
 */

import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import type * as Backend from "../Backend.ts"
import type { Prior } from "../Lease.ts"
import { type CheckpointDecodeError, CheckpointEncodeError, type CheckpointTooLarge } from "../LeaseError.ts"
import type * as Work from "../Work.ts"
import { workIdOf } from "./workId.ts"

export interface Codec {
  readonly encode: (state: unknown) => Effect.Effect<Backend.Stored, CheckpointEncodeError | CheckpointTooLarge>
  /** None for work without checkpoints, which leaves those of others as they are. */
  readonly decode: (stored: Backend.Stored) => Effect.Effect<Option.Option<any>, CheckpointDecodeError>
}

/** The optional last parameter of an operation that ends a term. */
export const encodeFinal = (
  codec: Codec,
  state: ReadonlyArray<unknown>
): Effect.Effect<Option.Option<Backend.Stored>, CheckpointEncodeError | CheckpointTooLarge> =>
  state.length === 0 || state[0] === undefined
    ? Effect.succeedNone
    : Effect.asSome(codec.encode(state[0]))

export const decodeState = (
  codec: Codec,
  state: Option.Option<Backend.Stored>
): Effect.Effect<Option.Option<any>, CheckpointDecodeError> =>
  Option.match(state, {
    onNone: () => Effect.succeedNone,
    onSome: codec.decode
  })

export const decodePrior = (
  codec: Codec,
  prior: Backend.StoredPrior
): Effect.Effect<Prior<any>, CheckpointDecodeError> =>
  Effect.map(decodeState(codec, prior.state), (state) => ({
    state,
    exit: Option.match(prior.term, { onNone: () => "none" as const, onSome: (term) => term.exit }),
    holderId: Option.map(prior.term, (term) => term.holderId),
    fencingToken: Option.map(prior.term, (term) => term.fencingToken),
    termsWithoutProgress: prior.termsWithoutProgress
  }))

export const codecOf = (work: Work.Input, context: Context.Context<never>): Codec => {
  const workId = workIdOf(work)
  const checkpoint = typeof work === "string" ? undefined : work.work.checkpoint
  if (checkpoint === undefined) {
    return {
      encode: () =>
        Effect.fail(new CheckpointEncodeError({ workId, issue: "This work has no checkpoint. Give Work.make one" })),
      decode: () => Effect.succeedNone
    }
  }
  // What the codec needs is taken from where the lease was taken; what changes since, from where it is used. Mostly that
  // has everything, and is the same as at the checkpoint before.
  let seen = context
  let missing = false
  const provide = <A, E>(effect: Effect.Effect<A, E, any>): Effect.Effect<A, E> =>
    Exit.isExit(effect) ? effect as Effect.Effect<A, E> : Effect.withFiber((fiber) => {
      const current = fiber.context
      if (current !== seen) {
        seen = current
        missing = Array.from(context.mapUnsafe.keys()).some((key) => !current.mapUnsafe.has(key))
      }
      return missing ? Effect.provideContext(effect, Context.merge(context, current)) : effect
    }) as Effect.Effect<A, E>
  return {
    encode: (state) => provide(checkpoint.encode(workId, state as never)),
    decode: (stored) => Effect.asSome(provide(checkpoint.decode(workId, stored)))
  }
}
