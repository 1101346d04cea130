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
import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import * as Config from "effect/Config"
import * as Context from "effect/Context"
import * as SecureRandom from "effect/crypto/SecureRandom"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as FiberSet from "effect/FiberSet"
import { dual } from "effect/Function"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Random from "effect/Random"
import * as Scope from "effect/Scope"
import * as Backend from "./Backend.ts"
import * as Gather from "./internal/gather.ts"
import { resend } from "./internal/resend.ts"
import { type Codec, Term } from "./internal/term.ts"
import * as Window from "./internal/window.ts"
import {
  BackendError,
  type CheckpointDecodeError,
  CheckpointEncodeError,
  type CheckpointTooLarge,
  Fenced,
  InvalidConfig,
  InvalidWorkId,
  LeaseExpired,
  LeaseHeld,
  LeaseLost,
  Other,
  Quarantined,
  WindowExhausted,
  Yielded
} from "./LeaseError.ts"
import * as Renewal from "./Renewal.ts"
import type * as Work from "./Work.ts"

/**
 * The runtime type identifier of held leases.
 *
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~worklease/Lease"

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
  /** Strictly larger for each later term of the same work ID. */
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
  /** How many terms in a row have ended without a new checkpoint. */
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
  /** The renewal policy of this lease. Defaults to the one of the layer. */
  readonly policy?: Renewal.Policy | undefined
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

  /**
   * Takes a lease, which nobody renews.
   *
   * Fails with `LeaseHeld` while somebody else holds it, unless it waits;
   * `WindowExhausted` if the backend answered too late to rely on the lease,
   * which is then given back; `CheckpointDecodeError` if the last checkpoint
   * cannot be read, and the lease is given back.
   */
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

  /** Saves a state and extends the lease, in one step. An expired lease without a successor lives again. */
  readonly checkpoint: <S>(
    token: Token<S>,
    state: S
  ) => Effect.Effect<void, Fenced | LeaseExpired | CheckpointEncodeError | CheckpointTooLarge | BackendError>

  /** Reads the last checkpoint of a current term. */
  readonly readCheckpoint: <S>(
    token: Token<S>
  ) => Effect.Effect<Option.Option<S>, Fenced | CheckpointDecodeError | BackendError>

  /** Extends the lease. */
  readonly renew: (token: AnyToken) => Effect.Effect<void, Fenced | LeaseExpired | BackendError>

  /** Ends the term, with a final state if one is given. The first exit of a term stands. */
  readonly release: <S>(
    token: Token<S>,
    exit: ExitMode,
    state?: S
  ) => Effect.Effect<void, Fenced | LeaseExpired | CheckpointEncodeError | CheckpointTooLarge | BackendError>

  /** Ends the term and clears what is stored for the work ID, except that its fencing tokens go on from where they were. */
  readonly forget: (token: AnyToken) => Effect.Effect<void, Fenced | BackendError>

  /**
   * Holds a lease for a scope, renewing it. When the scope closes, it is
   * released: as `finished` after a success, `abandoned` after a failure or an
   * interruption, `yielded` after a handoff.
   *
   * Fails like `acquire`, but with `LeaseLost` where that fails with
   * `WindowExhausted`. A scope cannot fail its owner: run the work in the
   * lease's `guard`.
   */
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

  /** Asks the current holder to hand over. Answers whether there was one. */
  readonly requestYield: (
    work: Work.Input,
    options?: { readonly deadline?: Duration.Input | undefined }
  ) => Effect.Effect<boolean, InvalidWorkId | BackendError>
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
export const layer: Layer.Layer<Leases, never, Backend.Backend> = Layer.suspend(() => Layer.orDie(layerWith({})))

/**
 * Provides `Leases`. Fails with `InvalidConfig`, naming the field.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerWith = (options: LayerOptions): Layer.Layer<Leases, InvalidConfig, Backend.Backend> =>
  Layer.effect(Leases, make(options))

/**
 * Provides `Leases` with options from configuration.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerConfig = (
  options: Config.Wrap<LayerOptions>
): Layer.Layer<Leases, InvalidConfig | Config.ConfigError, Backend.Backend> =>
  Layer.effect(Leases, Effect.flatMap(Config.unwrap(options), make))

/**
 * Takes a lease, which nobody renews.
 *
 * @see {@link Leases}
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
 * @see {@link Leases}
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
 * @see {@link Leases}
 * @category operations
 * @since 0.1.0
 */
export const readCheckpoint = <S>(
  token: Token<S>
): Effect.Effect<Option.Option<S>, Fenced | CheckpointDecodeError | BackendError, Leases> =>
  Leases.use((_) => _.readCheckpoint(token))

/**
 * Extends the lease.
 *
 * @see {@link Leases}
 * @category operations
 * @since 0.1.0
 */
export const renew = (token: AnyToken): Effect.Effect<void, Fenced | LeaseExpired | BackendError, Leases> =>
  Leases.use((_) => _.renew(token))

/**
 * Ends the term, with a final state if one is given.
 *
 * @see {@link Leases}
 * @category operations
 * @since 0.1.0
 */
export const release = <S>(token: Token<S>, exit: ExitMode, state?: S): Effect.Effect<
  void,
  Fenced | LeaseExpired | CheckpointEncodeError | CheckpointTooLarge | BackendError,
  Leases
> => Leases.use((_) => _.release(token, exit, state))

/**
 * Ends the term and clears what is stored for the work ID.
 *
 * @see {@link Leases}
 * @category operations
 * @since 0.1.0
 */
export const forget = (token: AnyToken): Effect.Effect<void, Fenced | BackendError, Leases> =>
  Leases.use((_) => _.forget(token))

