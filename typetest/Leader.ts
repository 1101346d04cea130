import { Effect, Layer, type Option, Schedule, type Stream } from "effect"
import { Leader, Lease } from "worklease"
import type * as Err from "worklease/LeaseError"
import { type A, check, type E, type IsAny, type R, type Same } from "./assert.ts"
import { type MyErr, Svc } from "./fixtures.ts"

declare const duty: Effect.Effect<number, MyErr, Svc | Lease.CurrentLease>

type Always =
  | MyErr
  | Err.InvalidWorkId
  | Err.Quarantined
  | Err.BackendError
  | Err.LeaseLost
  | Err.Yielded

// ---- one term: data-last and data-first, fail-fast or waiting
const e1 = duty.pipe(Leader.elect("job"))
check<Same<E<typeof e1>, Always | Err.LeaseHeld>>()
check<Same<R<typeof e1>, Lease.Leases | Svc>>()
check<Same<A<typeof e1>, number>>()
const e2 = Leader.elect(duty, "job", { wait: true, onEvent: () => Effect.void })
check<Same<E<typeof e2>, Always>>()
const e3 = duty.pipe(Leader.elect("job", { wait: true }))
check<Same<E<typeof e3>, Always>>()
const e4 = Leader.elect(duty, "job")
check<Same<E<typeof e4>, Always | Err.LeaseHeld>>()

// ---- for ever: whatever else fails, it stands again
const f1 = duty.pipe(Leader.forever("job", { giveUpAfter: { failures: 1, stalledFor: "1 minute" } }))
const f2 = Leader.forever(duty, "job", { retrySchedule: Schedule.spaced("1 second") })
check<Same<E<typeof f1>, Err.InvalidWorkId>>()
check<Same<E<typeof f2>, Err.InvalidWorkId>>()
check<Same<R<typeof f1>, Lease.Leases | Svc>>()
check<Same<typeof f2, Effect.Effect<never, Err.InvalidWorkId, Lease.Leases | Svc>>>()
// @ts-expect-error  it always waits
const f3 = Leader.forever(duty, "job", { wait: false })
void f3

// ---- a layer provides nothing
const l1 = Layer.effect(Svc, Effect.die("not run")).pipe(Leader.layer("job"))
check<Same<typeof l1, Layer.Layer<never, Err.InvalidWorkId, Lease.Leases>>>()
const l2 = Leader.layer(Layer.effectDiscard(duty), "job", {})
check<Same<typeof l2, Layer.Layer<never, Err.InvalidWorkId, Lease.Leases | Svc>>>()

// ---- observing
const o1 = Leader.observe("job")
check<
  Same<
    typeof o1,
    Stream.Stream<Option.Option<Leader.Leader>, Err.InvalidWorkId | Err.BackendError, Lease.Leases>
  >
>()
const h1 = Leader.health("job", { maxAge: "30 seconds" })
check<Same<typeof h1, Effect.Effect<Leader.Health, never, Lease.Leases>>>()
check<Same<typeof Leader.progress, Effect.Effect<void>>>()
const held = Lease.holder("job")
check<
  Same<
    typeof held,
    Effect.Effect<Option.Option<Lease.Holder>, Err.InvalidWorkId | Err.BackendError, Lease.Leases>
  >
>()

check<IsAny<A<typeof e1>> extends false ? true : false>()
check<IsAny<E<typeof f1>> extends false ? true : false>()
check<IsAny<R<typeof l1>> extends false ? true : false>()
