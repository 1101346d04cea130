/**
 * Leases: hold one in a scope, run an effect under one, or operate on its
 * token.
 *
 * A lease is a time-limited claim on a work ID. It is renewed behind the
 * scenes while it is held. When it is lost, the work under it is interrupted,
 * and the caller gets `LeaseLost`.
 *
 * `Worker.run` is the usual way to do work under a lease. `hold` and
 * `withLease` take a lease for a scope or an effect. Below them are the single
 * operations on a token: `acquire`, `checkpoint`, `readCheckpoint`, `renew`,
 * `release` and `forget`.
 *
 * **Example** (Running an effect under a lease)
 *
 * ```ts
 * import { Effect, Layer } from "effect"
 * import { Lease } from "worklease"
 * import * as Memory from "worklease/layers/Memory"
 *
 * const program = Effect.log("nobody else does this now").pipe(
 *   Lease.withLease("nightly-report")
 * )
 *
 * Effect.runPromise(program.pipe(Effect.provide(Lease.layer.pipe(Layer.provide(Memory.layer)))))
 * ```
 *
 * @since 0.1.0
 */

import * as Config from "effect/Config"
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import { dual } from "effect/Function"
import * as Layer from "effect/Layer"
import type * as Option from "effect/Option"
import * as Scope from "effect/Scope"
import type * as Backend from "./Backend.ts"
import * as internal from "./internal/leases.ts"
import type {
  BackendError,
  CheckpointDecodeError,
  CheckpointEncodeError,
  CheckpointTooLarge,
  Fenced,
  InvalidConfig,
  InvalidWorkId,
  LeaseExpired,
  LeaseHeld,
  LeaseLost,
  Quarantined,
  WindowExhausted,
  Yielded
} from "./LeaseError.ts"
import type * as Renewal from "./Renewal.ts"
import type * as Work from "./Work.ts"

/**
 * The runtime type identifier of held leases.
 *
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = internal.TypeId

/**
 * The type-level identifier of held leases.
 *
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~worklease/Lease"

declare const TokenTypeId: unique symbol

/**
 * Proof of a term. Opaque: only an acquire makes one.
 *
 * @category models
 * @since 0.1.0
 */
export interface Token<in out S = never> {
  readonly [TokenTypeId]: (_: S) => S
  readonly workId: string
  readonly holderId: string
  /** Strictly larger for each later term of the same work ID. Up to 2⁶³ − 1: store it as a bigint. */
  readonly fencingToken: bigint
  /** The expiry at acquisition, in milliseconds since the epoch, by the backend's clock. */
  readonly expiresAt: number
}

/**
 * Any token, whatever the checkpoints of its work hold.
 *
 * @category models
 * @since 0.1.0
 */
export interface AnyToken {
  readonly [TokenTypeId]: (_: never) => any
  readonly workId: string
  readonly holderId: string
  readonly fencingToken: bigint
  readonly expiresAt: number
}

/**
 * How a term can be declared to have ended.
 *
 * @category models
 * @since 0.1.0
 */
export type ExitMode = Backend.ExitMode

/**
 * What a new holder is told about the last term whose work started.
 *
 * @category models
 * @since 0.1.0
 */
export interface Prior<out S> {
  /** The last checkpoint. */
  readonly state: Option.Option<S>
  /** How that term ended; `none` if there was none. */
  readonly exit: ExitMode | "expired" | "none"
  readonly holderId: Option.Option<string>
  readonly fencingToken: Option.Option<bigint>
  /** How many terms in a row have ended without a new checkpoint, as `expired` or `abandoned` and not interrupted. */
  readonly termsWithoutProgress: number
}

/**
 * What every held lease offers, whatever its checkpoints hold.
 *
 * @category models
 * @since 0.1.0
 */
