import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer, Option, Schema } from "effect"
import { Checkpoint, Lease, Work, Worker } from "worklease"
import * as Memory from "worklease/layers/Memory"

const V1 = Checkpoint.make(Schema.Struct({ offset: Schema.Int }))
const V2 = V1.pipe(
  Checkpoint.upgrade(
    Schema.Struct({ offset: Schema.Int, failed: Schema.Array(Schema.String) }),
    (previous) => ({ ...previous, failed: [] })
  )
)
const V3 = Checkpoint.upgrade(
  V2,
  Schema.Struct({ cursor: Schema.BigInt, failed: Schema.Array(Schema.String) }),
  (previous) => ({ cursor: BigInt(previous.offset), failed: previous.failed })
)

const text = (bytes: Uint8Array) => new TextDecoder().decode(bytes)

describe("Checkpoint", () => {
  it.effect("stores JSON, and decodes what it stored", () =>
    Effect.gen(function*() {
      const checkpoint = Checkpoint.make(Schema.Struct({ at: Schema.Date, cursor: Schema.BigInt }))
      const state = { at: new Date(5), cursor: 2n ** 70n }
      const stored = yield* checkpoint.encode("w", state)
      assert.strictEqual(stored.version, 1)
      assert.deepStrictEqual(JSON.parse(text(stored.bytes)), {
        at: "1970-01-01T00:00:00.005Z",
        cursor: "1180591620717411303424"
      })
      assert.deepStrictEqual(yield* checkpoint.decode("w", stored), state)
    }))

  it.effect("reads every earlier version through the chain of upgrades, and writes only its own", () =>
    Effect.gen(function*() {
      assert.deepStrictEqual([V1.version, V2.version, V3.version], [1, 2, 3])
      const first = yield* V1.encode("w", { offset: 7 })
      assert.deepStrictEqual(yield* V3.decode("w", first), { cursor: 7n, failed: [] })
      const second = yield* V2.encode("w", { offset: 8, failed: ["x"] })
      assert.deepStrictEqual(yield* V3.decode("w", second), { cursor: 8n, failed: ["x"] })
      const third = yield* V3.encode("w", { cursor: 9n, failed: [] })
      assert.strictEqual(third.version, 3)
      assert.deepStrictEqual(yield* V3.decode("w", third), { cursor: 9n, failed: [] })
    }))

  it.effect("a newer version than the code knows is a typed error which says so", () =>
    Effect.gen(function*() {
      const third = yield* V3.encode("w", { cursor: 9n, failed: [] })
      const error = yield* Effect.flip(V2.decode("w", third))
      assert.strictEqual(error._tag, "CheckpointDecodeError")
      assert.strictEqual(error.version, 3)
      assert.include(error.message, "newer")
    }))

  it.effect("an earlier version without an upgrade is a typed error which says what to add", () =>
    Effect.gen(function*() {
      const checkpoint = Checkpoint.make(Schema.Struct({ offset: Schema.Int }), { version: 4 })
      const error = yield* Effect.flip(checkpoint.decode("w", yield* V1.encode("w", { offset: 7 })))
      assert.include(error.message, "Checkpoint.upgrade")
    }))

  it.effect("no error tells what the checkpoint contains", () =>
    Effect.gen(function*() {
      const secret = "hunter2-swordfish"
      const bytes = new TextEncoder().encode(JSON.stringify({ offset: secret }))
      const mistyped = yield* Effect.flip(V1.decode("w", { version: 1, bytes }))
      assert.include(mistyped.message, "offset")
      const broken = yield* Effect.flip(V1.decode("w", { version: 1, bytes: new TextEncoder().encode(secret) }))
      const notText = yield* Effect.flip(V1.decode("w", { version: 1, bytes: new Uint8Array([0xff, 0xfe]) }))
      const unencodable = yield* Effect.flip(V1.encode("w", { offset: secret as unknown as number }))
      assert.strictEqual(unencodable._tag, "CheckpointEncodeError")
      const throwing = Checkpoint.upgrade(V1, Schema.Struct({}), () => {
        throw new Error(secret)
      })
      const upgrade = yield* Effect.flip(throwing.decode("w", yield* V1.encode("w", { offset: 1 })))
      for (const error of [mistyped, broken, notText, unencodable, upgrade]) {
        assert.notInclude(JSON.stringify(error) + error.message + String(error.stack), secret)
      }
    }))

  it.effect("a state that is too large is refused, with its size and the limit", () =>
    Effect.gen(function*() {
      const small = Checkpoint.make(Schema.Struct({ text: Schema.String }), { maxBytes: 100 })
      // The limit counts bytes, not characters.
      yield* small.encode("w", { text: "x".repeat(89) })
      const error = yield* Effect.flip(small.encode("w", { text: "é".repeat(45) }))
      assert(error._tag === "CheckpointTooLarge")
      assert.deepStrictEqual([error.bytes, error.limit], [101, 100])
      const standard = yield* Effect.flip(
        Checkpoint.make(Schema.String).encode("w", "x".repeat(1024 * 1024))
      )
      assert(standard._tag === "CheckpointTooLarge")
      assert.strictEqual(standard.limit, 1024 * 1024)
    }))

  it.effect("raw bytes are stored as they are", () =>
    Effect.gen(function*() {
      const checkpoint = Checkpoint.bytes()
      const bytes = Uint8Array.from({ length: 256 }, (_, index) => index)
      const stored = yield* checkpoint.encode("w", bytes)
      assert.deepStrictEqual(yield* checkpoint.decode("w", stored), bytes)
    }))

  it("refuses a version or a size limit that is no positive integer, naming the field", () => {
    for (const version of [0, -1, 1.5, NaN, 2 ** 31]) {
      assert.throws(() => Checkpoint.make(Schema.Int, { version }), /Checkpoint\.version/)
    }
    assert.throws(() => Checkpoint.bytes({ maxBytes: 0 }), /Checkpoint\.maxBytes/)
  })

  it.effect("what cannot be encoded or is too large is refused before anything is sent; the work may go on", () =>
    Effect.gen(function*() {
      const work = Work.make("w", Checkpoint.make(Schema.Struct({ text: Schema.String }), { maxBytes: 50 }))
      const errors = yield* Worker.run(work.id("x"), (lease) =>
        Effect.gen(function*() {
          yield* lease.checkpoint({ text: "kept" })
          return [
            yield* Effect.flip(lease.checkpoint({ text: "x".repeat(50) })),
            yield* Effect.flip(lease.checkpoint({ text: 1 as unknown as string })),
            yield* Effect.flip(lease.leaveAs("finished", { text: "x".repeat(50) })),
            yield* Effect.flip(lease.handOff({ text: "x".repeat(50) }))
          ]
        }))
      assert.deepStrictEqual(errors.map((error) => error._tag), [
        "CheckpointTooLarge",
        "CheckpointEncodeError",
        "CheckpointTooLarge",
        "CheckpointTooLarge"
      ])
      const state = yield* Worker.run(work.id("x"), (lease) => Effect.succeed(lease.prior.state))
      assert.deepStrictEqual(state, Option.some({ text: "kept" }))
    }).pipe(Effect.provide(Lease.layer.pipe(Layer.provide(Memory.layer)))))
})