/**
 * Holds a lease for a scope, renewing it.
 *
 * @see {@link Leases}
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
 * If the lease is lost, the effect is interrupted, and the result is
 * `LeaseLost`; the effect's own error, if it has one, stays in the cause.
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
 * Asks the current holder of a work ID to hand over at its next safe point.
 * Answers whether there was a holder.
 *
 * **Details**
 *
 * The request reaches the holder with its next renewal or checkpoint, and ends
 * with its term. After `deadline`, counted by the backend from this call, the
 * holder's work is interrupted. Without one, the holder takes the time it
 * needs.
 *
 * @category operations
 * @since 0.1.0
 */
export const requestYield = (
  work: Work.Input,
  options?: { readonly deadline?: Duration.Input | undefined }
): Effect.Effect<boolean, InvalidWorkId | BackendError, Leases> => Leases.use((_) => _.requestYield(work, options))

// -----------------------------------------------------------------------------
// internal
// -----------------------------------------------------------------------------

/** A token proves its term because only this module can add to this map. */
const terms = new WeakMap<object, Term>()

/** @internal */
export const termOf = (self: AnyToken): Term => {
  const term = terms.get(self)
  if (term === undefined) throw new TypeError("Not a token: only an acquire makes one")
  return term
}

/** What `Worker` needs of the service beyond its public operations. */
interface Supervisor {
  readonly take: (
    work: Work.Input,
    options: HoldOptions | undefined,
    restore: Restore
  ) => Effect.Effect<Held, TakeError, any>
  readonly leave: (held: Held, exit: Exit.Exit<unknown, unknown>) => Effect.Effect<void, LeaseLost | BackendError>
}

const supervisors = new WeakMap<Leases["Service"], Supervisor>()

type Restore = <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.Effect<A, E, R>

type AcquireError = InvalidWorkId | Quarantined | BackendError | LeaseHeld | WindowExhausted

type TakeError = InvalidWorkId | Quarantined | BackendError | LeaseHeld | CheckpointDecodeError | LeaseLost

/** A lease under supervision. */
interface Held {
  readonly term: Term
  readonly lease: Lease<any>
  /** Holds the fibers that renew and watch. Closing it stops and joins them. */
  readonly fibers: Scope.Closeable
}

/** How long a waiter lets pass after an expiry, at most, so that a hundred of them don't arrive together. */
const expiryJitter = 25

/** How often and within how many milliseconds a fail-fast acquire asks again for a row that is changing. */
const contendedTries = 3
const contendedWithin = 20

/** The longest sleep of the watch: the monotonic clock, which timers follow, may have stood still meanwhile. */
const watchInterval = 1000

