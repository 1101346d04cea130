/**
 * Every error of worklease: one tag per thing that a caller does differently,
 * and a `reason` where the difference is only in detail.
 *
 * Messages say what happened, to which work ID, and what to do about it. They
 * never contain checkpoint contents or credentials.
 *
 * @since 0.1.0
 */

import * as Duration from "effect/Duration"
import * as Schema from "effect/Schema"

/**
 * Somebody else holds the lease.
 *
 * **Details**
 *
 * Raised by a fail-fast acquire. `holderId` is missing where the row was
 * changing at that moment or is pinned by a fenced transaction, so that nobody
 * could be named. `retryAfter` is the time until the holder's lease expires
 * unless it renews.
 *
 * @category errors
 * @since 0.1.0
 */
export class LeaseHeld extends Schema.TaggedError<LeaseHeld>("worklease/LeaseHeld")("LeaseHeld", {
  workId: Schema.String,
  holderId: Schema.optional(Schema.String),
  retryAfter: Schema.DurationFromMillis
}) {
  override get message(): string {
    const holder = this.holderId === undefined ? "another transaction" : JSON.stringify(this.holderId)
    return `${quote(this.workId)} is held by ${holder}; try again in ${
      Duration.format(this.retryAfter)
    }, or acquire it with { wait: true }`
  }
}

/**
 * The work ID is not acquired after too many terms without progress, until
 * `Lease.lift` sets their count to 0.
 *
 * **Details**
 *
 * Raised by an acquire with `quarantineAfter` only, and nothing was written.
 * `exit` and `holderId` are of the last term. `why` says all of it in words.
 *
 * @category errors
 * @since 0.1.0
 */
export class Quarantined extends Schema.TaggedError<Quarantined>("worklease/Quarantined")("Quarantined", {
  workId: Schema.String,
  termsWithoutProgress: Schema.Int,
  exit: Schema.Literals(["finished", "abandoned", "retired", "yielded", "expired"]),
  holderId: Schema.String,
  why: Schema.String
}) {
  override get message(): string {
    return `${quote(this.workId)} is quarantined: ${this.why}. ` +
      `Find out why its work makes no progress, then let it go again with Lease.lift`
  }
}

/**
 * The token is not of the current term: another term has begun, or there is no
 * such lease.
 *
 * @category errors
 * @since 0.1.0
 */
export class Fenced extends Schema.TaggedError<Fenced>("worklease/Fenced")("Fenced", {
  workId: Schema.String,
  fencingToken: Schema.BigInt
}) {
  override get message(): string {
    return `Fencing token ${this.fencingToken} of ${
      quote(this.workId)
    } is not current: a later term has begun, or what was stored is gone. ` +
      `Stop this work; a successor continues from the last checkpoint`
  }
}

/**
 * The term has ended: its lease expired, or it was released or forgotten.
 *
 * @category errors
 * @since 0.1.0
 */
export class LeaseExpired extends Schema.TaggedError<LeaseExpired>("worklease/LeaseExpired")("LeaseExpired", {
  workId: Schema.String,
  fencingToken: Schema.BigInt
}) {
  override get message(): string {
    return `The lease on ${
      quote(this.workId)
    } (fencing token ${this.fencingToken}) has expired or was released. Stop this work, or acquire the lease again`
  }
}

/**
 * The time for which the holder could rely on its lease ran out before the
 * backend confirmed an extension.
 *
 * **Details**
 *
 * An acquire fails with it when its answer came too late to rely on the lease,
 * which is then given back. `fencingToken` is missing where even the term had
 * ended by then, so that its token is not known.
 *
 * @category errors
 * @since 0.1.0
 */
export class WindowExhausted extends Schema.TaggedError<WindowExhausted>("worklease/WindowExhausted")(
  "WindowExhausted",
  {
    workId: Schema.String,
    fencingToken: Schema.optional(Schema.BigInt),
    /** Why the last attempt to extend it failed, if it failed and did not just not answer. */
    cause: Schema.optional(Schema.Defect())
  }
) {
  override get message(): string {
    return `No extension of the lease on ${
      quote(this.workId)
    } was confirmed in time, so it can no longer be relied on. ` + (this.cause instanceof Error
      ? `The last attempt: ${this.cause.message}`
      : `Check the backend's latency and for blocked event loops, or raise the ttl`)
  }
}

/**
 * Why a term was lost.
 *
 * @category models
 * @since 0.1.0
 */
export type LeaseLostReason = Fenced | LeaseExpired | WindowExhausted

