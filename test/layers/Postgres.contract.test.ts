import { Effect, Layer } from "effect"
import * as Postgres from "worklease/layers/Postgres"
import * as BackendContract from "worklease/testing/BackendContract"
import { freshDatabase } from "../support/Postgres.ts"
import * as StoredTime from "../support/StoredTime.ts"

BackendContract.suite("PostgreSQL", {
  layer: Layer.unwrap(
    Effect.map(freshDatabase({ minConnections: 5 }), ({ layer }) => Layer.provideMerge(Postgres.layer, layer))
  ),
  advance: StoredTime.shift,
  raiseToken: StoredTime.raiseToken,
  lock: StoredTime.lock
})

BackendContract.suite("PostgreSQL, serializable by default, on a clock that stands still", {
  layer: Layer.unwrap(Effect.gen(function*() {
    const { layer } = yield* freshDatabase({ serializable: true, minConnections: 5 })
    yield* Effect.provide(StoredTime.installStandingClock, layer)
    return Layer.provideMerge(Postgres.layer, layer)
  })),
  advance: StoredTime.advance,
  setBack: StoredTime.setBack,
  raiseToken: StoredTime.raiseToken,
  lock: StoredTime.lock,
  standsStill: true
})
