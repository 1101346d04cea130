/**
 * The memory backend with faults: a crash is a holder whose calls no longer
 * arrive.
 *
 * Interrupting a fiber is a release, not a crash: the library then still tells
 * the backend how the work left. To test a takeover, `sever` the holder and
 * let the lease expire.
 *
 * **Example** (A takeover under TestClock)
 *
 * ```ts
 * import { Effect, Layer } from "effect"
 * import { TestClock } from "effect/testing"
 * import { Lease, Worker } from "worklease"
 * import { TestBackend } from "worklease/testing"
 *
 * const takeover = Effect.gen(function*() {
 *   const backend = yield* TestBackend.TestBackend
 *   yield* Worker.run("job", () => Effect.never).pipe(
 *     Effect.provide(Lease.layerWith({ holderId: "a" })),
 *     Effect.forkScoped({ startImmediately: true })
 *   )
 *   yield* TestClock.adjust("1 second")
 *   yield* backend.sever("a")
 *   yield* TestClock.adjust("30 seconds")
 *   return yield* Worker.run("job", (work) => Effect.succeed(work.prior.exit)).pipe(
 *     Effect.provide(Lease.layerWith({ holderId: "b" }))
 *   )
 * }).pipe(Effect.scoped, Effect.provide(TestBackend.layer.pipe(Layer.provideMerge(TestClock.layer()))))
 *
 * Effect.runPromise(takeover) // => "expired"
 * ```
 *
 * @since 0.1.0
 */

import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Backend from "../Backend.ts"
import * as Memory from "../layers/Memory.ts"
import { BackendError, Unreachable } from "../LeaseError.ts"

/**
 * Faults between holders and their backend.
 *
 * @category services
 * @since 0.1.0
 */
export class TestBackend extends Context.Service<TestBackend, {
  /**
   * From now on, the holder's calls do not arrive: as if its process had
   * crashed, or its network were cut. They are never answered, except that
   * acquires and releases fail at once as unreachable: the end of severed work
   * needs no more adjusting of the clock.
   */
  readonly sever: (holderId: string) => Effect.Effect<void>
  /** Ends `sever`. Calls that were made meanwhile stay lost. */
  readonly heal: (holderId: string) => Effect.Effect<void>
  /** The holder's next `count` calls are applied, but their replies are lost: they fail with an unknown outcome. */
  readonly loseReplies: (holderId: string, count: number) => Effect.Effect<void>
}>()("worklease/testing/TestBackend") {}

/**
 * Provides the memory backend and its faults. Provide it once, around
 * everything.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer: Layer.Layer<Backend.Backend | TestBackend> = Layer.effectContext(Effect.gen(function*() {
  const backend = yield* Backend.Backend
  const severed = new Set<string>()
  const losing = new Map<string, number>()

  // Waiting for the answers to these cannot be interrupted, so a test that ends would wait for ever.
  const unreachable = (operation: string): Effect.Effect<never, BackendError> =>
    Effect.fail(
      new BackendError({
        operation,
        outcome: "rejected",
        reason: new Unreachable({ cause: new Error("The holder was severed") })
      })
    )

  const faulty = <A>(
    operation: string,
    holderId: string,
    call: Effect.Effect<A, BackendError>,
    whenSevered: Effect.Effect<A, BackendError> = Effect.never
  ): Effect.Effect<A, BackendError> =>
    Effect.suspend(() => {
      if (severed.has(holderId)) return whenSevered
      return Effect.flatMap(call, (reply): Effect.Effect<A, BackendError> => {
        // Severed meanwhile: applied, but never answered.
        if (severed.has(holderId)) return Effect.never
        const count = losing.get(holderId) ?? 0
        if (count === 0) return Effect.succeed(reply)
        losing.set(holderId, count - 1)
        return Effect.fail(
          new BackendError({
            operation,
            outcome: "unknown",
            reason: new Unreachable({ cause: new Error("The reply was lost") })
          })
        )
      })
    })

  /** A batch of one process, whose items therefore have one holder. */
  const batch = <Request extends { readonly holderId: string }, Reply>(
    operation: string,
    send: Backend.Batch<Request, Reply>,
    whenSevered?: Effect.Effect<never, BackendError>
  ) =>
  (requests: NonEmptyReadonlyArray<Request>) =>
    faulty(operation, requests[0].holderId, Effect.suspend(() => send(requests)), whenSevered)

  return Context.make(
    Backend.Backend,
    Backend.Backend.of({
      ...backend,
      acquire: batch("acquire", backend.acquire, unreachable("acquire")),
      renew: batch("renew", backend.renew),
      checkpoint: batch("checkpoint", backend.checkpoint),
      release: batch("release", backend.release, unreachable("release")),
      read: (term) => faulty("readCheckpoint", term.holderId, backend.read(term)),
      forget: (term) => faulty("forget", term.holderId, backend.forget(term))
    })
  ).pipe(
    Context.add(
      TestBackend,
      TestBackend.of({
        sever: (holderId) => Effect.sync(() => void severed.add(holderId)),
        heal: (holderId) => Effect.sync(() => void severed.delete(holderId)),
        loseReplies: (holderId, count) => Effect.sync(() => void losing.set(holderId, count))
      })
    )
  )
})).pipe(Layer.provide(Memory.layer))
