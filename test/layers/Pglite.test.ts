import { Layer } from "effect"
import * as PgliteClient from "worklease/layers/PgliteClient"
import * as Postgres from "worklease/layers/Postgres"
import * as BackendContract from "worklease/testing/BackendContract"
import * as StoredTime from "../support/StoredTime.ts"

BackendContract.suite("PGlite", {
  layer: Postgres.layer.pipe(
    Layer.provideMerge(Layer.effectDiscard(StoredTime.installStandingClock)),
    Layer.provideMerge(PgliteClient.layer())
  ),
  advance: StoredTime.advance,
  setBack: StoredTime.setBack,
  raiseToken: StoredTime.raiseToken,
  standsStill: true
})
