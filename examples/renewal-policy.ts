/**
 * The renewal policy: from options, for one piece of work, from configuration,
 * and how a wrong one is refused.
 *
 * Runs on the memory backend.
 *
 *     node examples/renewal-policy.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Config, ConfigProvider, Console, Duration, Effect, Layer } from "effect"
import assert from "node:assert/strict"
import { Lease, Renewal, Worker } from "worklease"
import * as Memory from "worklease/layers/Memory"

const fields = ["ttl", "renewEvery", "safetyMargin", "operationTimeout"] as const

const show = (policy: Renewal.Policy) =>
  fields.map((field) => `${field} ${Math.round(Duration.toMillis(policy[field]))} ms`).join(", ")

const program = Effect.gen(function*() {
  yield* Console.log(`The defaults: ${show(yield* Renewal.make())}`)

  const patient = Renewal.makeUnsafe({ ttl: "5 minutes", operationTimeout: "10 seconds" })
  yield* Console.log(`For slow work: ${show(patient)}`)
  assert.deepEqual(patient.renewEvery, Duration.seconds(100))

  // A policy for one piece of work; the others keep the one of the layer.
  const window = yield* Worker.run("slow", (work) => work.window, { policy: patient })
  assert(Duration.isGreaterThan(window, Duration.minutes(4)))
  yield* Console.log(`   its worker may rely on its lease for ${Math.round(Duration.toSeconds(window))} s`)

  // From the environment, under the names that you like.
  const environment = ConfigProvider.fromEnv({ env: { LEASE_TTL: "20 seconds", LEASE_SAFETY_MARGIN: "3 seconds" } })
  const configured = yield* Renewal.config().pipe(
    Config.nested("LEASE"),
    Effect.provideService(ConfigProvider.ConfigProvider, environment)
  )
  assert.deepEqual(configured.ttl, Duration.seconds(20))
  assert.deepEqual(configured.safetyMargin, Duration.seconds(3))
  yield* Console.log(`From LEASE_TTL and LEASE_SAFETY_MARGIN: ${show(configured)}`)

  yield* Console.log("Refused:")
  for (
    const options of [
      { ttl: 0 },
      { ttl: "5 millis" },
      { ttl: Number.NaN },
      { ttl: "Infinity" },
      { ttl: "10 seconds", renewEvery: "10 seconds" },
      { ttl: "10 seconds", safetyMargin: "6 seconds" }
    ] satisfies ReadonlyArray<Renewal.Options>
  ) {
    const error = yield* Effect.flip(Renewal.make(options))
    assert.equal(error._tag, "InvalidConfig")
    yield* Console.log(`   ${error.message}`)
  }
})

NodeRuntime.runMain(program.pipe(Effect.provide(Lease.layer.pipe(Layer.provide(Memory.layer)))))
