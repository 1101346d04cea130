/**
 * The single operations on a token, from which you can build what `Worker` and
 * `withLease` do not offer: acquire, checkpoint, readCheckpoint, renew, release
 * and forget. Nobody renews such a lease for you, and each operation has its
 * own small error type.
 *
 * Runs on PGlite, in a directory: the second half is another start of the same
 * application.
 *
 *     node examples/lease-operations.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Layer, Option, Schema } from "effect"
import assert from "node:assert/strict"
import { mkdtempSync, rmSync } from "node:fs"
import { tmpdir } from "node:os"
import { join } from "node:path"
import { Checkpoint, Lease, Work } from "worklease"
import * as Pglite from "worklease/layers/Pglite"

const Sync = Work.make("sync", Checkpoint.make(Schema.Struct({ cursor: Schema.String })))

const firstStart = Effect.gen(function*() {
  const { prior, token } = yield* Lease.acquire(Sync.id("contacts"))
  assert.equal(prior.exit, "none")
  yield* Console.log(`   acquired, with token ${token.fencingToken}; nobody held it before`)

  yield* Lease.renew(token)
  yield* Lease.checkpoint(token, { cursor: "page-7" })
  assert.deepEqual(yield* Lease.readCheckpoint(token), Option.some({ cursor: "page-7" }))

  // The release may carry the final checkpoint. Said again, it succeeds again; said otherwise, the first stands.
  yield* Lease.release(token, "yielded", { cursor: "page-8" })
  yield* Lease.release(token, "yielded")
  const error = yield* Effect.flip(Lease.release(token, "finished"))
  assert.equal(error._tag, "LeaseExpired")
  yield* Console.log(`   released as yielded; as finished it is too late: ${error._tag}`)
  return token.fencingToken
})

const secondStart = (earlier: bigint) =>
  Effect.gen(function*() {
    const { prior, token } = yield* Lease.acquire(Sync.id("contacts"))
    assert.equal(prior.exit, "yielded")
    assert.deepEqual(prior.state, Option.some({ cursor: "page-8" }))
    assert.deepEqual(prior.fencingToken, Option.some(earlier))
    assert(token.fencingToken > earlier)
    yield* Console.log(`   acquired; the last one ${prior.exit} at ${Option.getOrThrow(prior.state).cursor}`)

    // Ends the term and clears what is stored, but later tokens are larger still.
    yield* Lease.forget(token)
    const again = yield* Lease.acquire(Sync.id("contacts"))
    assert.equal(again.prior.exit, "none")
    assert.deepEqual(again.prior.state, Option.none())
    assert(again.token.fencingToken > token.fencingToken)
    const fenced = yield* Effect.flip(Lease.checkpoint(token, { cursor: "page-9" }))
    assert.equal(fenced._tag, "Fenced")
    yield* Console.log(`   forgotten and taken anew; the old token is ${fenced._tag}`)
  })

const main = Effect.gen(function*() {
  const directory = yield* Effect.acquireRelease(
    Effect.sync(() => mkdtempSync(join(tmpdir(), "worklease-example-"))),
    (directory) => Effect.sync(() => rmSync(directory, { recursive: true }))
  )
  const application = <A, E>(program: Effect.Effect<A, E, Lease.Leases>) =>
    program.pipe(Effect.provide(Lease.layer.pipe(Layer.provide(Pglite.layerWith({ dataDir: directory })))))

  yield* Console.log("The application starts:")
  const earlier = yield* application(firstStart)
  yield* Console.log("It starts again, on the same directory:")
  yield* application(secondStart(earlier))
})

NodeRuntime.runMain(Effect.scoped(main))