/**
 * Schema of {@link LeaseLostReason}.
 *
 * @category models
 * @since 0.1.0
 */
export const LeaseLostReason: Schema.Union<[typeof Fenced, typeof LeaseExpired, typeof WindowExhausted]> = Schema.Union(
  [Fenced, LeaseExpired, WindowExhausted]
)

/**
 * The term ended against its holder's will: the one loss error of every
 * supervised API. `Effect.catchReason` and `Effect.unwrapReason` reach the
 * reason.
 *
 * @category errors
 * @since 0.1.0
 */
export class LeaseLost extends Schema.TaggedError<LeaseLost>("worklease/LeaseLost")("LeaseLost", {
  workId: Schema.String,
  reason: LeaseLostReason
}) {
  override get message(): string {
    return this.reason.message
  }
}

/**
 * The work left at a safe point because a handoff was requested, or was
 * interrupted because it overran the handoff's deadline.
 *
 * @category errors
 * @since 0.1.0
 */
export class Yielded extends Schema.TaggedError<Yielded>("worklease/Yielded")("Yielded", {
  workId: Schema.String
}) {
  override get message(): string {
    return `The work on ${quote(this.workId)} has left for a handoff. Its successor continues from the last checkpoint`
  }
}

/**
 * The work ID breaks the rules: 1 to 512 UTF-8 bytes, no NUL, no lone
 * surrogate. Nothing was sent.
 *
 * @category errors
 * @since 0.1.0
 */
export class InvalidWorkId extends Schema.TaggedError<InvalidWorkId>("worklease/InvalidWorkId")("InvalidWorkId", {
  workId: Schema.String,
  why: Schema.Literals(["Empty", "TooLong", "ContainsNul", "LoneSurrogate"])
}) {
  override get message(): string {
    // A work ID that is too long is not worth repeating whole.
    return `Work ID ${quote(this.workId.length > 64 ? `${this.workId.slice(0, 64)}…` : this.workId)} is invalid: ` +
      idRules[this.why]
  }
}

const idRules = {
  Empty: "it is empty; it needs 1 to 512 UTF-8 bytes",
  TooLong: "it is longer than 512 UTF-8 bytes",
  ContainsNul: "it contains a NUL character",
  LoneSurrogate: "it contains a lone surrogate, which has no UTF-8 form"
} as const

/**
 * An option was refused. `field` names it.
 *
 * @category errors
 * @since 0.1.0
 */
export class InvalidConfig extends Schema.TaggedError<InvalidConfig>("worklease/InvalidConfig")("InvalidConfig", {
  field: Schema.String,
  why: Schema.String
}) {
  override get message(): string {
    return `Invalid ${this.field}: ${this.why}`
  }
}

/**
 * A stored checkpoint could not be decoded, or is of a newer version than this
 * program knows. Its bytes stay as they are.
 *
 * @category errors
 * @since 0.1.0
 */
export class CheckpointDecodeError
  extends Schema.TaggedError<CheckpointDecodeError>("worklease/CheckpointDecodeError")("CheckpointDecodeError", {
    workId: Schema.String,
    version: Schema.Int,
    issue: Schema.String
  })
{
  override get message(): string {
    return `The checkpoint of ${quote(this.workId)} (version ${this.version}) cannot be decoded: ${this.issue}`
  }
}

/**
 * A state could not be encoded by the checkpoint's schema. Nothing was sent.
 *
 * @category errors
 * @since 0.1.0
 */
export class CheckpointEncodeError
  extends Schema.TaggedError<CheckpointEncodeError>("worklease/CheckpointEncodeError")("CheckpointEncodeError", {
    workId: Schema.String,
    issue: Schema.String
  })
{
  override get message(): string {
    return `The state of ${quote(this.workId)} cannot be encoded: ${this.issue}`
  }
}

/**
 * An encoded state is larger than its checkpoint allows. Nothing was sent.
 *
 * @category errors
 * @since 0.1.0
 */
export class CheckpointTooLarge
  extends Schema.TaggedError<CheckpointTooLarge>("worklease/CheckpointTooLarge")("CheckpointTooLarge", {
    workId: Schema.String,
    bytes: Schema.Int,
    limit: Schema.Int
  })
{
  override get message(): string {
    return `The state of ${
      quote(this.workId)
    } takes ${this.bytes} bytes, more than its limit of ${this.limit}. Store less (a cursor rather than the data), or raise maxBytes`
  }
}

const fields = { cause: Schema.optional(Schema.Defect()) }