const make = Effect.fnUntraced(function*(
  options: LayerOptions
): Effect.fn.Return<Leases["Service"], InvalidConfig, Backend.Backend | Scope.Scope> {
  const defaultPolicy = yield* Renewal.make(options)
  const pollInterval = Option.getOrElse(Duration.fromInput(options.pollInterval ?? "1 second"), () => Duration.zero)
  if (!Duration.isFinite(pollInterval) || !Duration.isPositive(pollInterval)) {
    return yield* new InvalidConfig({ field: "pollInterval", why: "it must be a positive and finite duration" })
  }
  const holderId = options.holderId ?? SecureRandom.uuidV7Unsafe()
  const holderIdFault = faultOf(holderId)
  if (holderIdFault !== undefined) {
    return yield* new InvalidConfig({
      field: "holderId",
      why: new InvalidWorkId({ workId: holderId, why: holderIdFault }).message
    })
  }

  const backend = yield* Backend.Backend
  const clock = yield* Clock.Clock
  const run: Gather.Run = yield* FiberSet.makeRuntime<never>()
  const acquires = Gather.make({ operation: "acquire", send: backend.acquire, run })
  const renewals = Gather.make({ operation: "renew", send: backend.renew, run })
  const checkpoints = Gather.make({
    operation: "checkpoint",
    send: backend.checkpoint,
    run,
    sizeOf: ({ state }) => state.bytes.byteLength
  })
  const releases = Gather.make({
    operation: "release",
    send: backend.release,
    run,
    sizeOf: ({ state }) => Option.match(state, { onNone: () => 0, onSome: ({ state }) => state.bytes.byteLength })
  })

  // ---------------------------------------------------------------------------
  // sending
  // ---------------------------------------------------------------------------

  const timeoutOf = (policy: Renewal.Policy): number => Duration.toMillis(policy.operationTimeout)

  /** The time for everything that must end by itself: a first sending that is not answered, and one more. */
  const budget = (policy: Renewal.Policy): () => number => {
    const start = Window.now(clock)
    return () => 2 * timeoutOf(policy) - Window.elapsedMillis(clock, start)
  }

  /** Queues an operation, and takes it back when its caller is interrupted before it was sent. */
  const sent = <Request, Reply>(
    gather: Gather.Gather<Request, Reply>,
    request: Request,
    policy: Renewal.Policy,
    isWanted?: () => boolean
  ): Effect.Effect<Reply, BackendError> =>
    Effect.suspend(() => {
      const entry = gather.offer(request, timeoutOf(policy), isWanted)
      return Effect.onInterrupt(entry.reply, () => Effect.sync(entry.withdraw))
    })

  /** One attempt of an operation that is not gathered, in a fiber that the layer owns. */
  const single = <Reply>(
    operation: string,
    workId: string,
    timeout: number,
    send: Effect.Effect<Reply, BackendError>
  ): Effect.Effect<Reply, BackendError> =>
    Effect.suspend(() =>
      Gather.make<{ readonly workId: string }, Reply>({
        operation,
        send: () => Effect.map(send, (reply): NonEmptyReadonlyArray<Reply> => [reply]),
        run
      }).offer({ workId }, timeout).reply
    )

  /** Operations that never join a transaction would wait for the one they are called in, where it is exclusive. */
  const refuseInsideExclusive = (operation: string, workId: string): Effect.Effect<void, BackendError> =>
    Option.match(backend.transaction, {
      onNone: () => Effect.void,
      onSome: (transaction) =>
        !transaction.exclusive ? Effect.void : Effect.flatMap(transaction.isOpen, (open) =>
          open
            ? Effect.fail(
              new BackendError({
                operation,
                workId,
                outcome: "rejected",
                reason: new Other({
                  why: "it never joins a transaction, and the open one keeps the client's only connection. " +
                    "Call it outside of the transaction, or use a client with more connections"
                })
              })
            )
            : Effect.void)
    })

  // ---------------------------------------------------------------------------
  // acquiring
  // ---------------------------------------------------------------------------

  const releaseTerm = (
    term: Backend.Term & { readonly policy: Renewal.Policy },
    how: Pick<Backend.ReleaseRequest, "exit" | "interrupted" | "state">,
    remaining = budget(term.policy)
  ) => {
    const { fencingToken, holderId, workId } = term
    return resend(sent(releases, { workId, holderId, fencingToken, ...how }, term.policy), {
      operation: "release",
      workId,
      persistent: false,
      remaining
    })
  }

  /** Undoes a term whose work never started. */
  const giveBack = (term: Backend.Term & { readonly policy: Renewal.Policy }): Effect.Effect<void> =>
    Effect.ignoreCause(releaseTerm(term, { exit: "given-back", interrupted: false, state: Option.none() }), {
      log: "Warn",
      message: `Could not give back the lease on ${JSON.stringify(term.workId)}; it expires within its ttl`
    })

  /**
   * One attempt, which is all of its sendings. After a refusal the next one is
   * another, because the window counts from its first sending.
   *
   * Interrupted, it finds out whether the lease was taken after all, and gives it back. */
  const attempt = (workId: string, policy: Renewal.Policy, restore: Restore) =>
    Effect.suspend(() => {
      const first = Window.now(clock)
      const request = { workId, holderId, attempt: SecureRandom.uuidV4Unsafe(), ttl: policy.ttl }
      let entry: Gather.Entry<Backend.AcquireReply> | undefined
      let offers = 0
      const send = Effect.suspend(() => {
        offers++
        entry = acquires.offer(request, timeoutOf(policy))
        return entry.reply
      })
      const inTime = budget(policy)
      const settle = Effect.suspend(() => {
        if (entry === undefined || (entry.withdraw() && offers === 1)) return Effect.void
        let pending: Effect.Effect<Backend.AcquireReply, BackendError> | undefined = entry.reply
        return resend(
          Effect.suspend(() => {
            const reply = pending ?? send
            pending = undefined
            return reply
          }),
          { operation: "acquire", workId, persistent: false, remaining: budget(policy), unknown: offers > 1 }
        ).pipe(
          Effect.flatMap((reply) =>
            reply._tag === "Acquired"
              ? giveBack({ workId, holderId, fencingToken: reply.fencingToken, policy })
              : Effect.void
          ),
          Effect.ignoreCause({
            log: "Warn",
            message: `An acquire of ${
              JSON.stringify(workId)
            } was interrupted and the backend does not answer; if the lease was taken, it expires within its ttl`
          })
        )
      })
      return restore(resend(send, {
        operation: "acquire",
        workId,
        persistent: false,
        remaining: () => Math.min(inTime(), Window.windowMillis(policy) - Window.elapsedMillis(clock, first))
      })).pipe(
        Effect.onInterrupt(() => settle),
        Effect.map((reply) => ({ reply, first }))
      )
    })

  /** Waits until the lease may be free: for the time given, or until a hint arrives. */
  const pause = (millis: number, wakeup: Effect.Effect<void>): Effect.Effect<void> =>
    Effect.raceFirst(Effect.sleep(Math.min(millis, Duration.toMillis(pollInterval))), wakeup)

  const acquireTerm = (
    workId: string,
    policy: Renewal.Policy,
    wait: boolean,
    codec: Codec,
    restore: Restore
  ): Effect.Effect<{ readonly term: Term; readonly acquired: Backend.Acquired }, AcquireError> =>
    Effect.scopedWith(Effect.fnUntraced(function*(scope) {
      let wakeup: Effect.Effect<void> | undefined
      const askedSince = Window.now(clock)
      let contended = 0
      while (true) {
        const { first, reply } = yield* attempt(workId, policy, restore)
        switch (reply._tag) {
          case "Acquired": {
            const term = new Term({
              workId,
              holderId,
              fencingToken: reply.fencingToken,
              policy,
              codec,
              clock,
              confirmedAt: first
            })
            if (term.remaining > 0) return { term, acquired: reply }
            yield* giveBack(term)
            return yield* new WindowExhausted(term)
          }
          case "AttemptEnded":
            // The answer came after the end of the term that this attempt had: too late to rely on it.
            return yield* new WindowExhausted({ workId, fencingToken: 0n })
          case "Quarantined":
            return yield* new Quarantined({ workId, why: reply.why })
          case "Held": {
            if (!wait) {
              return yield* new LeaseHeld({
                workId,
                holderId: reply.holderId,
                retryAfter: Duration.millis(Math.ceil(Duration.toMillis(reply.remaining)))
              })
            }
            contended = 0
            if (wakeup === undefined) {
              wakeup = yield* subscribe(workId, scope, restore)
              // It may have become free before the subscription.
              if (wakeup !== noWakeup) continue
            }
            const jitter = yield* Random.nextBetween(0, expiryJitter)
            yield* restore(pause(Duration.toMillis(reply.remaining) + jitter, wakeup))
            continue
          }
          case "Contended": {
            contended++
            if (!wait) {
              if (contended > contendedTries || Window.elapsedMillis(clock, askedSince) > contendedWithin) {
                return yield* new LeaseHeld({ workId, retryAfter: Duration.millis(contendedWithin) })
              }
            }
            const jitter = yield* Random.nextBetween(1, contendedWithin / (contendedTries + 1))
            // A row that stays so is pinned by a fenced transaction, which may last.
            yield* restore(pause(wait ? jitter * 2 ** Math.min(contended, 10) : jitter, wakeup ?? noWakeup))
          }
        }
      }
    }))

  const noWakeup = Effect.never

  const subscribe = (workId: string, scope: Scope.Scope, restore: Restore): Effect.Effect<Effect.Effect<void>> =>
    Option.match(backend.wakeups, {
      onNone: () => Effect.succeed(noWakeup),
      onSome: (subscribe) =>
        Effect.catch(restore(Scope.provide(subscribe(workId), scope)), (error) =>
          Effect.as(
            Effect.logDebug("No wake-up hints; the waiting acquire polls", error),
            noWakeup
          ))
    })

  // ---------------------------------------------------------------------------
  // operations of a term
  // ---------------------------------------------------------------------------

  /**
   * Sends a renewal or a checkpoint, and notes what its answer brings. Of a
   * supervised term, nothing is sent once it is lost, not even what waits in a
   * queue, and until then it is sent again and again.
   */
  const extend = <Request>(
    term: Term,
    operation: string,
    gather: Gather.Gather<Request, Backend.ExtendReply>,
    request: Request,
    supervised: boolean
  ) =>
    Effect.suspend(() => {
      let sentAt = Window.now(clock)
      const isWanted = supervised ? () => !term.loseIfExhausted() : undefined
      return resend(
        Effect.suspend(() => {
          sentAt = Window.now(clock)
          return sent(gather, request, term.policy, isWanted)
        }),
        {
          operation,
          workId: term.workId,
          persistent: supervised,
          remaining: supervised ? () => term.remaining : budget(term.policy)
        }
      ).pipe(
        Effect.tap((reply) =>
          Effect.sync(() => {
            if (reply._tag !== "Done") return
            term.confirm(sentAt)
            if (Option.isSome(reply.yieldRequest)) term.requestYield(reply.yieldRequest.value)
          })
        )
      )
    })

  const renewTerm = (term: Term, supervised: boolean) => {
    const { fencingToken, holderId, workId } = term
    const request = { workId, holderId, fencingToken, ttl: term.policy.ttl }
    return term.permit.withPermit(extend(term, "renew", renewals, request, supervised))
  }

  const checkpointRequest = (term: Term, state: Backend.Stored): Backend.CheckpointRequest => ({
    workId: term.workId,
    holderId: term.holderId,
    fencingToken: term.fencingToken,
    ttl: term.policy.ttl,
    sequence: ++term.sequence,
    state
  })

  const checkpointTerm = (term: Term, state: Backend.Stored, supervised: boolean) =>
    term.permit.withPermit(
      Effect.suspend(() => extend(term, "checkpoint", checkpoints, checkpointRequest(term, state), supervised))
    )

  /** A checkpoint inside an open transaction: in the caller's fiber, once, and counted after the commit. */
  const checkpointJoined = (
    transaction: Backend.Transaction,
    term: Term,
    state: Backend.Stored,
    onCommit: () => void
  ) =>
    Effect.flatMap(CurrentFence, (fence) => {
      const request = checkpointRequest(term, state)
      const sentAt = Window.now(clock)
      return backend.checkpoint([request]).pipe(
        Effect.flatMap(([reply]) => reply instanceof BackendError ? Effect.fail(reply) : Effect.succeed(reply)),
        Effect.mapError(({ operation, outcome, reason }) =>
          new BackendError({ operation, workId: term.workId, outcome, reason })
        ),
        Effect.flatMap((reply) => {
          // It waits for the row instead.
          return reply._tag === "Busy"
            ? Effect.die(new Error("A checkpoint inside a transaction answered Busy"))
            : Effect.succeed(reply)
        }),
        Effect.tap((reply) => {
          if (reply._tag !== "Done") {
            fence?.refuse(term, term.refusal(reply))
            return Effect.void
          }
          return transaction.afterCommit(Effect.sync(() => {
            term.confirm(sentAt)
            if (Option.isSome(reply.yieldRequest)) term.requestYield(reply.yieldRequest.value)
            onCommit()
          }))
        })
      )
    })

  const openTransaction: Effect.Effect<Option.Option<Backend.Transaction>> = Option.match(backend.transaction, {
    onNone: () => Effect.succeedNone,
    onSome: (transaction) => Effect.map(transaction.isOpen, (open) => open ? Option.some(transaction) : Option.none())
  })

  // ---------------------------------------------------------------------------
  // supervision
  // ---------------------------------------------------------------------------

  const renewal = (term: Term): Effect.Effect<void> =>
    Effect.gen(function*() {
      while (!term.loseIfExhausted()) {
        // A checkpoint extends the lease too, so the next renewal is counted from it.
        const wait = Duration.toMillis(term.policy.renewEvery) - term.sinceConfirmed
        if (wait > 0) {
          yield* Effect.sleep(wait)
          continue
        }
        yield* renewTerm(term, true).pipe(
          Effect.tap((reply) =>
            Effect.sync(() => {
              if (reply._tag !== "Done") term.lose(term.refusal(reply))
            })
          ),
          Effect.catch((error) =>
            Effect.andThen(
              Effect.logWarning(`Could not renew the lease on ${JSON.stringify(term.workId)}`, error),
              Effect.sleep(Duration.min(term.policy.renewEvery, Duration.seconds(1)))
            )
          )
        )
      }
    })

  /** Ends the work when its window does, whether or not the backend answers, or when a handoff's deadline passes. */
  const watch = (term: Term): Effect.Effect<void> =>
    Effect.gen(function*() {
      const yieldRequested = Deferred.await(term.yieldRequested)
      while (!term.loseIfExhausted()) {
        const untilDeadline = term.untilYieldDeadline
        if (untilDeadline <= 0) term.overrun()
        const sleep = Effect.sleep(
          Math.min(term.remaining, watchInterval, untilDeadline > 0 ? untilDeadline : Infinity)
        )
        yield* untilDeadline === Infinity && !Deferred.isDoneUnsafe(term.yieldRequested)
          ? Effect.raceFirst(sleep, yieldRequested)
          : sleep
      }
    })

  const background = (effect: Effect.Effect<void>, term: Term, fiber: string, scope: Scope.Scope) =>
    effect.pipe(
      Effect.tapCause((cause) =>
        Cause.hasInterruptsOnly(cause)
          ? Effect.void
          : Effect.logError(`The ${fiber} of the lease on ${JSON.stringify(term.workId)} failed`, cause)
      ),
      Effect.annotateLogs({ module: "worklease/Lease", fiber }),
      Effect.forkIn(scope, { startImmediately: true })
    )

  const take: Supervisor["take"] = (work, options, restore) =>
    Effect.gen(function*() {
      const workId = yield* validate(work)
      yield* refuseInsideExclusive("acquire", workId)
      const codec = codecOf(work, yield* Effect.context())
      const { acquired, term } = yield* acquireTerm(
        workId,
        options?.policy ?? defaultPolicy,
        options?.wait === true,
        codec,
        restore
      ).pipe(
        Effect.mapError((error) => error._tag === "WindowExhausted" ? new LeaseLost({ workId, reason: error }) : error)
      )
      const fibers = yield* Scope.make()
      yield* background(renewal(term), term, "renewal", fibers)
      yield* background(watch(term), term, "watch", fibers)
      return yield* supervise(term, decodePrior(codec, acquired.prior), restore).pipe(
        Effect.flatMap((exit) => settleExit(term, exit)),
        Effect.map((prior): Held => ({
          term,
          lease: heldLease(term, makeToken(term, acquired.expiresAt), prior, options?.yieldAt ?? "checkpoint"),
          fibers
        })),
        // The work never started.
        Effect.onError(() =>
          Effect.andThen(
            Scope.close(fibers, Exit.void),
            term.loss === undefined || term.loss.reason._tag === "WindowExhausted" ? giveBack(term) : Effect.void
          )
        )
      )
    })

  const heldLease = (
    term: Term,
    token: Token<any>,
    prior: Prior<any>,
    yieldAt: "checkpoint" | "handOff"
  ): Lease<any> => {
    const mayYield = () => yieldAt === "checkpoint" && Deferred.isDoneUnsafe(term.yieldRequested)

    const settleReply = (reply: Backend.TermReply) =>
      Effect.suspend(() => {
        if (reply._tag === "Fenced" || reply._tag === "Expired") term.lose(term.refusal(reply))
        return term.loss ? noReturn : Effect.void
      })

    const lease: Lease<any> = {
      [TypeId]: TypeId,
      workId: term.workId,
      token,
      prior,
      window: Effect.sync(() => Duration.millis(term.loss ? 0 : Math.max(0, term.remaining))),
      lost: Deferred.await(term.lost),
      guard: (self) =>
        Effect.uninterruptibleMask((restore) =>
          Effect.flatMap(supervise(term, self, restore), (exit) => settleExit(term, exit))
        ),
      yieldRequested: Effect.sync(() => Deferred.isDoneUnsafe(term.yieldRequested)),
      awaitYieldRequest: Deferred.await(term.yieldRequested),
      checkpoint: (state) =>
        Effect.suspend(() => {
          if (term.loseIfExhausted()) return noReturn
          return Effect.flatMap(term.codec.encode(state), (stored) =>
            Effect.flatMap(openTransaction, (transaction): Effect.Effect<void, BackendError> => {
              if (Option.isSome(transaction)) {
                const onCommit = () => {
                  if (mayYield()) {
                    term.handOff(Option.none())
                  }
                }
                return Effect.flatMap(checkpointJoined(transaction.value, term, stored, onCommit), settleReply)
              }
              if (mayYield()) {
                return endHere(term, Option.some(stored))
              }
              return checkpointTerm(term, stored, true).pipe(
                Effect.catch((error) =>
                  term.loseIfExhausted() ? noReturn : Effect.fail(error)
                ),
                Effect.flatMap(settleReply),
                Effect.andThen(Effect.suspend(() => mayYield() ? endHere(term, Option.none()) : Effect.void))
              )
            }))
        }),
      leaveAs: (exit, ...state) =>
        Effect.flatMap(encodeFinal(term, state), (state) => {
          const leave = Effect.sync(() => {
            term.leaving = { exit, state }
          })
          // What is rolled back was not achieved.
          return Effect.flatMap(
            openTransaction,
            Option.match({ onNone: () => leave, onSome: (transaction) => transaction.afterCommit(leave) })
          )
        }),
      handOff: (...state) =>
        Effect.suspend(() => {
          if (term.loseIfExhausted()) return noReturn
          return Effect.flatMap(encodeFinal(term, state), (state) =>
            Effect.flatMap(openTransaction, (transaction) =>
              Option.isSome(transaction)
                ? Effect.die(
                  new Error(
                    "handOff inside a transaction would roll it back. Checkpoint inside it, and hand off after it"
                  )
                )
                : endHere(term, state)))
        })
    }
    return lease
  }

  /** The one release of a supervised term, after its work has ended. Fails as its caller should, if the work did not. */
  const leave: Supervisor["leave"] = Effect.fnUntraced(function*(held, exit) {
    const { term } = held
    yield* Scope.close(held.fibers, Exit.void)
    term.loseIfExhausted()
    const how = howToLeave(term, exit)
    if (term.loss !== undefined) {
      // Whoever was fenced or has expired says nothing more. Who merely ran out of time may still help its successor.
      if (term.loss.reason._tag === "WindowExhausted") {
        yield* Effect.ignoreCause(
          releaseTerm(term, { exit: "abandoned", interrupted: false, state: Option.none() }, () => 0),
          { log: "Debug", message: `Could not release the lost lease on ${JSON.stringify(term.workId)}` }
        )
      }
      return yield* term.loss
    }
    const reply = yield* Effect.result(term.permit.withPermit(Effect.suspend(() =>
      releaseTerm(term, {
        exit: how.exit,
        interrupted: how.interrupted,
        state: Option.map(how.state, (state) => ({ sequence: ++term.sequence, state }))
      })
    )))
    if (reply._tag === "Success") {
      if (reply.success._tag === "Done") return
      term.lose(term.refusal(reply.success))
      return yield* term.loss!
    }
    yield* Effect.logWarning(
      `Could not release the lease on ${JSON.stringify(term.workId)}; it expires within its ttl`,
      reply.failure
    )
    if (Option.isSome(how.state)) return yield* reply.failure
  })

  const hold = (work: Work.Input, options?: HoldOptions) =>
    Effect.uninterruptibleMask((restore) =>
      Effect.flatMap(Effect.scope, (scope) =>
        Effect.flatMap(take(work, options, restore), (held) =>
          Effect.as(
            Scope.addFinalizerExit(scope, (exit) =>
              Effect.catchCause(
                leave(held, exit),
                (cause) =>
                  Effect.logDebug(`The lease on ${JSON.stringify(held.term.workId)} did not end as it should`, cause)
              )),
            held.lease
          )))
    )

  // ---------------------------------------------------------------------------
  // single operations
  // ---------------------------------------------------------------------------

  const acquire = (work: Work.Input, options?: AcquireOptions) =>
    Effect.uninterruptibleMask(Effect.fnUntraced(function*(restore) {
      const workId = yield* validate(work)
      yield* refuseInsideExclusive("acquire", workId)
      const codec = codecOf(work, yield* Effect.context())
      const { acquired, term } = yield* acquireTerm(
        workId,
        options?.policy ?? defaultPolicy,
        options?.wait === true,
        codec,
        restore
      )
      const prior = yield* restore(decodePrior(codec, acquired.prior)).pipe(
        Effect.tap(() => term.remaining > 0 ? Effect.void : Effect.fail(new WindowExhausted(term))),
        Effect.onError(() => giveBack(term))
      )
      return { token: makeToken(term, acquired.expiresAt), prior }
    }))

  /** Whether the reply takes effect, as the flat errors of the single operations. */
  const settleSingle = (
    term: Term,
    reply: { readonly _tag: "Done" } | { readonly _tag: "Fenced" | "Expired" }
  ): Effect.Effect<void, Fenced | LeaseExpired> =>
    reply._tag === "Done" ? Effect.void : Effect.fail(term.refusal(reply))

  const service: Leases["Service"] = {
    holderId,
    acquire: acquire as Leases["Service"]["acquire"],
    hold: hold as Leases["Service"]["hold"],
    checkpoint: (token, state) =>
      Effect.suspend(() => {
        const term = termOf(token)
        return Effect.flatMap(term.codec.encode(state), (stored) =>
          Effect.flatMap(openTransaction, (transaction) =>
            Option.isSome(transaction)
              ? checkpointJoined(transaction.value, term, stored, () => {})
              : checkpointTerm(term, stored, false))).pipe(
            Effect.flatMap((reply) =>
              settleSingle(term, reply)
            )
          )
      }),
    readCheckpoint: (token) =>
      Effect.suspend(() => {
        const term = termOf(token)
        const { workId } = term
        return Effect.andThen(
          refuseInsideExclusive("readCheckpoint", workId),
          resend(single("readCheckpoint", workId, timeoutOf(term.policy), backend.read(term)), {
            operation: "readCheckpoint",
            workId,
            persistent: false,
            remaining: budget(term.policy)
          })
        ).pipe(
          Effect.flatMap((reply): Effect.Effect<Option.Option<any>, Fenced | CheckpointDecodeError> =>
            reply._tag === "Fenced"
              ? Effect.fail(term.refusal(reply) as Fenced)
              : decodeState(term.codec, reply.state)
          )
        )
      }),
    renew: (token) =>
      Effect.suspend(() => {
        const term = termOf(token)
        return Effect.andThen(
          refuseInsideExclusive("renew", term.workId),
          renewTerm(term, false)
        ).pipe(Effect.flatMap((reply) => settleSingle(term, reply)))
      }),
    release: (token, exit, ...state) =>
      Effect.suspend(() => {
        const term = termOf(token)
        return Effect.andThen(refuseInsideExclusive("release", term.workId), encodeFinal(term, state)).pipe(
          Effect.flatMap((state) =>
            term.permit.withPermit(Effect.suspend(() =>
              releaseTerm(term, {
                exit,
                interrupted: false,
                state: Option.map(state, (state) => ({ sequence: ++term.sequence, state }))
              })
            ))
          ),
          Effect.flatMap((reply) => settleSingle(term, reply))
        )
      }),
    forget: (token) =>
      Effect.suspend(() => {
        const term = termOf(token)
        const { workId } = term
        return Effect.andThen(
          refuseInsideExclusive("forget", workId),
          term.permit.withPermit(resend(single("forget", workId, timeoutOf(term.policy), backend.forget(term)), {
            operation: "forget",
            workId,
            persistent: false,
            remaining: budget(term.policy)
          }))
        ).pipe(
          Effect.flatMap((reply) => reply._tag === "Done" ? Effect.void : Effect.fail(term.refusal(reply) as Fenced))
        )
      }),
    requestYield: (work, options) =>
      Effect.gen(function*() {
        const workId = yield* validate(work)
        yield* refuseInsideExclusive("requestYield", workId)
        return (yield* resend(
          Effect.map(
            single(
              "requestYield",
              workId,
              timeoutOf(defaultPolicy),
              backend.requestYield({
                workId,
                deadline: Option.map(Option.fromUndefinedOr(options?.deadline), Duration.fromInputUnsafe)
              })
            ),
            (asked) => ({ _tag: "Done" as const, asked })
          ),
          { operation: "requestYield", workId, persistent: false, remaining: budget(defaultPolicy) }
        )).asked
      })
  }
  supervisors.set(service, { take, leave })
  return service
})

