import { Effect, type Layer, type Option, type Scope, type Stream } from "effect"
import { type Lease, Pool, Work } from "worklease"
import type * as Err from "worklease/LeaseError"
import { type A, check, type E, type IsAny, type R, type Same } from "./assert.ts"
import { type Dec, type Enc, MyErr, Plain, type State, type Svc, W } from "./fixtures.ts"

declare const keys: Effect.Effect<ReadonlyArray<string>, MyErr, Svc>
declare const keyStream: Stream.Stream<Set<string>, MyErr, Svc>

// ---- the work knows its state and its key; what it fails with is nobody else's
const p1 = Pool.make({
  work: W,
  keys: ["a"],
  run: (work, key) => {
    check<Same<typeof work, Lease.Lease<State>>>()
    check<Same<typeof key, string>>()
    return Effect.andThen(work.checkpoint({ completed: [], secret: "" }), Effect.fail(new MyErr()))
  }
})
check<Same<A<typeof p1>, Pool.Pool>>()
check<Same<E<typeof p1>, Err.InvalidConfig>>()
check<Same<R<typeof p1>, Scope.Scope | Lease.Leases | Dec | Enc>>()

// ---- it needs what the work and its keys need, but for the lease
declare const task: Effect.Effect<void, MyErr, Svc | Lease.CurrentLease>
const p2 = Pool.make({ work: Plain, keys: ["a"], run: () => task })
check<Same<R<typeof p2>, Scope.Scope | Lease.Leases | Svc>>()
const p3 = Pool.make({ work: Plain, keys, run: () => Effect.void })
check<Same<R<typeof p3>, Scope.Scope | Lease.Leases | Svc>>()
check<Same<E<typeof p3>, Err.InvalidConfig>>()
const p4 = Pool.make({ work: Plain, keys: keyStream, run: () => Effect.void })
check<Same<R<typeof p4>, Scope.Scope | Lease.Leases | Svc>>()
const p5 = Pool.make({ work: Work.make("w"), keys: new Set(["a"]), run: () => Effect.void, quarantineAfter: Infinity })
check<Same<R<typeof p5>, Scope.Scope | Lease.Leases>>()

// ---- a work without checkpoints has none
const p6 = Pool.make({
  work: Plain,
  keys: [],
  // @ts-expect-error  there is no state to save
  run: (work) => work.checkpoint({ completed: [] })
})
void p6
// @ts-expect-error  a work ID names one unit of work, a pool is for many
const p7 = Pool.make({ work: W.id("a"), keys: [], run: () => Effect.void })
void p7

// ---- each work has a scope of its own
declare const scoped: Effect.Effect<void, never, Svc | Scope.Scope>
const l0 = Pool.layer({ work: Plain, keys: [], run: () => scoped })
check<Same<typeof l0, Layer.Layer<never, Err.InvalidConfig, Lease.Leases | Svc>>>()

// ---- a layer provides nothing, and brings its own scope
const l1 = Pool.layer({ work: W, keys, run: () => task })
check<Same<typeof l1, Layer.Layer<never, Err.InvalidConfig, Lease.Leases | Dec | Enc | Svc>>>()

// ---- status
check<Same<Pool.Pool["status"], Stream.Stream<ReadonlyArray<Pool.Status>>>>()
check<Same<Pool.Pool["shutdown"], Effect.Effect<void>>>()
check<Same<Pool.Status["since"], Option.Option<number>>>()
check<Same<IsAny<R<typeof p1>> | IsAny<E<typeof p1>> | IsAny<A<typeof p1>>, false>>()
