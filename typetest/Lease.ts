import { type Config, type Duration, Effect, type Layer, type Option, type Scope } from "effect"
import { type Backend, Lease } from "worklease"
import type * as Err from "worklease/LeaseError"
import { type A, check, type E, type IsAny, type R, type Same } from "./assert.ts"
import { type Dec, type Enc, type MyErr, Plain, type State, Svc, W } from "./fixtures.ts"

// ---- the single operations have small, exact unions
const acquire = Lease.acquire(W.id("a"))
check<Same<A<typeof acquire>, { readonly token: Lease.Token<State>; readonly prior: Lease.Prior<State> }>>()
check<
  Same<
    E<typeof acquire>,
    | Err.LeaseHeld
    | Err.Quarantined
    | Err.InvalidWorkId
    | Err.WindowExhausted
    | Err.CheckpointDecodeError
    | Err.BackendError
  >
>()
check<Same<R<typeof acquire>, Lease.Leases | Dec | Enc>>()
const waiting = Lease.acquire("x", { wait: true })
check<Same<E<typeof waiting>, Err.Quarantined | Err.InvalidWorkId | Err.WindowExhausted | Err.BackendError>>()
check<Same<R<typeof waiting>, Lease.Leases>>()

const checkpoint = Effect.flatMap(acquire, ({ token }) => Lease.checkpoint(token, { completed: [], secret: "s" }))
check<Same<R<typeof checkpoint>, Lease.Leases | Dec | Enc>>()

declare const token: Lease.Token<string>
// @ts-expect-error  a token cannot be forged
const forged: Lease.Token<string> = { workId: "a", holderId: "h", fencingToken: 1n, expiresAt: 0 }
void forged
// @ts-expect-error  the state of a token is the state of its work
void Lease.checkpoint(token, 1)

const checkpointed = Lease.checkpoint(token, "s")
check<
  Same<
    E<typeof checkpointed>,
    Err.Fenced | Err.LeaseExpired | Err.CheckpointEncodeError | Err.CheckpointTooLarge | Err.BackendError
  >
>()
const read = Lease.readCheckpoint(token)
check<Same<A<typeof read>, Option.Option<string>>>()
check<Same<E<typeof read>, Err.Fenced | Err.CheckpointDecodeError | Err.BackendError>>()
const renewed = Lease.renew(token)
check<Same<E<typeof renewed>, Err.Fenced | Err.LeaseExpired | Err.BackendError>>()
const released = Lease.release(token, "abandoned", "s")
check<
  Same<
    E<typeof released>,
    Err.Fenced | Err.LeaseExpired | Err.CheckpointEncodeError | Err.CheckpointTooLarge | Err.BackendError
  >
>()
// @ts-expect-error  nobody declares that a lease expired
void Lease.release(token, "expired")
const forgotten = Lease.forget(token)
check<Same<E<typeof forgotten>, Err.Fenced | Err.BackendError>>()
const asked = Lease.requestYield("x", { deadline: "1 minute" })
check<Same<A<typeof asked>, boolean>>()
check<Same<E<typeof asked>, Err.InvalidWorkId | Err.BackendError>>()
const lifted = Lease.lift(W.id("a"))
check<Same<A<typeof lifted>, boolean>>()
check<Same<E<typeof lifted>, Err.InvalidWorkId | Err.BackendError>>()
for (const operation of [renewed, read, released, forgotten, asked, lifted]) {
  check<Same<R<typeof operation>, Lease.Leases>>()
}

// ---- prior
declare const prior: Lease.Prior<State>
check<Same<typeof prior.state, Option.Option<State>>>()
check<Same<typeof prior.exit, "finished" | "abandoned" | "retired" | "yielded" | "expired" | "none">>()
check<Same<typeof prior.holderId, Option.Option<string>>>()
check<Same<typeof prior.fencingToken, Option.Option<bigint>>>()
check<Same<typeof prior.termsWithoutProgress, number>>()

