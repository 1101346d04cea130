/**
 * Counts the statements of a backend: one per call of an operation. Those of
 * wake-ups are not among them.
 */
import { Effect, Layer } from "effect"
import { Backend } from "worklease"

export interface Counts {
  statements: number
  /** The leases that they were for. */
  items: number
}

export type Operation = "acquire" | "renew" | "checkpoint" | "release" | "inspect"

export const make = (): Record<Operation, Counts> => ({
  acquire: { statements: 0, items: 0 },
  renew: { statements: 0, items: 0 },
  checkpoint: { statements: 0, items: 0 },
  release: { statements: 0, items: 0 },
  inspect: { statements: 0, items: 0 }
})

/** Wraps the backend below. Each reply is shown to `onReply`, with what it answers. */
export const layer = (
  counts: Record<Operation, Counts>,
  onReply?: (operation: Operation, workId: string, reply: string) => void
) => {
  const count = <Request extends { readonly workId: string }, Reply extends { readonly _tag: string }>(
    operation: Operation,
    send: Backend.Batch<Request, Reply>
  ): Backend.Batch<Request, Reply> =>
  (requests) =>
    Effect.suspend(() => {
      counts[operation].statements++
      counts[operation].items += requests.length
      if (onReply === undefined) return send(requests)
      return Effect.tap(send(requests), (replies) =>
        Effect.sync(() =>
          replies.forEach((reply, index) => onReply(operation, requests[index].workId, reply._tag))
        ))
    })
  return Layer.effect(
    Backend.Backend,
    Effect.map(Backend.Backend, (backend) =>
      Backend.Backend.of({
        ...backend,
        acquire: count("acquire", backend.acquire),
        renew: count("renew", backend.renew),
        checkpoint: count("checkpoint", backend.checkpoint),
        release: count("release", backend.release),
        inspect: (options) =>
          Effect.suspend(() => {
            counts.inspect.statements++
            counts.inspect.items += options.workIds.length
            return backend.inspect(options)
          })
      }))
  )
}