export interface Any {
  readonly [TypeId]: TypeId
  readonly workId: string
  readonly token: AnyToken
  /** The time for which the holder may still rely on the lease. Zero once it is lost. */
  readonly window: Effect.Effect<Duration.Duration>
  /** Fails once the lease is lost; never succeeds. */
  readonly lost: Effect.Effect<never, LeaseLost>
  /**
   * Runs an effect that is interrupted when the lease is lost, and fails with
   * `LeaseLost` then. When the work leaves by a handoff, the effect is
   * interrupted too, and so is whoever runs it.
   */
  readonly guard: <A, EX, R>(self: Effect.Effect<A, EX, R>) => Effect.Effect<A, EX | LeaseLost, R>
  /** Whether somebody has asked for a handoff. */
  readonly yieldRequested: Effect.Effect<boolean>
  /** Waits until somebody asks for a handoff. */
  readonly awaitYieldRequest: Effect.Effect<void>
}

/**
 * A lease that is held now, and renewed behind the scenes.
 *
 * **Details**
 *
 * Once the lease is lost, its operations do not return: a loss is never an
 * error value inside the work, so nothing can catch it and carry on. The work
 * is interrupted by its `guard`, `withLease` or `Worker.run`.
 *
 * @category models
 * @since 0.1.0
 */
export interface Lease<in out S = never> extends Any {
  readonly token: Token<S>
  /** What the last term left. It does not change during this term. */
  readonly prior: Prior<S>
  /**
   * Saves progress and extends the lease, in one atomic step.
   *
   * It is also a safe point: if a handoff was requested, the work ends here as
   * `yielded`, unless it asked to yield at `handOff` only. While the backend is
   * out of reach it is sent again until the window closes. Inside an open
   * transaction of the backend's own store it joins that transaction, is sent
   * once, and counts when the transaction has committed.
   *
   * Fails with `CheckpointEncodeError` or `CheckpointTooLarge` before anything
   * is sent, and with `BackendError` when the backend refuses it.
   */
  readonly checkpoint: (state: S) => Effect.Effect<void, CheckpointEncodeError | CheckpointTooLarge | BackendError>
  /**
   * How a success leaves, and the state its release carries. Sends nothing; the
   * last call stands. Inside an open transaction it counts when that has
   * committed.
   */
  readonly leaveAs: (
    exit: "finished" | "retired",
    state?: S
  ) => Effect.Effect<void, CheckpointEncodeError | CheckpointTooLarge>
  /**
   * Ends the work here, as `yielded`. Its release carries the state. Dies inside
   * a transaction, which it would roll back: checkpoint inside it, and hand off
   * after it.
   */
  readonly handOff: (state?: S) => Effect.Effect<never, CheckpointEncodeError | CheckpointTooLarge>
}

/**
 * Who holds a lease, as it was read last.
 *
 * @category models
 * @since 0.1.0
 */
export interface Holder {
  readonly holderId: string
  readonly fencingToken: bigint
  /**
   * When its term began, in milliseconds since the epoch, by the backend's
   * clock. Read off the fencing token: late by as much as that clock has been
   * set back before.
   */
  readonly since: number
  /**
   * The time for which the lease still lasts unless it is renewed, counted from
   * before it was read. Zero once it has expired.
   */
  readonly remaining: Effect.Effect<Duration.Duration>
}

/**
 * The lease the running effect is under: provided by `withLease` and
 * `Worker.run`.
 *
 * @category services
 * @since 0.1.0
 */
export class CurrentLease extends Context.Service<CurrentLease, Any>()("worklease/Lease/CurrentLease") {}

/**
 * Options of an acquire.
 *
 * @category options
 * @since 0.1.0
 */
export interface AcquireOptions<Wait extends boolean = boolean> {
  /** Whether to wait while somebody else holds the lease. Defaults to `false`: fail with `LeaseHeld`. */
  readonly wait?: Wait | undefined
  /** The renewal policy of this lease, made by `Renewal.make`. Defaults to the one of the layer. */
  readonly policy?: Renewal.Policy | undefined
  /**
   * After how many terms in a row without a new checkpoint the lease is not
   * taken any more: it then fails with `Quarantined`, until {@link lift}. Terms
   * count that ended as `expired`, or as `abandoned` and were not interrupted; a
   * handoff or a shutdown does not. A checkpoint, or a success, begins a new row.
   * Anything but a positive integer is a defect, `InvalidConfig`. Defaults to
   * never.
   */
  readonly quarantineAfter?: number | undefined
}