// ---- hold: Scope, guard, lost
const held = Effect.gen(function*() {
  const lease = yield* Lease.hold(W.id("a"))
  check<Same<typeof lease, Lease.Lease<State>>>()
  return yield* (yield* Svc).go.pipe(lease.guard)
})
check<Same<R<typeof held>, Lease.Leases | Scope.Scope | Svc | Dec | Enc>>()
check<
  Same<
    E<typeof held>,
    | MyErr
    | Err.LeaseHeld
    | Err.Quarantined
    | Err.InvalidWorkId
    | Err.LeaseLost
    | Err.CheckpointDecodeError
    | Err.BackendError
  >
>()
const plainHeld = Lease.hold(Plain.id("a"), { wait: true, yieldAt: "handOff" })
check<Same<E<typeof plainHeld>, Err.Quarantined | Err.InvalidWorkId | Err.LeaseLost | Err.BackendError>>()
check<Same<A<typeof plainHeld>, Lease.Lease>>()

declare const lease: Lease.Lease<State>
check<Same<typeof lease.lost, Effect.Effect<never, Err.LeaseLost>>>()
check<Same<typeof lease.window, Effect.Effect<Duration.Duration>>>()
check<Same<typeof lease.yieldRequested, Effect.Effect<boolean>>>()
check<Same<typeof lease.awaitYieldRequest, Effect.Effect<void>>>()
const handOff = lease.handOff()
check<Same<A<typeof handOff>, never>>()
check<Same<E<typeof handOff>, Err.CheckpointEncodeError | Err.CheckpointTooLarge>>()
const saved = lease.checkpoint({ completed: [], secret: "" })
check<Same<E<typeof saved>, Err.CheckpointEncodeError | Err.CheckpointTooLarge | Err.BackendError>>()
check<Same<R<typeof saved>, never>>() // the codec's services are those of where the lease was taken
const erased: Lease.Any = lease
void erased

// ---- withLease: both forms, and CurrentLease is removed from the requirements
const body = Effect.gen(function*() {
  const lease = yield* Lease.CurrentLease
  yield* (yield* Svc).go
  return lease.token.fencingToken
})
check<Same<R<typeof body>, Lease.CurrentLease | Svc>>()
const l1 = body.pipe(Lease.withLease("a"))
const l2 = Lease.withLease(body, "a")
const l3 = body.pipe(Lease.withLease("a", { wait: true }))
const l4 = Lease.withLease(body, "a", { wait: true })
check<Same<R<typeof l1>, Lease.Leases | Svc>>()
check<Same<R<typeof l2>, Lease.Leases | Svc>>()
check<Same<A<typeof l1>, bigint>>()
check<
  Same<
    E<typeof l1>,
    MyErr | Err.LeaseHeld | Err.Quarantined | Err.InvalidWorkId | Err.LeaseLost | Err.BackendError
  >
>()
check<Same<E<typeof l2>, E<typeof l1>>>()
check<Same<E<typeof l3>, MyErr | Err.Quarantined | Err.InvalidWorkId | Err.LeaseLost | Err.BackendError>>()
check<Same<E<typeof l4>, MyErr | Err.Quarantined | Err.InvalidWorkId | Err.LeaseLost | Err.BackendError>>()

// ---- layers
check<Same<typeof Lease.layer, Layer.Layer<Lease.Leases, never, Backend.Backend>>>()
const configured = Lease.layerWith({ holderId: "a", ttl: "1 minute", pollInterval: 500 })
check<Same<typeof configured, Layer.Layer<Lease.Leases, Err.InvalidConfig, Backend.Backend>>>()
declare const holderId: Config.Config<string>
const fromConfig = Lease.layerConfig({ holderId })
check<
  Same<
    typeof fromConfig,
    Layer.Layer<Lease.Leases, Err.InvalidConfig | Config.ConfigError, Backend.Backend>
  >
>()

check<IsAny<A<typeof l1>> extends false ? true : false>()
check<IsAny<E<typeof held>> extends false ? true : false>()
