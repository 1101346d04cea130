/**
 * Checkpoints that change their form while work is on its way: a version that
 * learned a field, a reader of both, and what an old program says of the new
 * version.
 *
 * Runs on the memory backend.
 *
 *     node examples/checkpoint-upgrade.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Layer, Option, Schema } from "effect"
import assert from "node:assert/strict"
import { Checkpoint, Lease, Work, Worker } from "worklease"
import * as Memory from "worklease/layers/Memory"

// The program of last week.
const V1 = Checkpoint.make(Schema.Struct({ offset: Schema.Int }))
const ImportV1 = Work.make("import", V1)

// This week's also remembers what has failed, and when the import began.
const V2 = V1.pipe(
  Checkpoint.upgrade(
    Schema.Struct({
      offset: Schema.Int,
      failed: Schema.Array(Schema.String),
      begun: Schema.OptionFromNullOr(Schema.DateTimeUtc)
    }),
    (v1) => ({ ...v1, failed: [], begun: Option.none() })
  )
)
const ImportV2 = Work.make("import", V2)

const program = Effect.gen(function*() {
  yield* Worker.run(ImportV1.id("orders"), (work) => work.checkpoint({ offset: 100 }))
  yield* Console.log("The old program has stored its version 1: { offset: 100 }")

  yield* Worker.run(ImportV2.id("orders"), (work) => {
    assert.deepEqual(work.prior.state, Option.some({ offset: 100, failed: [], begun: Option.none() }))
    return Effect.andThen(
      Console.log("The new program reads it as", Option.getOrThrow(work.prior.state)),
      work.checkpoint({ offset: 150, failed: ["order 117"], begun: Option.none() })
    )
  })
  yield* Console.log("and has stored its version 2.")

  // Rolled back too early: the old program does not know version 2, and must not guess.
  const error = yield* Effect.flip(Worker.run(ImportV1.id("orders"), () => Effect.die("never runs")))
  assert.equal(error._tag, "CheckpointDecodeError")
  yield* Console.log(`The old program again: ${error.message}`)

  yield* Worker.run(ImportV2.id("orders"), (work) =>
    Effect.sync(() => {
      assert.equal(Option.getOrThrow(work.prior.state).offset, 150)
      assert.equal(work.prior.exit, "finished")
    }))
  yield* Console.log("Nothing was lost by that: the new program goes on at offset 150.")

  const tooLarge = yield* Worker.run(
    Work.make("small", Checkpoint.bytes({ maxBytes: 16 })).id("x"),
    (work) => work.checkpoint(new Uint8Array(17))
  ).pipe(Effect.flip)
  assert.equal(tooLarge._tag, "CheckpointTooLarge")
  yield* Console.log(tooLarge.message)
})

NodeRuntime.runMain(program.pipe(Effect.provide(Lease.layer.pipe(Layer.provide(Memory.layer)))))