/**
 * Options of a held lease.
 *
 * @category options
 * @since 0.1.0
 */
export interface HoldOptions<Wait extends boolean = boolean> extends AcquireOptions<Wait> {
  /** Where a requested handoff ends the work: at its next checkpoint or handOff (the default), or at `handOff` only. */
  readonly yieldAt?: "checkpoint" | "handOff" | undefined
}

/**
 * The leases of one process.
 *
 * **Details**
 *
 * The operations on a token are sent again after an unknown outcome, for up to
 * two operation timeouts. Only checkpoints join an open transaction of the
 * backend's own store. The others are sent outside of it, or, where the client
 * has a single connection, refused in it with a `BackendError`.
 *
 * @category services
 * @since 0.1.0
 */
export class Leases extends Context.Service<Leases, {
  /** Names this process. */
  readonly holderId: string

  /** The renewal policy of leases that are taken without one of their own. */
  readonly policy: Renewal.Policy

  /** See {@link acquire}. */
  readonly acquire: <const W extends Work.Input, const Wait extends boolean = false>(
    work: W,
    options?: AcquireOptions<Wait>
  ) => Effect.Effect<
    { readonly token: Token<Work.State<W>>; readonly prior: Prior<Work.State<W>> },
    | InvalidWorkId
    | Quarantined
    | BackendError
    | (Wait extends true ? never : LeaseHeld)
    | Work.DecodeError<W>
    | WindowExhausted,
    Work.Services<W>
  >

  /** See {@link checkpoint}. */
  readonly checkpoint: <S>(
    token: Token<S>,
    state: S
  ) => Effect.Effect<void, Fenced | LeaseExpired | CheckpointEncodeError | CheckpointTooLarge | BackendError>

  /** See {@link readCheckpoint}. */
  readonly readCheckpoint: <S>(
    token: Token<S>
  ) => Effect.Effect<Option.Option<S>, Fenced | CheckpointDecodeError | BackendError>

  /** See {@link renew}. */
  readonly renew: (token: AnyToken) => Effect.Effect<void, Fenced | LeaseExpired | BackendError>

  /** See {@link release}. */
  readonly release: <S>(
    token: Token<S>,
    exit: ExitMode,
    state?: S
  ) => Effect.Effect<void, Fenced | LeaseExpired | CheckpointEncodeError | CheckpointTooLarge | BackendError>

  /** See {@link forget}. */
  readonly forget: (token: AnyToken) => Effect.Effect<void, Fenced | BackendError>

  /** See {@link hold}. */
  readonly hold: <const W extends Work.Input, const Wait extends boolean = false>(
    work: W,
    options?: HoldOptions<Wait>
  ) => Effect.Effect<
    Lease<Work.State<W>>,
    | InvalidWorkId
    | Quarantined
    | BackendError
    | (Wait extends true ? never : LeaseHeld)
    | Work.DecodeError<W>
    | LeaseLost,
    Scope.Scope | Work.Services<W>
  >

  /** Runs a work function under a lease, from acquire to release: `Worker.run`. */
  readonly run: <const W extends Work.Input, A, EX, R, const Wait extends boolean = false>(
    work: W,
    f: (work: Lease<Work.State<W>>) => Effect.Effect<A, EX, R>,
    options?: HoldOptions<Wait>
  ) => Effect.Effect<
    A,
    | EX
    | InvalidWorkId
    | Quarantined
    | BackendError
    | (Wait extends true ? never : LeaseHeld)
    | Work.DecodeError<W>
    | LeaseLost
    | Yielded,
    R | Work.Services<W>
  >

  /** See {@link inspect}. */
  readonly inspect: (
    works: ReadonlyArray<Work.Input>,
    options?: { readonly states?: boolean | undefined }
  ) => Effect.Effect<ReadonlyArray<Backend.LeaseRecord>, InvalidWorkId | BackendError>