/**
 * Runs a work function under a lease, from acquire to release: `Worker.run`.
 *
 * @internal
 */
export const runWork = <A, EX, R>(
  leases: Leases["Service"],
  work: Work.Input,
  f: (lease: Lease<any>) => Effect.Effect<A, EX, R>,
  options: HoldOptions | undefined
): Effect.Effect<A, EX | TakeError | Yielded, any> =>
  Effect.uninterruptibleMask(Effect.fnUntraced(function*(restore) {
    const supervisor = supervisors.get(leases)
    if (supervisor === undefined) {
      throw new TypeError("Leases must come from the layers of worklease/Lease")
    }
    const held = yield* supervisor.take(work, options, restore)
    const { lease, term } = held
    const exit = yield* supervise(
      term,
      Effect.provideService(Effect.suspend(() => f(lease)), CurrentLease, lease),
      restore
    )
    const left = yield* Effect.exit(supervisor.leave(held, exit))
    if (term.loss !== undefined) return yield* lossOf(term, exit)
    if (Exit.isFailure(left) && (Exit.isSuccess(exit) || term.handedOff !== undefined)) {
      return yield* Effect.failCause(left.cause)
    }
    if (term.handedOff !== undefined || term.overran) return yield* new Yielded({ workId: term.workId })
    return yield* exit
  }))

