/**
 * The renewal policy: for how long a lease is taken, how often it is renewed,
 * and how much time the holder leaves unused for safety.
 *
 * A policy is a validated value, so that a wrong one is refused where it is
 * made, and not in every run.
 *
 * **Example** (A policy for slow work)
 *
 * ```ts
 * import { Renewal } from "worklease"
 *
 * const policy = Renewal.makeUnsafe({ ttl: "5 minutes" })
 * policy.renewEvery // a third of it
 * ```
 *
 * @since 0.1.0
 */

import * as Config from "effect/Config"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Result from "effect/Result"
import * as Schema from "effect/Schema"
import * as SchemaIssue from "effect/SchemaIssue"
import { InvalidConfig } from "./LeaseError.ts"

/**
 * The runtime type identifier of policies.
 *
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~worklease/Renewal/Policy"

/**
 * The type-level identifier of policies.
 *
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~worklease/Renewal/Policy"

/**
 * Options of a policy.
 *
 * **Details**
 *
 * All are positive and finite, and `renewEvery + operationTimeout +
 * safetyMargin` is less than `ttl`: one renewal must fit in before the window
 * closes.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /**
   * How long a lease lasts without renewal, by the backend's clock. At least
   * 10 ms; a number is milliseconds. Defaults to 30 seconds.
   */
  readonly ttl?: Duration.Input | undefined
  /**
   * How long after its last extension a lease is renewed, at the latest: up to
   * an eighth earlier, where it goes in one statement with others. Defaults to
   * a third of `ttl`.
   */
  readonly renewEvery?: Duration.Input | undefined
  /**
   * How long before its expiry a holder stops relying on a lease: what the
   * backend's clock may gain on the holder's within one `ttl`. Defaults to a
   * tenth of `ttl`.
   */
  readonly safetyMargin?: Duration.Input | undefined
  /** How long one attempt of one operation may take. Defaults to a sixth of `ttl`. */
  readonly operationTimeout?: Duration.Input | undefined
}

/**
 * A validated policy.
 *
 * @category models
 * @since 0.1.0
 */
export interface Policy {
  readonly [TypeId]: TypeId
  readonly ttl: Duration.Duration
  readonly renewEvery: Duration.Duration
  readonly safetyMargin: Duration.Duration
  readonly operationTimeout: Duration.Duration
}

/**
 * Makes a policy, or fails with `InvalidConfig`, naming the field.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make = (options?: Options): Effect.Effect<Policy, InvalidConfig> =>
  Effect.suspend(() => Effect.fromResult(validate(options)))

/**
 * Makes a policy, or throws `InvalidConfig`, naming the field.
 *
 * @category constructors
 * @since 0.1.0
 */
export const makeUnsafe = (options?: Options): Policy => Result.getOrThrowWith(validate(options), (error) => error)

/**
 * Reads a policy from configuration: by default from `TTL`, `RENEW_EVERY`,
 * `SAFETY_MARGIN` and `OPERATION_TIMEOUT`, all optional. Nest it as you like.
 *
 * **Details**
 *
 * A policy that is not valid is a `ConfigError` which names the field.
 *
 * @category constructors
 * @since 0.1.0
 */
export const config = (options?: Config.Wrap<Options>): Config.Config<Policy> =>
  Config.flatMap(
    options === undefined ? environment : Config.unwrap(options),
    (options) =>
      Result.match(validate(options), {
        onSuccess: Config.succeed<Policy>,
        onFailure: (error) =>
          Config.fail(new Schema.SchemaError(new SchemaIssue.InvalidValue({ message: error.message })))
      })
  )

// -----------------------------------------------------------------------------
// internal
// -----------------------------------------------------------------------------

const environment: Config.Config<Options> = Config.map(
  Config.all({
    ttl: Config.option(Config.Duration("TTL")),
    renewEvery: Config.option(Config.Duration("RENEW_EVERY")),
    safetyMargin: Config.option(Config.Duration("SAFETY_MARGIN")),
    operationTimeout: Config.option(Config.Duration("OPERATION_TIMEOUT"))
  }),
  (options) => ({
    ttl: Option.getOrUndefined(options.ttl),
    renewEvery: Option.getOrUndefined(options.renewEvery),
    safetyMargin: Option.getOrUndefined(options.safetyMargin),
    operationTimeout: Option.getOrUndefined(options.operationTimeout)
  })
)

const minimumTtl = 10

const validate = (options: Options | undefined): Result.Result<Policy, InvalidConfig> => {
  const millis = {
    ttl: toMillis(options?.ttl ?? Duration.seconds(30)),
    renewEvery: 0,
    safetyMargin: 0,
    operationTimeout: 0
  }
  millis.renewEvery = options?.renewEvery === undefined ? millis.ttl / 3 : toMillis(options.renewEvery)
  millis.safetyMargin = options?.safetyMargin === undefined ? millis.ttl / 10 : toMillis(options.safetyMargin)
  millis.operationTimeout = options?.operationTimeout === undefined
    ? millis.ttl / 6
    : toMillis(options.operationTimeout)

  for (const field of ["ttl", "renewEvery", "safetyMargin", "operationTimeout"] as const) {
    if (!Number.isFinite(millis[field]) || millis[field] <= 0) {
      return Result.fail(
        // What is derived from the ttl is the ttl's fault.
        new InvalidConfig({
          field: options?.[field] === undefined ? "ttl" : field,
          why: `it must be a positive and finite duration, not ${
            options?.[field] === undefined ? `${millis[field]} ms` : formatInput(options[field])
          }`
        })
      )
    }
  }
  if (millis.ttl < minimumTtl) {
    return Result.fail(new InvalidConfig({ field: "ttl", why: `it must be at least ${minimumTtl} ms` }))
  }
  if (millis.renewEvery + millis.operationTimeout + millis.safetyMargin >= millis.ttl) {
    const field = (["renewEvery", "operationTimeout", "safetyMargin"] as const)
      .filter((field) => options?.[field] !== undefined)
      .sort((a, b) => millis[b] - millis[a])[0] ?? "ttl"
    return Result.fail(
      new InvalidConfig({
        field,
        why:
          `renewEvery (${Math.round(millis.renewEvery)} ms) + operationTimeout (${
            Math.round(millis.operationTimeout)
          } ms) + safetyMargin (` +
          `${Math.round(millis.safetyMargin)} ms) must be less than ttl (${
            Math.round(millis.ttl)
          } ms), or no renewal fits in before the lease is lost`
      })
    )
  }
  return Result.succeed({
    [TypeId]: TypeId,
    ttl: Duration.millis(millis.ttl),
    renewEvery: Duration.millis(millis.renewEvery),
    safetyMargin: Duration.millis(millis.safetyMargin),
    operationTimeout: Duration.millis(millis.operationTimeout)
  })
}

const formatInput = (input: Duration.Input): string =>
  typeof input === "number" ? `${input} ms` : typeof input === "string" ? JSON.stringify(input) : String(input)

const toMillis = (input: Duration.Input): number =>
  Option.match(Duration.fromInput(input), { onNone: () => NaN, onSome: Duration.toMillis })