  /** See {@link holder}. */
  readonly holder: (work: Work.Input) => Effect.Effect<Option.Option<Holder>, InvalidWorkId | BackendError>

  /** See {@link requestYield}. */
  readonly requestYield: (
    work: Work.Input,
    options?: { readonly deadline?: Duration.Input | undefined }
  ) => Effect.Effect<boolean, InvalidWorkId | BackendError>

  /** See {@link lift}. */
  readonly lift: (work: Work.Input) => Effect.Effect<boolean, InvalidWorkId | BackendError>
}>()("worklease/Lease/Leases") {}

/**
 * Options of the `Leases` layer.
 *
 * @category options
 * @since 0.1.0
 */
export interface LayerOptions extends Renewal.Options {
  /** Names this process: 1 to 512 UTF-8 bytes. Defaults to a random one per layer, which is what deployments want. */
  readonly holderId?: string | undefined
  /** How often a waiting acquire looks again, at the least. Defaults to 1 second. */
  readonly pollInterval?: Duration.Input | undefined
}

/**
 * Provides `Leases` with default options.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer: Layer.Layer<Leases, never, Backend.Backend> = Layer.effect(
  Leases,
  Effect.orDie(internal.make({}))
)

/**
 * Provides `Leases`. Fails with `InvalidConfig`, naming the field.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerWith = (options: LayerOptions): Layer.Layer<Leases, InvalidConfig, Backend.Backend> =>
  Layer.effect(Leases, internal.make(options))

/**
 * Provides `Leases` with options from configuration.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerConfig = (
  options: Config.Wrap<LayerOptions>
): Layer.Layer<Leases, InvalidConfig | Config.ConfigError, Backend.Backend> =>
  Layer.effect(Leases, Effect.flatMap(Config.unwrap(options), internal.make))

/**
 * Takes a lease, which nobody renews.
 *
 * **Details**
 *
 * Fails with
 *
 * - `LeaseHeld` while somebody else holds it, unless it waits;
 * - `Quarantined` after `quarantineAfter` terms without progress, if nobody
 *   holds it: also one that waits;
 * - `WindowExhausted` if the backend answered too late to rely on the lease,
 *   which is then given back;
 * - `CheckpointDecodeError` if the last checkpoint cannot be read: the lease is
 *   given back, and the stored bytes stay;
 * - `InvalidWorkId` before anything is sent;
 * - `BackendError` if the backend refused, or gave no certain answer for two
 *   operation timeouts.
 *
 * Interrupted, it gives back what it may have taken before it ends.
 *
 * @category operations
 * @since 0.1.0
 */
export const acquire = <const W extends Work.Input, const Wait extends boolean = false>(
  work: W,
  options?: AcquireOptions<Wait>
): Effect.Effect<
  { readonly token: Token<Work.State<W>>; readonly prior: Prior<Work.State<W>> },
  | InvalidWorkId
  | Quarantined
  | BackendError
  | (Wait extends true ? never : LeaseHeld)
  | Work.DecodeError<W>
  | WindowExhausted,
  Leases | Work.Services<W>
> => Leases.use((_) => _.acquire(work, options))

/**
 * Saves a state and extends the lease, in one step.
 *
 * **Details**
 *
 * A lease that has expired but has no successor lives again. Inside an open
 * transaction of the backend's own store it joins that.
 *
 * Fails with `Fenced` once another term has begun; `LeaseExpired` after a
 * release or `forget`; `CheckpointEncodeError` or `CheckpointTooLarge` before
 * anything is sent; `BackendError` if the backend refused, or gave no certain
 * answer for two operation timeouts.
 *
 * @category operations
 * @since 0.1.0
 */
export const checkpoint = <S>(token: Token<S>, state: S): Effect.Effect<
  void,
  Fenced | LeaseExpired | CheckpointEncodeError | CheckpointTooLarge | BackendError,
  Leases
> => Leases.use((_) => _.checkpoint(token, state))