/** What happens to a term inside one fenced transaction. */
class FenceState {
  readonly term: Term
  readonly parent: FenceState | undefined
  /** Why a checkpoint was refused. Nothing may commit then, also if the user's code has caught the error. */
  refused: Fenced | LeaseExpired | undefined

  constructor(term: Term, parent: FenceState | undefined) {
    this.term = term
    this.parent = parent
  }

  refuse(term: Term, refused: Fenced | LeaseExpired): void {
    if (this.term === term) this.refused ??= refused
    this.parent?.refuse(term, refused)
  }
}

const CurrentFence = Context.Reference<FenceState | undefined>("worklease/Lease/CurrentFence", {
  defaultValue: () => undefined
})

/**
 * Runs an effect in a transaction that pins the lease's term: `Fence`.
 *
 * @internal
 */
export const fenced = <A, EX, R, E2, R2>(
  self: Effect.Effect<A, EX, R>,
  lease: Any | AnyToken,
  transaction: <E>(self: Effect.Effect<A, E, R>, options: {
    readonly term: Backend.Term
    readonly remaining: () => number
    readonly operationTimeout: Duration.Duration
  }) => Effect.Effect<A, E | E2, R2>
): Effect.Effect<A, EX | E2 | Fenced | LeaseExpired, R2> =>
  Effect.flatMap(CurrentFence, (parent): Effect.Effect<A, EX | E2 | Fenced | LeaseExpired, R2> => {
    const held = TypeId in lease ? lease : undefined
    const term = termOf(held === undefined ? lease as AnyToken : held.token)
    if (held !== undefined && term.loseIfExhausted()) return noReturn
    const state = new FenceState(term, parent)
    const { operationTimeout } = term.policy
    const transacted = transaction(
      Effect.flatMap(self, (value): Effect.Effect<A, Fenced | LeaseExpired | LeaseLost> => {
        if (state.refused !== undefined) return Effect.fail(state.refused)
        // The window may have ended while this process did not run.
        return held === undefined ? Effect.succeed(value) : settleExit(term, Exit.succeed(value))
      }).pipe(Effect.provideService(CurrentFence, state)),
      {
        term,
        // With a bare token, only the backend is asked.
        remaining: () =>
          held === undefined ? Math.max(term.remaining, Duration.toMillis(operationTimeout)) : term.remaining,
        operationTimeout
      }
    )
    // A loss ends the work of a held lease here already, so that the transaction is rolled back also without a guard.
    return (held === undefined ? transacted : held.guard(transacted)).pipe(
      Effect.catchCause((cause): Effect.Effect<A, EX | E2 | Fenced | LeaseExpired> => {
        const failure = Option.getOrUndefined(Cause.findErrorOption(cause))
        const refused = state.refused ?? (isRefusal(failure, term) ? failure : undefined)
        if (held === undefined) {
          return refused === undefined
            ? Effect.failCause(cause as Cause.Cause<EX | E2 | Fenced | LeaseExpired>)
            : Effect.fail(refused)
        }
        if (refused !== undefined) term.lose(refused)
        if (term.loss !== undefined) return noReturn
        return term.stopped ? stopHere : Effect.failCause(cause as Cause.Cause<EX | E2 | Fenced | LeaseExpired>)
      })
    )
  })

