import { it } from "@effect/vitest"
import { Layer } from "effect"
import { randomUUID } from "node:crypto"
import * as Redis from "worklease/layers/Redis"
import * as BackendContract from "worklease/testing/BackendContract"
import { freshServer, isTested, storeOf } from "../support/Redis.ts"

if (isTested) {
  // A server that was named may have been used before.
  const [moving, standing] = [`worklease-${randomUUID()}`, `worklease-${randomUUID()}`]
  const { raiseToken, shift } = storeOf(moving)
  const clock = storeOf(standing)

  BackendContract.suite("Redis", {
    layer: Layer.provideMerge(Redis.layerWith({ prefix: moving }), freshServer),
    advance: shift,
    raiseToken
  })

  BackendContract.suite("Redis, on a clock that stands still", {
    layer: Layer.provideMerge(
      Redis.layerWith({ prefix: standing }),
      Layer.provide(clock.standingClock, freshServer)
    ),
    advance: clock.advance,
    setBack: clock.setBack,
    raiseToken: clock.raiseToken,
    standsStill: true
  })
} else {
  it.skip("Redis: there is none here", () => {})
}
