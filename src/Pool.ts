/**
 * Pools: many work IDs of one kind, spread over many processes.
 *
 * Every process that makes a pool of the same name is one of its members, and
 * runs its share of the work IDs. No member is special: each reads what is
 * stored, comes to the same plan as the others, and does its own part of it.
 *
 * **Details**
 *
 * - **Balanced.** Each member has its share by capacity, rounded down or up.
 *   When members or keys come and go, as few work IDs move as can be, and then
 *   nothing moves.
 * - **Handed over, not stolen.** Work that is to move is asked to yield: it
 *   leaves at its next checkpoint, and the receiver, who waits for it, goes on
 *   from there. After `handoffTimeout` it is interrupted.
 * - **Members are leases.** A process that crashes is replaced when its leases
 *   have expired. One with a `memberId` that comes back within one `ttl` finds
 *   its work IDs kept for it.
 * - **Paced.** Work that fails is tried again after a pause, which grows. After
 *   `quarantineAfter` terms without a checkpoint it is left alone, until
 *   `Lease.lift`.
 * - **Frugal.** While nothing changes, a member sends one statement per
 *   `interval`, beside the renewals of what it holds: however many work IDs
 *   there are.
 *
 * Closing the scope shuts the member down: it takes nothing more, asks all its
 * work to yield, and renews the leases until the last of it has ended.
 *
 * **Gotchas**
 *
 * Pools of one name must agree on their options, their `ttl` included. Work
 * that somebody asks to yield with `Lease.requestYield` begins again where the
 * plan has it, which may be the same member: to move work away from a member,
 * shut it down. Work that neither makes checkpoints nor waits for
 * `awaitYieldRequest` cannot be asked: it is interrupted after
 * `handoffTimeout`, each time that it moves.
 *
 * **Example** (Partitions, shared among all processes that run this)
 *
 * ```ts
 * import { Effect, Layer, Option, Schema } from "effect"
 * import { Checkpoint, Lease, Pool, Work } from "worklease"
 * import * as Memory from "worklease/layers/Memory"
 *
 * const Partition = Work.make("partition", Checkpoint.make(Schema.Struct({ offset: Schema.Int })))
 *
 * const Partitions = Pool.layer({
 *   work: Partition,
 *   keys: ["0", "1", "2", "3"],
 *   run: Effect.fnUntraced(function*(work) {
 *     let offset = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.offset })
 *     while (true) {
 *       yield* Effect.sleep("1 second")
 *       offset++
 *       yield* work.checkpoint({ offset })
 *     }
 *   })
 * })
 *
 * const program = Layer.launch(Partitions.pipe(Layer.provide(Lease.layer), Layer.provide(Memory.layer)))
 * ```
 *
 * @since 0.1.0
 */

import type * as Duration from "effect/Duration"
import type * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import type * as Option from "effect/Option"
import type * as Scope from "effect/Scope"
import type * as Stream from "effect/Stream"
import * as internal from "./internal/pool.ts"
import type { CurrentLease, Lease, Leases } from "./Lease.ts"
import type { InvalidConfig } from "./LeaseError.ts"
import type * as Renewal from "./Renewal.ts"
import type * as Work from "./Work.ts"

/**
 * The runtime type identifier of pools.
 *
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = internal.TypeId

/**
 * The type-level identifier of pools.
 *
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~worklease/Pool"

/**
 * How one work ID of a pool stands, as this process knows it.
 *
 * **Details**
 *
 * Of its own work IDs a process knows at once, of the others' as of when it
 * has read last, which it does in the round after something has changed.
 *
 * @category models
 * @since 0.1.0
 */
export interface Status {
  readonly key: string
  /** The work ID of the key, as `work.id(key)` of the pool's `work` makes it: `<name of the work>:<key>`. */
  readonly workId: string
  /**
   * - `waiting`: nobody holds it. It pauses after a failure, is kept for who
   *   comes back, is being taken, or exceeds the capacities.
   * - `running`: somebody holds it.
   * - `yielding`: this process holds it, and has asked its work to hand over.
   * - `idle`: it has finished, and will run again.
   * - `finished`: it has finished, and will not run again.
   * - `retired`: it is done for good.
   * - `quarantined`: it is left alone until `Lease.lift`, for the reason in `why`.
   */
  readonly state: "waiting" | "running" | "yielding" | "idle" | "finished" | "retired" | "quarantined"
  /** Who holds it, if somebody does. */
  readonly holderId: Option.Option<string>
  /** Since when that one holds it, in milliseconds since the epoch, by the backend's clock. */
  readonly since: Option.Option<number>
  /** How many terms in a row have ended without a new checkpoint, as `expired` or `abandoned` and not interrupted. */
  readonly termsWithoutProgress: number
  /** Why it is quarantined, if it is. */
  readonly why: Option.Option<string>
}

/**
 * A process's membership in a pool.
 *
 * @category models
 * @since 0.1.0
 */
