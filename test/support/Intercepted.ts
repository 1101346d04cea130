/**
 * The memory backend, with a hook before each batch: to count, delay, fail or
 * withhold what is sent.
 */
import { Context, Effect, Layer } from "effect"
import type { NonEmptyReadonlyArray } from "effect/Array"
import { Backend } from "worklease"
import * as Memory from "worklease/layers/Memory"
import { BackendError, Unreachable } from "worklease/LeaseError"

export type Operation = "acquire" | "renew" | "checkpoint" | "release"

export interface Sent {
  readonly operation: Operation
  readonly items: ReadonlyArray<Backend.Term | Backend.AcquireRequest>
}

type Hook = <A>(call: Effect.Effect<A, BackendError>, sent: Sent) => Effect.Effect<A, BackendError>

export class Intercepted extends Context.Service<Intercepted, {
  /** Every batch that was sent, in order, whatever the hook did with it. */
  readonly log: Array<Sent>
  /** Replaces what happens to a batch from now on. */
  readonly intercept: (hook: Hook) => Effect.Effect<void>
  /** Ends that. */
  readonly restore: Effect.Effect<void>
}>()("test/Intercepted") {}

export const layer: Layer.Layer<Intercepted | Backend.Backend> = Layer.effectContext(
  Effect.map(Backend.Backend, (backend) => {
    const log: Array<Sent> = []
    const pass: Hook = (call) => call
    let hook = pass
    const batch = <Request extends Backend.Term | Backend.AcquireRequest, Reply>(
      operation: Operation,
      send: Backend.Batch<Request, Reply>
    ): Backend.Batch<Request, Reply> =>
    (requests: NonEmptyReadonlyArray<Request>) =>
      Effect.suspend(() => {
        const sent = { operation, items: requests }
        log.push(sent)
        return hook(send(requests), sent)
      })
    return Context.make(
      Backend.Backend,
      Backend.Backend.of({
        ...backend,
        acquire: batch("acquire", backend.acquire),
        renew: batch("renew", backend.renew),
        checkpoint: batch("checkpoint", backend.checkpoint),
        release: batch("release", backend.release)
      })
    ).pipe(Context.add(
      Intercepted,
      Intercepted.of({
        log,
        intercept: (next) =>
          Effect.sync(() => {
            hook = next
          }),
        restore: Effect.sync(() => {
          hook = pass
        })
      })
    ))
  })
).pipe(Layer.provide(Memory.layer))

export const unreachable = (operation: string, outcome: "rejected" | "unknown"): BackendError =>
  new BackendError({ operation, outcome, reason: new Unreachable({}) })