/**
 * Reads the last checkpoint of a current term.
 *
 * **Details**
 *
 * Fails with `Fenced` once another term has begun; `CheckpointDecodeError` if
 * the checkpoint cannot be read; `BackendError` if the backend refused, or gave
 * no answer for two operation timeouts.
 *
 * @category operations
 * @since 0.1.0
 */
export const readCheckpoint = <S>(
  token: Token<S>
): Effect.Effect<Option.Option<S>, Fenced | CheckpointDecodeError | BackendError, Leases> =>
  Leases.use((_) => _.readCheckpoint(token))

/**
 * Extends the lease by its `ttl` from now.
 *
 * **Details**
 *
 * Fails with `Fenced` once another term has begun; `LeaseExpired` after the
 * expiry, a release or `forget`; `BackendError` if the backend refused, or gave
 * no certain answer for two operation timeouts.
 *
 * @category operations
 * @since 0.1.0
 */
export const renew = (token: AnyToken): Effect.Effect<void, Fenced | LeaseExpired | BackendError, Leases> =>
  Leases.use((_) => _.renew(token))

/**
 * Ends the term, with a final state if one is given, in one step.
 *
 * **Details**
 *
 * The first exit of a term stands: said again, it succeeds; another one fails
 * with `LeaseExpired`. An expired lease can be released with a state only.
 *
 * Fails with `Fenced` once another term has begun, unless that was told of this
 * very exit; `LeaseExpired` as said; `CheckpointEncodeError` or
 * `CheckpointTooLarge` before anything is sent; `BackendError` if the backend
 * refused, or gave no certain answer for two operation timeouts.
 *
 * @category operations
 * @since 0.1.0
 */
export const release = <S>(token: Token<S>, exit: ExitMode, state?: S): Effect.Effect<
  void,
  Fenced | LeaseExpired | CheckpointEncodeError | CheckpointTooLarge | BackendError,
  Leases
> => Leases.use((_) => _.release(token, exit, state))

/**
 * Ends the term and clears what is stored for the work ID: its state, its exit
 * and its prior.
 *
 * **Details**
 *
 * Fencing tokens go on from where they were. Repeated, it succeeds.
 *
 * Fails with `Fenced` once another term has begun; `BackendError` if the
 * backend refused, or gave no certain answer for two operation timeouts.
 *
 * @category operations
 * @since 0.1.0
 */
export const forget = (token: AnyToken): Effect.Effect<void, Fenced | BackendError, Leases> =>
  Leases.use((_) => _.forget(token))

/**
 * Holds a lease for a scope, renewing it.
 *
 * **Details**
 *
 * When the scope closes, the lease is released: as `finished` after a success,
 * `abandoned` after a failure or an interruption, `yielded` after a handoff.
 * Fails like `acquire`, but with `LeaseLost` where that fails with
 * `WindowExhausted`.
 *
 * **Gotchas**
 *
 * A scope cannot fail its owner. Run the work in the lease's `guard`: outside
 * of one, work goes on after a loss, and its operations on the lease do not
 * return.
 *
 * @category combinators
 * @since 0.1.0
 */
export const hold = <const W extends Work.Input, const Wait extends boolean = false>(
  work: W,
  options?: HoldOptions<Wait>
): Effect.Effect<
  Lease<Work.State<W>>,
  | InvalidWorkId
  | Quarantined
  | BackendError
  | (Wait extends true ? never : LeaseHeld)
  | Work.DecodeError<W>
  | LeaseLost,
  Leases | Scope.Scope | Work.Services<W>
> => Leases.use((_) => _.hold(work, options))

/**
 * Runs an effect under a lease, which it may read from `CurrentLease`.
 *
 * **Details**
 *
 * It takes a plain work ID, for it has no use for checkpoints; of a typed one,
 * pass its `value`. If the lease is lost, the effect is interrupted, and the
 * result is `LeaseLost`; the effect's own error, if it has one, stays in the cause.
 *
 * @category combinators
 * @since 0.1.0
 */