export interface Pool {
  readonly [TypeId]: TypeId
  /**
   * How all work IDs stand, in their order: first as it is now, and then
   * whenever it changes. Who consumes slowly skips changes, and gets the latest.
   * It ends when the pool has shut down.
   */
  readonly status: Stream.Stream<ReadonlyArray<Status>>
  /**
   * Takes nothing more, asks all work to yield, and ends when the last of it
   * has ended and everything is released. Work that does not yield is
   * interrupted after `handoffTimeout`; its finalizers are waited for. Called
   * again, it waits for the same. Who waits may be interrupted, as the pool's own
   * work is that calls it: the shutdown goes on.
   */
  readonly shutdown: Effect.Effect<void>
}

/**
 * Options of a pool.
 *
 * **Details**
 *
 * Durations are positive, and finite but for `idleGrace`; a number is
 * milliseconds.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options<W extends Work.Any, A, EX, R, EK, RK> {
  /** Its checkpoints are those of the pool's work IDs, which are `work.id(key)`. */
  readonly work: W
  /**
   * Pools of the same name share their members, whose leases have the work IDs
   * `name/member:0`, `name/member:1`, and so on. At most 498 UTF-8 bytes.
   * Defaults to the name of the work.
   */
  readonly name?: string | undefined
  /**
   * The keys of the work IDs: an iterable or an effect, which are read in each
   * round, or a stream, whose latest element counts. When reading them fails,
   * or takes longer than one `ttl`, that is logged, and those that were known
   * last stand; a round waits for them for one `interval` at the most. A key whose
   * work ID is invalid is logged, and left out.
   *
   * A key that is added is run by one of the members that know it; one that is
   * removed is asked to yield.
   */
  readonly keys: Iterable<string> | Effect.Effect<Iterable<string>, EK, RK> | Stream.Stream<Iterable<string>, EK, RK>
  /**
   * The work of one work ID, as `Worker.run` runs it. When it succeeds, the
   * work ID has finished; when it fails, that is logged, and it is run again
   * after a pause, by this or another member. It has a scope of its own, which
   * closes before its lease is released.
   */
  readonly run: (work: Lease<Work.State<W>>, key: string) => Effect.Effect<A, EX, R>
  /**
   * A stable identity, such as the name of a StatefulSet's pod, unique among
   * the members. A member that leaves in good order and comes back within one
   * `ttl` gets its work IDs again; for so long nobody runs them, also where it
   * does not come back. Defaults to none: what a member leaves is shared among
   * the others at once.
   */
  readonly memberId?: string | undefined
  /**
   * How many work IDs this process has at once at the most, and its weight: a
   * member with twice the capacity of another has twice its share. An integer
   * from 1 to 1,000,000. Defaults to 10,000.
   */
  readonly capacity?: number | undefined
  /**
   * For how long work that has been asked to yield may go on before it is
   * interrupted. A shutdown takes as long at the most, beside the finalizers of
   * the work: stay below the time that your platform grants, which for a pod of
   * Kubernetes is 30 seconds unless you say otherwise. Defaults to 30 seconds.
   */
  readonly handoffTimeout?: Duration.Input | undefined
  /** How long a round is, ±10 %. Defaults to a tenth of the policy's `ttl`. */
  readonly interval?: Duration.Input | undefined
  /**
   * After how many terms in a row without a new checkpoint a work ID is left
   * alone, until `Lease.lift`. An integer from 1 to 1,000,000, or `Infinity` for
   * never. Defaults to 5.
   */
  readonly quarantineAfter?: number | undefined
  /** How long after it has finished a work ID runs again. Defaults to never. */
  readonly rerunAfter?: Duration.Input | undefined
  /**
   * How long before it runs again a finished work ID counts as its last
   * member's load, and so runs there again. Before that, it is nobody's.
   * Defaults to 1 minute.
   */
  readonly idleGrace?: Duration.Input | undefined
  /** The renewal policy of the pool's leases, made by `Renewal.make`. Defaults to the one of the `Leases` layer. */
  readonly policy?: Renewal.Policy | undefined
}

/**
 * Joins a pool, and takes part in it until the scope closes.
 *
 * **Details**
 *
 * It returns at once: it joins in the background, and goes on to try while the
 * backend is out of reach. Fails with `InvalidConfig`, naming the field: `name`
 * also where this process is a member of that pool already, until that
 * membership has shut down.
 *
 * What fails or finds no room is logged as a warning, with the annotation
 * `module` set to `worklease/Pool`; a shutdown, and what is well again, is
 * logged as information.
 *
 * Work runs with the services that are there when the pool is made, and may
 * read its lease from `CurrentLease`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const make: <W extends Work.Any, A, EX, R, EK = never, RK = never>(
  options: Options<W, A, EX, R, EK, RK>
) => Effect.Effect<
  Pool,
  InvalidConfig,
  Scope.Scope | Leases | Work.Services<W> | RK | Exclude<R, CurrentLease | Scope.Scope>
> = internal.make as never

/**
 * Takes part in a pool for as long as the layer lives. It provides nothing.
 *
 * **Details**
 *
 * Fails with `InvalidConfig`, as {@link make} does.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer = <W extends Work.Any, A, EX, R, EK = never, RK = never>(
  options: Options<W, A, EX, R, EK, RK>
): Layer.Layer<
  never,
  InvalidConfig,
  Leases | Work.Services<W> | Exclude<RK, Scope.Scope> | Exclude<R, CurrentLease | Scope.Scope>
> => Layer.effectDiscard(make(options)) as never
