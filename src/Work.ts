/**
 * A kind of work: its name, and what its checkpoints hold.
 *
 * A `Work` is a value that is shared by everything that concerns this kind of
 * work. Its name is the prefix of its work IDs, and a label with few values
 * for metrics.
 *
 * **Example** (Two units of one kind of work)
 *
 * ```ts
 * import { Schema } from "effect"
 * import { Checkpoint, Work } from "worklease"
 *
 * const Onboarding = Work.make(
 *   "onboarding",
 *   Checkpoint.make(Schema.Struct({ completed: Schema.Array(Schema.String) }))
 * )
 *
 * Onboarding.id("acme").value // => "onboarding:acme"
 * Onboarding.id("initech").value // => "onboarding:initech"
 * ```
 *
 * @since 0.1.0
 */

import type * as Checkpoint from "./Checkpoint.ts"
import type { CheckpointDecodeError } from "./LeaseError.ts"

/**
 * The runtime type identifier of works.
 *
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~worklease/Work"

/**
 * The type-level identifier of works.
 *
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~worklease/Work"

/**
 * A kind of work.
 *
 * @category models
 * @since 0.1.0
 */
export interface Work<in out S = never, out RD = never, out RE = never> {
  readonly [TypeId]: TypeId
  readonly name: string
  readonly checkpoint: Checkpoint.Checkpoint<S, RD, RE> | undefined
  /** The work ID `name:key`. It is validated where it is used: `InvalidWorkId`. */
  readonly id: (key: string) => WorkId<S, RD, RE>
}

/**
 * A typed work ID, made by a {@link Work}.
 *
 * @category models
 * @since 0.1.0
 */
export interface WorkId<in out S = never, out RD = never, out RE = never> {
  readonly work: Work<S, RD, RE>
  readonly key: string
  /** The work ID as a plain string: `name:key`. */
  readonly value: string
}

/**
 * Any kind of work, whatever its checkpoints hold.
 *
 * @category models
 * @since 0.1.0
 */
export interface Any {
  readonly [TypeId]: TypeId
  readonly name: string
  readonly checkpoint: Checkpoint.Any | undefined
}

/**
 * Any typed work ID.
 *
 * @category models
 * @since 0.1.0
 */
export interface AnyId {
  readonly work: Any
  readonly key: string
  readonly value: string
}

/**
 * What names a unit of work: a typed work ID, or a plain string, which has no
 * checkpoints.
 *
 * @category models
 * @since 0.1.0
 */
export type Input = string | AnyId

/**
 * The state that the checkpoints of a work hold; `never` if it has none.
 *
 * @category models
 * @since 0.1.0
 */
export type State<W> = W extends WorkId<infer S, infer _RD, infer _RE> ? S
  : W extends Work<infer S, infer _RD, infer _RE> ? S
  : never

/**
 * The services that the checkpoints of a work need.
 *
 * @category models
 * @since 0.1.0
 */
export type Services<W> = W extends WorkId<infer _S, infer RD, infer RE> ? RD | RE
  : W extends Work<infer _S, infer RD, infer RE> ? RD | RE
  : never

/**
 * The services that reading the checkpoints of a work needs.
 *
 * @category models
 * @since 0.1.0
 */
export type DecodingServices<W> = W extends WorkId<infer _S, infer RD, infer _RE> ? RD
  : W extends Work<infer _S, infer RD, infer _RE> ? RD
  : never

/**
 * `CheckpointDecodeError` for a work that has checkpoints, else `never`.
 *
 * @category models
 * @since 0.1.0
 */
export type DecodeError<W> = [State<W>] extends [never] ? never : CheckpointDecodeError

/**
 * Makes a kind of work, with or without checkpoints.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make: {
  (name: string): Work
  <S, RD, RE>(name: string, checkpoint: Checkpoint.Checkpoint<S, RD, RE>): Work<S, RD, RE>
} = <S, RD, RE>(name: string, checkpoint?: Checkpoint.Checkpoint<S, RD, RE>) => {
  const self: Work<S, RD, RE> = {
    [TypeId]: TypeId,
    name,
    checkpoint,
    id: (key) => ({ work: self, key, value: `${name}:${key}` })
  }
  // Without a checkpoint, S is never, which no signature can say of an optional argument.
  return self as never
}