/**
 * The backend could not be reached, or the connection to it broke.
 *
 * @category errors
 * @since 0.1.0
 */
export class Unreachable
  extends Schema.TaggedError<Unreachable>("worklease/Backend/Unreachable")("Unreachable", fields)
{
  override get message(): string {
    return "the backend cannot be reached. Check that it runs, accepts connections, and has the database"
  }
}

/**
 * The backend did not answer within the operation's timeout, or what is stored
 * for the work ID stayed locked for as long.
 *
 * @category errors
 * @since 0.1.0
 */
export class TimedOut extends Schema.TaggedError<TimedOut>("worklease/Backend/TimedOut")("TimedOut", fields) {
  override get message(): string {
    return "the backend did not answer in time. Check its load and locks, or raise operationTimeout"
  }
}

/**
 * The backend's tables are missing or of another version; `found` is `null`
 * where the backend cannot tell which.
 *
 * @category errors
 * @since 0.1.0
 */
export class SchemaOutdated extends Schema.TaggedError<SchemaOutdated>("worklease/Backend/SchemaOutdated")(
  "SchemaOutdated",
  { ...fields, found: Schema.NullOr(Schema.Int), required: Schema.Int }
) {
  override get message(): string {
    return `its tables are ${
      this.found === null ? "missing or outdated" : `of version ${this.found}`
    }; version ${this.required} is required. Run the migrations (layerMigrations)`
  }
}

/**
 * The backend refused the credentials, or lacks a permission.
 *
 * @category errors
 * @since 0.1.0
 */
export class PermissionDenied extends Schema.TaggedError<PermissionDenied>("worklease/Backend/PermissionDenied")(
  "PermissionDenied",
  fields
) {
  override get message(): string {
    return "permission was denied. Check the credentials, and that they may SELECT, INSERT, UPDATE and DELETE; " +
      "to migrate, that they may CREATE, or let layerMigrations run with others and use layerStorage here"
  }
}

/**
 * The work ID's fencing tokens have reached the largest signed 64-bit integer.
 *
 * @category errors
 * @since 0.1.0
 */
export class TokenExhausted
  extends Schema.TaggedError<TokenExhausted>("worklease/Backend/TokenExhausted")("TokenExhausted", fields)
{
  override get message(): string {
    return "its fencing tokens are exhausted. Use another work ID"
  }
}

/**
 * Anything else; the cause tells.
 *
 * @category errors
 * @since 0.1.0
 */
export class Other extends Schema.TaggedError<Other>("worklease/Backend/Other")("Other", {
  ...fields,
  why: Schema.optional(Schema.String)
}) {
  override get message(): string {
    return this.why ?? "the backend failed. The cause tells more"
  }
}

/**
 * Why a backend operation failed.
 *
 * @category models
 * @since 0.1.0
 */
export type BackendErrorReason =
  | Unreachable
  | TimedOut
  | SchemaOutdated
  | PermissionDenied
  | TokenExhausted
  | Other

/**
 * Schema of {@link BackendErrorReason}.
 *
 * @category models
 * @since 0.1.0
 */
export const BackendErrorReason: Schema.Union<[
  typeof Unreachable,
  typeof TimedOut,
  typeof SchemaOutdated,
  typeof PermissionDenied,
  typeof TokenExhausted,
  typeof Other
]> = Schema.Union([Unreachable, TimedOut, SchemaOutdated, PermissionDenied, TokenExhausted, Other])

/**
 * An operation on the backend failed.
 *
 * **Details**
 *
 * `operation` names it as `Lease` does, or is `transaction` or `migrate`.
 * `outcome` is `"rejected"` where it was surely not applied, and `"unknown"`
 * where it may have been: the library has then already sent it again, for two
 * operation timeouts, and got no answer. Every operation may be repeated.
 *
 * @category errors
 * @since 0.1.0
 */
export class BackendError extends Schema.TaggedError<BackendError>("worklease/BackendError")("BackendError", {
  operation: Schema.String,
  workId: Schema.optional(Schema.String),
  outcome: Schema.Literals(["rejected", "unknown"]),
  reason: BackendErrorReason
}) {
  /** What the store's client said, so that it is printed with the error. */
  override get cause(): unknown {
    return this.reason.cause
  }

  override get message(): string {
    return `${this.operation}${this.workId === undefined ? "" : ` of ${quote(this.workId)}`} ${
      this.outcome === "rejected" ? "failed" : "may or may not have been applied"
    }: ${this.reason.message}`
  }
}

const quote = (workId: string): string => JSON.stringify(workId)
