/**
 * The storage port: what a store must do to keep leases.
 *
 * A backend is batch-first: each operation takes several items, at most one
 * per work ID, and answers them one by one, in order. Each call is one
 * attempt. A backend never retries, never waits for another holder and never
 * looks at a local clock; sending again, waiting and timing out are the
 * library's part. `worklease/testing/BackendContract` is the suite of tests
 * that every backend has to pass.
 *
 * @since 0.1.0
 */

import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import type * as Effect from "effect/Effect"
import type * as Option from "effect/Option"
import type * as Scope from "effect/Scope"
import type { BackendError } from "./LeaseError.ts"

/**
 * How a term can be declared to have ended.
 *
 * **Details**
 *
 * - `finished`: the work ran to its end. It may run again; its state is kept.
 * - `retired`: the work is done for good. Its row may be swept.
 * - `abandoned`: the work failed part-way. Its state is partial.
 * - `yielded`: the work left on purpose at a safe point. Its state is
 *   consistent.
 *
 * @category models
 * @since 0.1.0
 */
export type ExitMode = "finished" | "abandoned" | "retired" | "yielded"

/**
 * An encoded checkpoint, as it is stored.
 *
 * @category models
 * @since 0.1.0
 */
export interface Stored {
  /** The version of the checkpoint that wrote it: a positive integer of 32 bits. */
  readonly version: number
  /** Whoever is given them owns them: nobody else writes to them any more. */
  readonly bytes: Uint8Array
}

/**
 * Names one term. All three must match for an operation to take effect.
 *
 * @category models
 * @since 0.1.0
 */
export interface Term {
  readonly workId: string
  readonly holderId: string
  readonly fencingToken: bigint
}

/**
 * What the last term whose work started has left, as a new holder is told.
 *
 * @category models
 * @since 0.1.0
 */
export interface StoredPrior {
  readonly state: Option.Option<Stored>
  /** None if no work has ever started, or everything was forgotten since. */
  readonly term: Option.Option<{
    readonly exit: ExitMode | "expired"
    readonly holderId: string
    readonly fencingToken: bigint
  }>
  /**
   * +1 when the term before ended as `expired` or `abandoned` without a
   * checkpoint; unchanged when it yielded, was interrupted or was given back;
   * 0 after a checkpoint, `finished`, `retired` or a lift.
   */
  readonly termsWithoutProgress: number
}

/**
 * One acquire.
 *
 * @category models
 * @since 0.1.0
 */
export interface AcquireRequest {
  readonly workId: string
  readonly holderId: string
  /** A random ID: the same attempt sent again gets the same answer, and takes a lease at most once. */
  readonly attempt: string
  readonly ttl: Duration.Duration
  /**
   * The terms without progress, 1 or more, that keep the lease from being
   * taken. A free one of which the holder would be told as many, or more, is
   * refused as `Quarantined`.
   */
  readonly quarantineAfter: Option.Option<number>
}

/**
 * The lease is taken, by this or an earlier sending of the same attempt.
 *
 * @category models
 * @since 0.1.0
 */
export interface Acquired {
  readonly _tag: "Acquired"
  readonly fencingToken: bigint
  /** In milliseconds since the epoch, by the backend's clock. */
  readonly expiresAt: number
  readonly prior: StoredPrior
}

/**
 * The answer to an acquire. All but `Acquired` have written nothing.
 *
 * @category models
 * @since 0.1.0
 */
export type AcquireReply =
  | Acquired
  | { readonly _tag: "Held"; readonly holderId: string; readonly remaining: Duration.Duration }
  /** The row is changing at this moment, or pinned by a fenced transaction. Ask again. */
  | { readonly _tag: "Contended" }
  /** This attempt has had its term, and the term has ended. */
  | { readonly _tag: "AttemptEnded" }
  /** There have been `quarantineAfter` terms without progress, or more. */
  | {
    readonly _tag: "Quarantined"
    readonly termsWithoutProgress: number
    /** How the last of all terms ended, and who held it. */
    readonly exit: ExitMode | "expired"
    readonly holderId: string
  }

/**
 * A request to the current holder to leave at its next safe point.
 *
 * @category models
 * @since 0.1.0
 */