export const withLease: {
  <const Wait extends boolean = false>(workId: string, options?: AcquireOptions<Wait>): <A, EX, R>(
    self: Effect.Effect<A, EX, R>
  ) => Effect.Effect<
    A,
    EX | InvalidWorkId | Quarantined | BackendError | (Wait extends true ? never : LeaseHeld) | LeaseLost,
    Leases | Exclude<R, CurrentLease>
  >
  <A, EX, R, const Wait extends boolean = false>(
    self: Effect.Effect<A, EX, R>,
    workId: string,
    options?: AcquireOptions<Wait>
  ): Effect.Effect<
    A,
    EX | InvalidWorkId | Quarantined | BackendError | (Wait extends true ? never : LeaseHeld) | LeaseLost,
    Leases | Exclude<R, CurrentLease>
  >
} = dual(
  (args) => Effect.isEffect(args[0]),
  <A, EX, R, const Wait extends boolean = false>(
    self: Effect.Effect<A, EX, R>,
    workId: string,
    options?: AcquireOptions<Wait>
  ): Effect.Effect<
    A,
    EX | InvalidWorkId | Quarantined | BackendError | (Wait extends true ? never : LeaseHeld) | LeaseLost,
    Leases | Exclude<R, CurrentLease>
  > =>
    Effect.scopedWith((scope) =>
      Scope.provide(hold(workId, options), scope).pipe(
        Effect.flatMap((lease) => lease.guard(Effect.provideService(self, CurrentLease, lease)))
      )
    )
)

/**
 * Reads what is stored for work IDs, in one statement, in any order. Those of
 * which nothing is stored are left out.
 *
 * **Details**
 *
 * With `states`, the records carry the encoded checkpoints. Defaults to `false`.
 *
 * Fails with `InvalidWorkId` before anything is sent, and with `BackendError`
 * if the backend refused, or gave no certain answer for two operation timeouts.
 *
 * @category operations
 * @since 0.1.0
 */
export const inspect = (
  works: ReadonlyArray<Work.Input>,
  options?: { readonly states?: boolean | undefined }
): Effect.Effect<ReadonlyArray<Backend.LeaseRecord>, InvalidWorkId | BackendError, Leases> =>
  Leases.use((_) => _.inspect(works, options))

/**
 * Reads who holds a work ID, if anybody does, in one statement.
 *
 * **Details**
 *
 * Fails with `InvalidWorkId` before anything is sent, and with `BackendError`
 * if the backend refused, or gave no certain answer for two operation timeouts.
 *
 * @category operations
 * @since 0.1.0
 */
export const holder = (
  work: Work.Input
): Effect.Effect<Option.Option<Holder>, InvalidWorkId | BackendError, Leases> => Leases.use((_) => _.holder(work))

/**
 * Asks the current holder of a work ID to hand over at its next safe point.
 * Answers whether there was a holder.
 *
 * **Details**
 *
 * The request reaches the holder with its next renewal or checkpoint at the
 * latest, and at once where the backend has wake-ups and the holder's process
 * has held a lease for a second. It ends with the holder's term. After
 * `deadline`, counted by the backend from this call, the holder's work is
 * interrupted. Without one, the holder takes the time it needs.
 *
 * @category operations
 * @since 0.1.0
 */
export const requestYield = (
  work: Work.Input,
  options?: { readonly deadline?: Duration.Input | undefined }
): Effect.Effect<boolean, InvalidWorkId | BackendError, Leases> => Leases.use((_) => _.requestYield(work, options))

/**
 * Lets a quarantined work ID go again: sets its terms without progress to 0.
 * Answers whether the work ID is known.
 *
 * **Details**
 *
 * Whoever takes it next is told of everything else as before. A term that has
 * expired does not count any more; one that is held goes on, and counts when it
 * ends. Repeated, it succeeds, and it may come before any quarantine.
 *
 * Fails with `InvalidWorkId` before anything is sent, and with `BackendError`
 * if the backend refused, or gave no certain answer for two operation timeouts.
 *
 * @category operations
 * @since 0.1.0
 */
export const lift = (work: Work.Input): Effect.Effect<boolean, InvalidWorkId | BackendError, Leases> =>
  Leases.use((_) => _.lift(work))
