/** `withLease` can be written by a user, as it is declared, without casts. */
import { Effect } from "effect"
import { dual } from "effect/Function"
import { Lease } from "worklease"
import type * as Err from "worklease/LeaseError"

export const withLease: typeof Lease.withLease = dual(
  (args) => Effect.isEffect(args[0]),
  <A, EX, R, const Wait extends boolean = false>(
    self: Effect.Effect<A, EX, R>,
    workId: string,
    options?: Lease.AcquireOptions<Wait>
  ): Effect.Effect<
    A,
    | EX
    | Err.InvalidWorkId
    | Err.Quarantined
    | Err.BackendError
    | Err.LeaseLost
    | (Wait extends true ? never : Err.LeaseHeld),
    Lease.Leases | Exclude<R, Lease.CurrentLease>
  > =>
    Lease.hold(workId, options).pipe(
      Effect.flatMap((lease) => lease.guard(Effect.provideService(self, Lease.CurrentLease, lease))),
      Effect.scoped
    )
)
