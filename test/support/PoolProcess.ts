/**
 * Processes of a pool over one backend, and what is at work in each.
 */
import { Effect, Exit, type Fiber, Layer, Option, Schema, Scope, Stream } from "effect"
import { TestClock } from "effect/testing"
import { Backend, Checkpoint, Lease, Pool, Work } from "worklease"

export const Partition = Work.make("partition", Checkpoint.make(Schema.Struct({ offset: Schema.Int })))

export const keysOf = (count: number, from = 0): ReadonlyArray<string> =>
  Array.from({ length: count }, (_, index) => `${from + index}`.padStart(5, "0"))

export interface Process {
  readonly pool: Pool.Pool
  readonly holderId: string
  /** The keys that are at work. */
  readonly working: Set<string>
  /** The keys that have begun, in order. */
  readonly begun: Array<string>
  readonly status: Effect.Effect<ReadonlyArray<Pool.Status>>
  /** Begins to shut it down, as the end of the process does. */
  readonly close: Effect.Effect<Fiber.Fiber<void>>
}

export type Run = (work: Lease.Lease<{ readonly offset: number }>, key: string) => Effect.Effect<unknown, unknown>

/** Makes a checkpoint every 100 milliseconds. */
export const counting: Run = Effect.fnUntraced(function*(work) {
  let offset = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.offset })
  while (true) {
    yield* Effect.sleep("100 millis")
    yield* work.checkpoint({ offset: ++offset })
  }
})

type Options = Partial<Pool.Options<typeof Partition, unknown, unknown, never, unknown, never>>

/** Leaves as soon as it is asked to. */
export const untilAsked: Run = (work) => Effect.andThen(work.awaitYieldRequest, work.handOff({ offset: 1 }))

/** Starts a process. It ends with the scope, at the latest. */
export const start = Effect.fnUntraced(function*(
  holderId: string,
  { run = counting, ...options }: Options & { readonly lease?: Omit<Lease.LayerOptions, "holderId"> } = {}
) {
  const scope = yield* Scope.make()
  // Its shutdown takes time, and nobody else lets it pass any more.
  yield* Effect.addFinalizer(() =>
    Effect.gen(function*() {
      const closing = yield* Effect.forkDetach(Scope.close(scope, Exit.void), { startImmediately: true })
      while (closing.pollUnsafe() === undefined) yield* TestClock.adjust("1 second")
    })
  )
  const working = new Set<string>()
  const begun: Array<string> = []
  const leases = yield* Layer.buildWithScope(Lease.layerWith({ holderId, ...options.lease }), scope)
  const pool = yield* Pool.make({
    work: Partition,
    keys: keysOf(10),
    ...options,
    run: (work, key) =>
      Effect.acquireUseRelease(
        Effect.sync(() => {
          working.add(key)
          begun.push(key)
        }),
        () => run(work, key),
        () => Effect.sync(() => working.delete(key))
      )
  }).pipe(Effect.provideContext(leases), Scope.provide(scope))
  const process: Process = {
    pool,
    holderId,
    working,
    begun,
    status: Effect.map(Stream.runHead(pool.status), Option.getOrThrow),
    close: Effect.forkDetach(Scope.close(scope, Exit.void), { startImmediately: true })
  }
  return process
})

/** Counts the statements of each operation, whoever sends them. */
export const counted = (counts: Map<string, number>): Layer.Layer<Backend.Backend, never, Backend.Backend> =>
  Layer.effect(
    Backend.Backend,
    Effect.map(Backend.Backend, (backend) => {
      const count =
        <A extends ReadonlyArray<any>, B>(operation: string, call: (...args: A) => B) => (...args: A): B => {
          counts.set(operation, (counts.get(operation) ?? 0) + 1)
          return call(...args)
        }
      return Backend.Backend.of({
        ...backend,
        acquire: count("acquire", backend.acquire),
        renew: count("renew", backend.renew),
        checkpoint: count("checkpoint", backend.checkpoint),
        release: count("release", backend.release),
        inspect: count("inspect", backend.inspect)
      })
    })
  )
