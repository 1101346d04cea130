import { Layer } from "effect"
import * as Redis from "worklease/layers/Redis"
import * as BackendContract from "worklease/testing/BackendContract"
import { advance, freshServer, isTested, raiseToken, setBack, shift, standingClock } from "../support/Redis.ts"

if (isTested) {
  BackendContract.suite("Redis", {
    layer: Layer.provideMerge(Redis.layer, freshServer),
    advance: shift,
    raiseToken
  })

  BackendContract.suite("Redis, on a clock that stands still", {
    layer: Layer.provideMerge(Redis.layer, standingClock.pipe(Layer.provide(freshServer))),
    advance,
    setBack,
    raiseToken,
    standsStill: true
  })
}
