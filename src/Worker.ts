/**
 * One unit of work, from acquire to release, around a work function.
 *
 * **Details**
 *
 * What the caller sees, first match wins:
 *
 * | the work | exit | the caller sees |
 * |---|---|---|
 * | lost its lease | none; `abandoned`, if it can still be said, where the window ran out | `LeaseLost`; its own error stays in the cause |
 * | was asked to yield and reached a checkpoint, or called `handOff` | `yielded` | `Yielded` |
 * | succeeded | `finished`, or as it said with `leaveAs` | its value; `BackendError` if a final state could not be stored |
 * | failed or died | `abandoned` | its error; a failed release never hides it |
 * | was interrupted | `abandoned`, which counts as no attempt | interruption |
 * | overran the deadline of a handoff | `abandoned`, which counts as no attempt | `Yielded` |
 * | has a prior state that cannot be decoded | given back: the work never starts | `CheckpointDecodeError` |
 *
 * Starting costs one round trip, which brings the prior; ending costs one,
 * which carries the final state. The release is sent after the work and its
 * finalizers have ended, and the lease is renewed until then.
 *
 * **Example** (Work that continues where the last holder stopped)
 *
 * ```ts
 * import { Effect, Option, Schema } from "effect"
 * import { Checkpoint, Work, Worker } from "worklease"
 *
 * const Import = Work.make("import", Checkpoint.make(Schema.Struct({ line: Schema.Int })))
 *
 * const run = (file: string, lines: ReadonlyArray<string>) =>
 *   Worker.run(Import.id(file), Effect.fnUntraced(function*(work) {
 *     const start = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.line })
 *     for (let line = start; line < lines.length; line++) {
 *       yield* Effect.log(lines[line])
 *       yield* work.checkpoint({ line: line + 1 })
 *     }
 *   }))
 * ```
 *
 * @since 0.1.0
 */

import * as Effect from "effect/Effect"
import * as Lease from "./Lease.ts"
import type { BackendError, InvalidWorkId, LeaseHeld, LeaseLost, Quarantined, Yielded } from "./LeaseError.ts"
import type * as Work from "./Work.ts"

/**
 * Runs a work function under a lease.
 *
 * **Details**
 *
 * Fails with `LeaseHeld` while somebody else holds the lease, unless it waits;
 * `Quarantined` after `quarantineAfter` terms without progress, where that is set;
 * `LeaseLost` when the lease is lost: the work is then interrupted;
 * `Yielded` when the work was handed over; `CheckpointDecodeError` when the
 * prior state cannot be read; `BackendError` when the lease could not be
 * taken, or a final state not be stored; and with the work's own errors.
 *
 * @category constructors
 * @since 0.1.0
 */
export const run = <const W extends Work.Input, A, EX, R, const Wait extends boolean = false>(
  work: W,
  f: (work: Lease.Lease<Work.State<W>>) => Effect.Effect<A, EX, R>,
  options?: Lease.HoldOptions<Wait>
): Effect.Effect<
  A,
  | EX
  | InvalidWorkId
  | Quarantined
  | BackendError
  | (Wait extends true ? never : LeaseHeld)
  | Work.DecodeError<W>
  | LeaseLost
  | Yielded,
  Lease.Leases | Work.Services<W> | Exclude<R, Lease.CurrentLease>
> =>
  Lease.Leases.use((leases) =>
    leases.run(work, (lease) => Effect.provideService(f(lease), Lease.CurrentLease, lease), options)
  )