const isRefusal = (error: unknown, term: Term): error is Fenced | LeaseExpired =>
  (error instanceof Fenced || error instanceof LeaseExpired) && error.workId === term.workId &&
  error.fencingToken === term.fencingToken

/** Runs the work in a fiber of its own until it ends, or has to end. It is over, with its finalizers, on return. */
const supervise = <A, E, R>(
  term: Term,
  work: Effect.Effect<A, E, R>,
  restore: Restore
): Effect.Effect<Exit.Exit<A, E>, never, R> =>
  Effect.suspend(() => {
    if (term.stopped || term.loseIfExhausted()) return Effect.succeed(Exit.interrupt())
    return Effect.flatMap(
      Effect.forkChild(restore(work), { startImmediately: true, uninterruptible: "inherit" }),
      (fiber) => {
        const over = Deferred.makeUnsafe<void>()
        const end = () => Deferred.doneUnsafe(over, Effect.void)
        fiber.addObserver(end)
        const unsubscribe = term.whenStopped(end)
        return Effect.exit(restore(Deferred.await(over))).pipe(
          Effect.andThen(Effect.suspend(() => {
            unsubscribe()
            return fiber.pollUnsafe() === undefined ? Fiber.interrupt(fiber) : Effect.void
          })),
          Effect.andThen(Fiber.await(fiber))
        )
      }
    )
  })

