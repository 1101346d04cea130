import { assert, describe, it } from "@effect/vitest"
import { ConfigProvider, Duration, Effect } from "effect"
import { Lease, Renewal } from "worklease"
import * as Memory from "worklease/layers/Memory"

describe("Renewal", () => {
  it.effect("derives what is not given from the ttl", () =>
    Effect.gen(function*() {
      const policy = yield* Renewal.make()
      assert.strictEqual(Duration.toMillis(policy.ttl), 30_000)
      assert.strictEqual(Duration.toMillis(policy.renewEvery), 10_000)
      assert.strictEqual(Duration.toMillis(policy.safetyMargin), 3_000)
      assert.strictEqual(Duration.toMillis(policy.operationTimeout), 5_000)
      const shorter = yield* Renewal.make({ ttl: "6 seconds" })
      assert.strictEqual(Duration.toMillis(shorter.renewEvery), 2_000)
    }))

  const refused: ReadonlyArray<readonly [why: string, options: Renewal.Options, field: string]> = [
    ["a ttl of 0", { ttl: 0 }, "ttl"],
    ["a negative ttl", { ttl: -1 }, "ttl"],
    ["a ttl that is not a number", { ttl: NaN }, "ttl"],
    ["an infinite ttl", { ttl: Infinity }, "ttl"],
    ["a ttl that is no duration", { ttl: "soon" as "1 second" }, "ttl"],
    ["a ttl below 10 ms", { ttl: 9 }, "ttl"],
    ["a renewal interval of 0", { renewEvery: 0 }, "renewEvery"],
    ["an infinite renewal interval", { renewEvery: Infinity }, "renewEvery"],
    ["a renewal interval as long as the ttl", { ttl: "10 seconds", renewEvery: "10 seconds" }, "renewEvery"],
    ["a renewal interval that leaves no time for a renewal", { ttl: 1000, renewEvery: 740 }, "renewEvery"],
    ["a negative safety margin", { safetyMargin: -5 }, "safetyMargin"],
    ["a safety margin that takes up the ttl", { ttl: 1000, safetyMargin: 900 }, "safetyMargin"],
    ["an operation timeout of 0", { operationTimeout: 0 }, "operationTimeout"],
    ["an operation timeout longer than the ttl", { ttl: 1000, operationTimeout: 2000 }, "operationTimeout"],
    ["a ttl that is too short for the rest", { ttl: 1000, renewEvery: 400, operationTimeout: 500 }, "operationTimeout"]
  ]
  for (const [why, options, field] of refused) {
    it.effect(`refuses ${why}, naming ${field}`, () =>
      Effect.gen(function*() {
        const error = yield* Effect.flip(Renewal.make(options))
        assert.strictEqual(error._tag, "InvalidConfig")
        assert.strictEqual(error.field, field)
        assert.include(error.message, field)
        assert.throws(() => Renewal.makeUnsafe(options), new RegExp(field))
        // The layer refuses it just so.
        const fromLayer = yield* Effect.flip(Effect.provide(Effect.void, Lease.layerWith(options)))
        assert.deepStrictEqual(fromLayer, error)
      }).pipe(Effect.provide(Memory.layer)))
  }

  it.effect("accepts a ttl of exactly 10 ms", () => Effect.asVoid(Renewal.make({ ttl: 10 })))

  it.effect("reads a policy from configuration", () =>
    Effect.gen(function*() {
      const provide = (env: Record<string, string>) =>
        Effect.provide(ConfigProvider.layer(ConfigProvider.fromEnv({ env })))
      const policy = yield* Effect.suspend(() => Renewal.config()).pipe(provide({ TTL: "1 minute" }))
      assert.strictEqual(Duration.toMillis(policy.renewEvery), 20_000)
      const none = yield* Effect.suspend(() => Renewal.config()).pipe(provide({}))
      assert.strictEqual(Duration.toMillis(none.ttl), 30_000)
      const error = yield* Effect.flip(
        Effect.suspend(() => Renewal.config()).pipe(provide({ TTL: "1 minute", RENEW_EVERY: "1 minute" }))
      )
      assert.strictEqual(error._tag, "ConfigError")
      assert.include(error.message, "renewEvery")
    }))

  it.effect("refuses a holder ID or poll interval that cannot work, naming the field", () =>
    Effect.gen(function*() {
      const holderId = yield* Effect.flip(Effect.provide(Effect.void, Lease.layerWith({ holderId: "" })))
      assert.strictEqual(holderId.field, "holderId")
      const pollInterval = yield* Effect.flip(Effect.provide(Effect.void, Lease.layerWith({ pollInterval: 0 })))
      assert.strictEqual(pollInterval.field, "pollInterval")
    }).pipe(Effect.provide(Memory.layer)))
})