export interface YieldRequest {
  /** How long the holder still has before its work is interrupted. */
  readonly remaining: Option.Option<Duration.Duration>
}

/**
 * The answer to an operation of a term.
 *
 * @category models
 * @since 0.1.0
 */
export type TermReply =
  | { readonly _tag: "Done" }
  /** Another term is current, or the work ID is not known. */
  | { readonly _tag: "Fenced" }
  /** The term is over: expired, released or forgotten. */
  | { readonly _tag: "Expired" }
  /** Nothing was done: another transaction has the row. Ask again. */
  | { readonly _tag: "Busy" }

/**
 * The answer to a renewal or a checkpoint.
 *
 * @category models
 * @since 0.1.0
 */
export type ExtendReply =
  | {
    readonly _tag: "Done"
    /** In milliseconds since the epoch, by the backend's clock. */
    readonly expiresAt: number
    readonly yieldRequest: Option.Option<YieldRequest>
  }
  | Exclude<TermReply, { readonly _tag: "Done" }>

/**
 * One renewal.
 *
 * @category models
 * @since 0.1.0
 */
export interface RenewRequest extends Term {
  readonly ttl: Duration.Duration
}

/**
 * One checkpoint.
 *
 * @category models
 * @since 0.1.0
 */
export interface CheckpointRequest extends Term {
  readonly ttl: Duration.Duration
  /**
   * Counts the checkpoints of the term, from 1. One with a lower sequence than
   * the stored one changes nothing; an equal one is the same checkpoint, sent
   * again: it only extends the lease.
   */
  readonly sequence: bigint
  readonly state: Stored
}

/**
 * One release.
 *
 * @category models
 * @since 0.1.0
 */
export interface ReleaseRequest extends Term {
  /**
   * How the term ends. `given-back` undoes a term whose work never started:
   * exit, holder and count return to what they were, and the token stays spent.
   */
  readonly exit: ExitMode | "given-back"
  /** The work was interrupted from outside: `abandoned` then counts as no attempt. */
  readonly interrupted: boolean
  /** The final checkpoint, stored in the same step. */
  readonly state: Option.Option<{ readonly sequence: bigint; readonly state: Stored }>
}

/**
 * What is stored for one work ID.
 *
 * @category models
 * @since 0.1.0
 */
export interface LeaseRecord {
  readonly workId: string
  /** The current or last term. None for one that was given back or forgotten. */
  readonly term: Option.Option<{
    readonly holderId: string
    readonly fencingToken: bigint
    /** `held` while the lease is unexpired and not released. */
    readonly status: "held" | ExitMode | "expired"
    /** When the lease expires, or when the term ended. In milliseconds since the epoch, by the backend's clock. */
    readonly expiresAt: number
    /** How long the lease still lasts if it is not extended. Zero unless it is held. */
    readonly remaining: Duration.Duration
    /** How long ago the term ended, or its lease expired. Zero while it is held. */
    readonly sinceEnd: Duration.Duration
  }>
  readonly state: Option.Option<Stored>
  /** What the current holder was told, or 0 after a lift; where nobody holds it, what the next one would be told. */
  readonly termsWithoutProgress: number
}

/**
 * One attempt of one operation: one reply per request, in order; a bad item
 * never fails its neighbours. The requests name different work IDs.
 *
 * @category models
 * @since 0.1.0
 */
export interface Batch<in Request, out Reply> {
  (requests: NonEmptyReadonlyArray<Request>): Effect.Effect<NonEmptyReadonlyArray<Reply | BackendError>, BackendError>
}

/**
 * For stores that the user's own transactions reach: where a checkpoint joins
 * one, and when its window may move.
 *
 * @category models
 * @since 0.1.0
 */
export interface Transaction {
  /** Whether the calling fiber runs inside an open transaction of this store. */
  readonly isOpen: Effect.Effect<boolean>
  /** Runs an effect once the outermost open transaction has committed. */
  readonly afterCommit: (effect: Effect.Effect<void>) => Effect.Effect<void>
  /** Runs an effect, and what it forks, as if no transaction of this store were open. */
  readonly outside: <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>
  /**
   * Whether an open transaction keeps every other operation waiting, as on a
   * client with a single connection. The library then refuses, inside one, the
   * operations that never join.
   */
  readonly exclusive: boolean
}

