import { Effect, type Option } from "effect"
import { type Lease, Renewal, Worker } from "worklease"
import type * as Err from "worklease/LeaseError"
import { type A, check, type E, type IsAny, type R, type Same } from "./assert.ts"
import { type Dec, type Enc, type MyErr, Plain, type State, Svc, W } from "./fixtures.ts"

// ---- three ways to name the work
const w1 = Worker.run(
  W.id("a"),
  Effect.fnUntraced(function*(work) {
    check<Same<typeof work, Lease.Lease<State>>>()
    const n = yield* (yield* Svc).go
    return [n, work.prior.exit] as const
  })
)
check<
  Same<
    E<typeof w1>,
    | MyErr
    | Err.LeaseHeld
    | Err.Quarantined
    | Err.InvalidWorkId
    | Err.LeaseLost
    | Err.Yielded
    | Err.CheckpointDecodeError
    | Err.BackendError
  >
>()
check<Same<R<typeof w1>, Lease.Leases | Svc | Dec | Enc>>()
check<Same<A<typeof w1>, readonly [number, "none" | "expired" | Lease.ExitMode]>>()

const w2 = Worker.run("nightly", (work) => Effect.as(work.window, work.prior.state))
check<Same<A<typeof w2>, Option.Option<never>>>()
check<
  Same<
    E<typeof w2>,
    Err.LeaseHeld | Err.Quarantined | Err.InvalidWorkId | Err.LeaseLost | Err.Yielded | Err.BackendError
  >
>()
check<Same<R<typeof w2>, Lease.Leases>>()

// ---- nobody is told of a held lease who waits for it
const w3 = Worker.run(Plain.id("x"), () => Effect.void, { wait: true })
check<Same<E<typeof w3>, Err.Quarantined | Err.InvalidWorkId | Err.LeaseLost | Err.Yielded | Err.BackendError>>()

declare const dynamicWait: boolean
const w4 = Worker.run("x", () => Effect.void, { wait: dynamicWait })
check<
  Same<
    E<typeof w4>,
    Err.LeaseHeld | Err.Quarantined | Err.InvalidWorkId | Err.LeaseLost | Err.Yielded | Err.BackendError
  >
>()

declare const dynamicId: string
const w5 = Worker.run(dynamicId, () => Effect.void)
check<Same<R<typeof w5>, Lease.Leases>>()

const policy = Renewal.makeUnsafe({ ttl: "5 minutes" })
const w6 = Worker.run("x", () => Effect.void, { policy, yieldAt: "handOff" })
check<Same<E<typeof w6>, E<typeof w5>>>()
// @ts-expect-error  a policy is a validated value
const w12 = Worker.run("x", () => Effect.void, { policy: { ttl: "5 minutes" } })
void w12

// ---- leaving
const w7 = Worker.run(
  W.id("x"),
  Effect.fnUntraced(function*(lease) {
    if (yield* lease.yieldRequested) return yield* lease.handOff({ completed: [], secret: "" })
    yield* lease.leaveAs("retired", { completed: [], secret: "" })
    return 1
  })
)
check<Same<A<typeof w7>, number>>()
// @ts-expect-error  only a success chooses how it leaves
const w8 = Worker.run("x", (lease) => lease.leaveAs("abandoned"))
void w8

// ---- states
// @ts-expect-error  without a definition, no state can be checkpointed
const w9 = Worker.run("x", (work) => work.checkpoint({ a: 1 }))
void w9
// @ts-expect-error  nor another state than the defined one
const w10 = Worker.run(W.id("x"), (work) => work.checkpoint({ completed: [1] }))
void w10

// ---- the work may read its lease from CurrentLease, which the caller then does not need
declare const readsLease: Effect.Effect<bigint, never, Lease.CurrentLease | Svc>
const w11 = Worker.run("x", () => readsLease)
check<Same<R<typeof w11>, Lease.Leases | Svc>>()

check<IsAny<A<typeof w1>> extends false ? true : false>()
check<IsAny<E<typeof w1>> extends false ? true : false>()
check<IsAny<R<typeof w1>> extends false ? true : false>()
