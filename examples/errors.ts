/**
 * Errors: one tag per thing that you would do differently, in the types of
 * what fails with them, and serialisable.
 *
 * Runs on the memory backend, and on a PostgreSQL that is not there.
 *
 *     node examples/errors.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { PgClient } from "@effect/sql-pg"
import { Console, Duration, Effect, Layer, Redacted, Schema } from "effect"
import assert from "node:assert/strict"
import { Lease, LeaseError, Worker } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import { TestBackend } from "worklease/testing"

/** What a scheduler may want to know of one run. */
const outcome = (workId: string) =>
  Worker.run(workId, () => Effect.succeed("done")).pipe(
    Effect.catchTags({
      LeaseHeld: (error) => Effect.succeed(`come back in ${Math.ceil(Duration.toSeconds(error.retryAfter))} s`),
      Yielded: () => Effect.succeed("somebody else continues"),
      LeaseLost: (error) => Effect.succeed(`stopped: ${error.reason._tag}`),
      BackendError: (error) => Effect.succeed(`${error.outcome}: ${error.reason._tag}`)
    }),
    // What is left is wrong in the program: an invalid work ID, or work that an operator has to look at.
    Effect.catchTag(["InvalidWorkId", "Quarantined"], (error) => Effect.succeed(`alarm: ${error.message}`))
  )

const onMemory = Effect.gen(function*() {
  assert.equal(yield* outcome("job"), "done")
  const alarm = yield* outcome("")
  assert.match(alarm, /^alarm: Work ID "" is invalid: it is empty/)
  yield* Console.log(alarm)

  const { token } = yield* Lease.acquire("job").pipe(Effect.provide(Lease.layerWith({ holderId: "other" })))
  const refused = yield* outcome("job")
  assert.match(refused, /^come back in \d+ s$/)
  yield* Console.log(refused)

  // Errors are values of schemas: they survive a queue, a log and an HTTP response.
  const held = yield* Effect.flip(Lease.acquire("job"))
  assert(held._tag === "LeaseHeld")
  const codec = Schema.fromJsonString(Schema.toCodecJson(LeaseError.LeaseHeld))
  const json = yield* Schema.encodeEffect(codec)(held)
  assert.deepEqual(yield* Schema.decodeEffect(codec)(json), held)
  yield* Console.log(json)

  // A reason can be caught by itself.
  yield* Lease.release(token, "finished")
  const backend = yield* TestBackend.TestBackend
  yield* backend.sever("cut off")
  const unreachable = yield* Lease.acquire("job").pipe(
    Effect.provide(Lease.layerWith({ holderId: "cut off" })),
    Effect.catchReason("BackendError", "Unreachable", (reason) => Effect.succeed(reason._tag))
  )
  assert.equal(unreachable, "Unreachable")
}).pipe(Effect.provide(Lease.layer.pipe(Layer.provideMerge(TestBackend.layer))))

const onNothing = outcome("job").pipe(
  Effect.provide(
    Lease.layer.pipe(
      Layer.provide(Postgres.layerStorage({})),
      Layer.provide(PgClient.layer({ url: Redacted.make("postgres://postgres@127.0.0.1:1/postgres") }))
    )
  )
)

NodeRuntime.runMain(Effect.gen(function*() {
  yield* onMemory
  const answer = yield* onNothing
  assert.equal(answer, "rejected: Unreachable")
  yield* Console.log(answer)
}))