/** What a guarded effect comes to. */
const settleExit = <A, E>(term: Term, exit: Exit.Exit<A, E>): Effect.Effect<A, E | LeaseLost> =>
  Effect.suspend((): Effect.Effect<A, E | LeaseLost> => {
    if (term.loseIfExhausted()) return lossOf(term, exit)
    return term.stopped && Exit.isSuccess(exit) ? Effect.interrupt : exit
  })

/**
 * The loss first; what the work itself failed with stays in the cause. Its
 * defects do as failures, for beside a defect the loss could not be caught.
 */
const lossOf = (term: Term, exit: Exit.Exit<unknown, unknown>): Effect.Effect<never, LeaseLost> => {
  const own: ReadonlyArray<Cause.Reason<unknown>> = Exit.isFailure(exit)
    ? exit.cause.reasons.filter((reason) => !Cause.isInterruptReason(reason))
      .map((reason) => Cause.isDieReason(reason) ? Cause.makeFailReason(reason.defect) : reason)
    : []
  return Effect.failCause(
    Cause.combine(
      Cause.fail(term.loss!),
      Cause.fromReasons(own as ReadonlyArray<unknown> as ReadonlyArray<Cause.Reason<never>>)
    )
  )
}

const howToLeave = (term: Term, exit: Exit.Exit<unknown, unknown>): {
  readonly exit: ExitMode
  readonly interrupted: boolean
  readonly state: Option.Option<Backend.Stored>
} => {
  if (term.handedOff !== undefined) return { exit: "yielded", interrupted: false, state: term.handedOff.state }
  if (Exit.isSuccess(exit) && !term.overran) return { ...term.leaving, interrupted: false }
  return {
    exit: "abandoned",
    interrupted: term.overran || (Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause)),
    state: Option.none()
  }
}

