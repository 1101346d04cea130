/**
 * The storage port: a backend is a service like any other, so it can be
 * wrapped. This one counts its calls, and shows that operations of concurrent
 * fibers are gathered into batches: while one statement is on its way, the next
 * batch forms, so 100 workers cost a handful of statements.
 *
 * Runs on PGlite, PostgreSQL inside this process.
 *
 *     node examples/backend-decorator.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Array, Console, Effect, Layer, Schema } from "effect"
import assert from "node:assert/strict"
import { Backend, Checkpoint, Lease, Work, Worker } from "worklease"
import * as Pglite from "worklease/layers/Pglite"

interface Count {
  readonly operation: string
  calls: number
  items: number
}

/** Counts the calls of the operations that take batches. */
const counted = (counts: Record<string, Count>) => {
  const count = <Request, Reply>(
    operation: string,
    send: Backend.Batch<Request, Reply>
  ): Backend.Batch<Request, Reply> =>
  (requests) =>
    Effect.suspend(() => {
      const entry = counts[operation] ??= { operation, calls: 0, items: 0 }
      entry.calls++
      entry.items += requests.length
      return send(requests)
    })
  return Layer.effect(
    Backend.Backend,
    Effect.map(Backend.Backend, (backend) =>
      Backend.Backend.of({
        ...backend,
        acquire: count("acquire", backend.acquire),
        renew: count("renew", backend.renew),
        checkpoint: count("checkpoint", backend.checkpoint),
        release: count("release", backend.release)
      }))
  )
}

const Shard = Work.make("shard", Checkpoint.make(Schema.Struct({ offset: Schema.Int })))

const program = Effect.forEach(
  Array.range(1, 100),
  (key) => Worker.run(Shard.id(String(key)), (work) => work.checkpoint({ offset: key })),
  { concurrency: "unbounded" }
)

NodeRuntime.runMain(Effect.gen(function*() {
  const counts: Record<string, Count> = {}
  yield* Effect.provide(program, Lease.layer.pipe(Layer.provide(counted(counts)), Layer.provide(Pglite.layer)))
  for (const { calls, items, operation } of Object.values(counts)) {
    assert.equal(items, 100)
    assert(calls < 10, `${operation} took ${calls} calls`)
    yield* Console.log(`${operation}: ${items} items in ${calls} ${calls === 1 ? "call" : "calls"}`)
  }
  assert.deepEqual(Object.keys(counts), ["acquire", "checkpoint", "release"])
}))