/**
 * The storage port.
 *
 * @category services
 * @since 0.1.0
 */
export class Backend extends Context.Service<Backend, {
  /** Takes leases that are free. A refused acquire writes nothing and waits on no lock. */
  readonly acquire: Batch<AcquireRequest, AcquireReply>

  /** Extends leases by `ttl` from now, if their terms are current and unexpired. */
  readonly renew: Batch<RenewRequest, ExtendReply>

  /**
   * Stores states and extends their leases, in one step. A lease that has
   * expired but has no successor lives again.
   *
   * Called inside an open transaction of the store, it joins that transaction,
   * waits for the row, and a refusal dooms the transaction.
   */
  readonly checkpoint: Batch<CheckpointRequest, ExtendReply>

  /** Ends terms. The first exit of a term stands. */
  readonly release: Batch<ReleaseRequest, TermReply>

  /** Reads the last checkpoint of a current term. */
  readonly read: (term: Term) => Effect.Effect<
    { readonly _tag: "Done"; readonly state: Option.Option<Stored> } | { readonly _tag: "Fenced" },
    BackendError
  >

  /** Ends a term and clears its state, exit and prior. A tombstone with its token stays. */
  readonly forget: (term: Term) => Effect.Effect<TermReply, BackendError>

  /**
   * Asks the current holder to leave at its next safe point. Answers whether
   * there was one. A later request of the same term replaces the earlier one.
   */
  readonly requestYield: (request: {
    readonly workId: string
    readonly deadline: Option.Option<Duration.Duration>
  }) => Effect.Effect<boolean, BackendError>

  /**
   * Sets the terms without progress to 0, and changes nothing else: a term that
   * is held goes on, and counts when it ends. One that has expired does not
   * count any more. Answers whether the work ID is known.
   */
  readonly lift: (workId: string) => Effect.Effect<boolean, BackendError>

  /**
   * Deletes up to `limit` retired and forgotten work IDs that ended longer ago
   * than the larger of `retention` and one hour, and remembers their highest
   * token in the same step. Answers how many it deleted.
   */
  readonly sweep: (options: {
    readonly retention: Duration.Duration
    readonly limit: number
  }) => Effect.Effect<number, BackendError>

  /**
   * What is stored for these work IDs, in any order; those of which nothing is
   * stored are left out. Without `states`, each state is none.
   */
  readonly inspect: (options: {
    readonly workIds: ReadonlyArray<string>
    readonly states: boolean
  }) => Effect.Effect<ReadonlyArray<LeaseRecord>, BackendError>

  /** Up to `limit` records whose work IDs start with `prefix` and come after `after`, in byte order. */
  readonly list: (options: {
    readonly prefix: string
    readonly after: Option.Option<string>
    readonly limit: number
  }) => Effect.Effect<ReadonlyArray<LeaseRecord>, BackendError>

  /**
   * Subscribes to hints that a work ID may have become free; the inner effect
   * waits for the next one. Correctness never depends on them.
   *
   * The first one comes once the subscription stands, since the work ID may
   * have become free before; further ones come whenever it becomes free, and
   * whenever that may have been missed. Subscribing does not wait for the
   * store, and nothing fails: as long as the store cannot be reached, there
   * are no hints.
   */
  readonly wakeups: Option.Option<
    (workId: string) => Effect.Effect<Effect.Effect<void>, never, Scope.Scope>
  >

  /**
   * Subscribes to hints that the holder of a work ID, any of them, was asked to
   * yield; the inner effect waits for the next one. Correctness never depends on
   * them: the request itself comes with a renewal or a checkpoint, and so does
   * one that was made while the subscription did not stand.
   *
   * Subscribing does not wait for the store, and nothing fails.
   */
  readonly yieldRequests: Option.Option<Effect.Effect<Effect.Effect<string>, never, Scope.Scope>>

  readonly transaction: Option.Option<Transaction>
}>()("worklease/Backend") {}
