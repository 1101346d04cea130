/**
 * Schema-typed progress state: versions, upgrades, a size limit, JSON or raw
 * bytes.
 *
 * **Example** (A checkpoint that has learned a field)
 *
 * ```ts
 * import { Schema } from "effect"
 * import { Checkpoint } from "worklease"
 *
 * const Progress = Checkpoint.make(Schema.Struct({ offset: Schema.Int })).pipe(
 *   Checkpoint.upgrade(
 *     Schema.Struct({ offset: Schema.Int, failed: Schema.Array(Schema.String) }),
 *     (previous) => ({ ...previous, failed: [] })
 *   )
 * )
 * ```
 *
 * @since 0.1.0
 */

import * as Effect from "effect/Effect"
import { dual } from "effect/Function"
import { type Pipeable, pipeArguments } from "effect/Pipeable"
import * as Schema from "effect/Schema"
import type { Stored } from "./Backend.ts"
import { CheckpointDecodeError, CheckpointEncodeError, CheckpointTooLarge, InvalidConfig } from "./LeaseError.ts"

/**
 * The runtime type identifier of checkpoints.
 *
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~worklease/Checkpoint"

/**
 * The type-level identifier of checkpoints.
 *
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~worklease/Checkpoint"

/**
 * How the states of one kind of work are encoded, decoded and limited.
 *
 * @category models
 * @since 0.1.0
 */
export interface Checkpoint<in out S, out RD = never, out RE = never> extends Pipeable {
  readonly [TypeId]: TypeId
  /** The version that `encode` writes; `decode` reads this and, through upgrades, earlier ones. */
  readonly version: number
  /** The largest encoded state, in bytes. */
  readonly maxBytes: number
  readonly decode: (workId: string, stored: Stored) => Effect.Effect<S, CheckpointDecodeError, RD>
  readonly encode: (workId: string, state: S) => Effect.Effect<Stored, CheckpointEncodeError | CheckpointTooLarge, RE>
}

/**
 * Any checkpoint, whatever its states are.
 *
 * @category models
 * @since 0.1.0
 */
export interface Any {
  readonly [TypeId]: TypeId
  readonly version: number
  readonly maxBytes: number
  readonly decode: (workId: string, stored: Stored) => Effect.Effect<any, CheckpointDecodeError, any>
  readonly encode: (
    workId: string,
    state: never
  ) => Effect.Effect<Stored, CheckpointEncodeError | CheckpointTooLarge, any>
}

/**
 * Options of a checkpoint.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** The version written with each state: a positive integer. Defaults to `1`. */
  readonly version?: number | undefined
  /** The largest encoded state, in bytes. Defaults to 1 MiB. A larger one is refused before anything is sent. */
  readonly maxBytes?: number | undefined
}

/**
 * A checkpoint whose states are described by a schema and stored as JSON.
 *
 * **Details**
 *
 * Throws `InvalidConfig` for a version or size limit that is not a positive
 * integer.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = <S extends Schema.Constraint>(
  schema: S,
  options?: Options
): Checkpoint<S["Type"], S["DecodingServices"], S["EncodingServices"]> => fromCodec(json(schema), options)

/**
 * A checkpoint whose states are raw bytes, stored as they are. What is no
 * `Uint8Array` is refused with `CheckpointEncodeError`.
 *
 * **Details**
 *
 * Throws `InvalidConfig` for a version or size limit that is not a positive
 * integer.
 *
 * @category constructors
 * @since 0.1.0
 */
export const bytes = (options?: Options): Checkpoint<Uint8Array> =>
  fromCodec({
    decode: (_, stored) => Effect.succeed(stored.bytes),
    // The caller keeps its array, and may write to it.
    encode: (workId, state) =>
      state instanceof Uint8Array
        ? Effect.succeed(state.slice())
        : Effect.fail(new CheckpointEncodeError({ workId, issue: "Expected a Uint8Array" }))
  }, options)

/**
 * The next version of a checkpoint: reads what earlier versions wrote through
 * `migrate`, and writes only its own schema.
 *
 * **Details**
 *
 * The version is one more than before; the size limit stays. A `migrate` that
 * throws is a `CheckpointDecodeError`. A state written by a version this
 * program does not know is one too, so roll out the reader of a new version
 * before its writer wherever old and new processes may hand work over.
 *
 * @category combinators
 * @since 0.1.0
 */