/** Ends the work at a safe point: its guard interrupts it, and the calling fiber stops here even without one. */
const endHere = (term: Term, state: Option.Option<Backend.Stored>): Effect.Effect<never> =>
  Effect.suspend(() => {
    if (term.loss !== undefined) return noReturn
    // Without effect where the work has ended already: in a transaction that has committed since, say.
    term.handOff(state)
    return stopHere
  })

const stopHere: Effect.Effect<never> = Effect.withFiber((fiber) => {
  fiber.interruptUnsafe(fiber.id)
  return noReturn
})

/** Interruptible even in an uninterruptible region, so that nothing outlives a lost lease by catching its errors. */
const noReturn: Effect.Effect<never> = Effect.interruptible(Effect.never)

const makeToken = (term: Term, expiresAt: number): Token<any> => {
  const token = Object.freeze({
    workId: term.workId,
    holderId: term.holderId,
    fencingToken: term.fencingToken,
    expiresAt
  }) as unknown as Token<any>
  terms.set(token, term)
  return token
}

const encodeFinal = (
  term: Term,
  state: ReadonlyArray<unknown>
): Effect.Effect<Option.Option<Backend.Stored>, CheckpointEncodeError | CheckpointTooLarge> =>
  state.length === 0 || state[0] === undefined
    ? Effect.succeedNone
    : Effect.asSome(term.codec.encode(state[0]))

const decodeState = (
  codec: Codec,
  state: Option.Option<Backend.Stored>
): Effect.Effect<Option.Option<any>, CheckpointDecodeError> =>
  Option.match(state, {
    onNone: () => Effect.succeedNone,
    onSome: codec.decode
  })

const decodePrior = (codec: Codec, prior: Backend.StoredPrior): Effect.Effect<Prior<any>, CheckpointDecodeError> =>
  Effect.map(decodeState(codec, prior.state), (state) => ({
    state,
    exit: Option.match(prior.term, { onNone: () => "none" as const, onSome: (term) => term.exit }),
    holderId: Option.map(prior.term, (term) => term.holderId),
    fencingToken: Option.map(prior.term, (term) => term.fencingToken),
    termsWithoutProgress: prior.termsWithoutProgress
  }))

const codecOf = (work: Work.Input, context: Context.Context<never>): Codec => {
  const workId = workIdOf(work)
  const checkpoint = typeof work === "string" ? undefined : work.work.checkpoint
  if (checkpoint === undefined) {
    return {
      encode: () =>
        Effect.fail(new CheckpointEncodeError({ workId, issue: "This work has no checkpoint. Give Work.make one" })),
      decode: () => Effect.succeedNone
    }
  }
  // What the codec needs is taken from where the lease was taken; what changes since, from where it is used.
  const provide = <A, E>(effect: Effect.Effect<A, E, any>): Effect.Effect<A, E> =>
    Effect.updateContext(
      effect as Effect.Effect<A, E>,
      (current: Context.Context<never>) => Context.merge(context, current)
    )
  return {
    encode: (state) => provide(checkpoint.encode(workId, state as never)),
    decode: (stored) => Effect.asSome(provide(checkpoint.decode(workId, stored)))
  }
}

const workIdOf = (work: Work.Input): string => typeof work === "string" ? work : work.value

const validate = (work: Work.Input): Effect.Effect<string, InvalidWorkId> => {
  const workId = workIdOf(work)
  const why = faultOf(workId)
  return why === undefined ? Effect.succeed(workId) : Effect.fail(new InvalidWorkId({ workId, why }))
}

const maxIdBytes = 512

const utf8Encoder = new TextEncoder()

const faultOf = (id: string): InvalidWorkId["why"] | undefined => {
  if (id.length === 0) return "Empty"
  if (id.includes("\0")) return "ContainsNul"
  if (/\p{Surrogate}/u.test(id)) return "LoneSurrogate"
  // No string has fewer UTF-8 bytes than UTF-16 units.
  if (id.length > maxIdBytes || utf8Encoder.encode(id).byteLength > maxIdBytes) return "TooLong"
  return undefined
}