export const upgrade: {
  <S, T extends Schema.Constraint>(
    schema: T,
    migrate: (previous: S) => T["Type"]
  ): <RD, RE>(
    self: Checkpoint<S, RD, RE>
  ) => Checkpoint<T["Type"], RD | T["DecodingServices"], T["EncodingServices"]>
  <S, RD, RE, T extends Schema.Constraint>(
    self: Checkpoint<S, RD, RE>,
    schema: T,
    migrate: (previous: S) => T["Type"]
  ): Checkpoint<T["Type"], RD | T["DecodingServices"], T["EncodingServices"]>
} = dual(3, <S, RD, RE, T extends Schema.Constraint>(
  self: Checkpoint<S, RD, RE>,
  schema: T,
  migrate: (previous: S) => T["Type"]
): Checkpoint<T["Type"], RD | T["DecodingServices"], T["EncodingServices"]> => {
  const codec = json(schema)
  return fromCodec<T["Type"], RD | T["DecodingServices"], T["EncodingServices"]>(
    {
      decode: (workId, stored) =>
        stored.version > self.version
          ? codec.decode(workId, stored)
          : Effect.flatMap(self.decode(workId, stored), (previous) =>
            Effect.try({
              try: () => migrate(previous),
              catch: () =>
                new CheckpointDecodeError({
                  workId,
                  version: stored.version,
                  issue: `The upgrade from version ${self.version} to ${self.version + 1} threw`
                })
            })),
      encode: codec.encode
    },
    { version: self.version + 1, maxBytes: self.maxBytes },
    true
  )
})

// -----------------------------------------------------------------------------
// internal
// -----------------------------------------------------------------------------

class StoredState implements Stored {
  readonly version: number
  readonly bytes: Uint8Array

  constructor(version: number, bytes: Uint8Array) {
    this.version = version
    this.bytes = bytes
  }
}

interface Codec<S, RD, RE> {
  readonly decode: (workId: string, stored: Stored) => Effect.Effect<S, CheckpointDecodeError, RD>
  readonly encode: (workId: string, state: S) => Effect.Effect<Uint8Array, CheckpointEncodeError, RE>
}

const utf8Encoder = new TextEncoder()
const utf8Decoder = new TextDecoder("utf-8", { fatal: true })

const json = <S extends Schema.Constraint>(
  schema: S
): Codec<S["Type"], S["DecodingServices"], S["EncodingServices"]> => {
  const codec = Schema.toCodecJson(schema)
  const decodeJson = Schema.decodeUnknownEffect(codec)
  const encodeJson = Schema.encodeUnknownEffect(codec)
  return {
    decode: (workId, stored) => {
      const fail = (issue: string) => new CheckpointDecodeError({ workId, version: stored.version, issue })
      return Effect.try({
        try: () => JSON.parse(utf8Decoder.decode(stored.bytes)) as unknown,
        // The parser's own message quotes its input.
        catch: () => fail("It is not JSON")
      }).pipe(
        Effect.flatMap((value) => Effect.mapError(decodeJson(value), (error) => fail(error.message)))
      )
    },
    encode: (workId, state) =>
      // Most states are encoded at once.
      Effect.flatMapEager(
        Effect.mapErrorEager(encodeJson(state), (error) => new CheckpointEncodeError({ workId, issue: error.message })),
        (value) => {
          try {
            return Effect.succeed(utf8Encoder.encode(JSON.stringify(value)))
          } catch {
            return Effect.fail(new CheckpointEncodeError({ workId, issue: "It has no JSON form" }))
          }
        }
      )
  }
}

const defaultMaxBytes = 1024 * 1024

const fromCodec = <S, RD, RE>(
  codec: Codec<S, RD, RE>,
  options: Options | undefined,
  readsEarlier = false
): Checkpoint<S, RD, RE> => {
  const version = positiveInteger("version", options?.version ?? 1)
  const maxBytes = positiveInteger("maxBytes", options?.maxBytes ?? defaultMaxBytes)
  return {
    [TypeId]: TypeId,
    version,
    maxBytes,
    decode: (workId, stored) =>
      stored.version === version || (readsEarlier && stored.version < version)
        ? codec.decode(workId, stored)
        : Effect.fail(
          new CheckpointDecodeError({
            workId,
            version: stored.version,
            issue: stored.version > version
              ? `It was written by newer code; this program knows versions up to ${version}. Deploy the newer code here too`
              : `This program knows version ${version} only. Add Checkpoint.upgrade from version ${stored.version}`
          })
        ),
    encode: (workId, state) =>
      Effect.flatMapEager(codec.encode(workId, state), (bytes) =>
        bytes.byteLength > maxBytes
          ? Effect.fail(new CheckpointTooLarge({ workId, bytes: bytes.byteLength, limit: maxBytes }))
          : Effect.succeed(new StoredState(version, bytes))),
    pipe() {
      return pipeArguments(this, arguments)
    }
  }
}

const positiveInteger = (field: string, value: number): number => {
  // The version is stored in 32 bits.
  if (Number.isInteger(value) && value >= 1 && value <= 0x7fffffff) return value
  throw new InvalidConfig({ field: `Checkpoint.${field}`, why: `it must be a positive integer, not ${value}` })
}
