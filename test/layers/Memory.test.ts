import { Clock, Duration, Effect, Option } from "effect"
import { TestClock } from "effect/testing"
import { Backend } from "worklease"
import * as Memory from "worklease/layers/Memory"
import * as BackendContract from "worklease/testing/BackendContract"

BackendContract.suite("Memory", {
  layer: Memory.layer,
  // Its clock is Effect's, which the suite moves itself.
  advance: () => Effect.void,
  standsStill: true,
  setBack: (duration) =>
    Effect.flatMap(Clock.currentTimeMillis, (now) => TestClock.setTime(now - Duration.toMillis(duration))),
  // A token is never behind the clock. From there on, one by one.
  raiseToken: Effect.fnUntraced(function*(workId, fencingToken) {
    const backend = yield* Backend.Backend
    const now = yield* Clock.currentTimeMillis
    yield* TestClock.setTime(Number(fencingToken / 1000n) - 2)
    while (true) {
      const term = { workId, holderId: "raise" }
      const [reply] = yield* backend.acquire([{
        ...term,
        attempt: crypto.randomUUID(),
        ttl: Duration.seconds(1),
        quarantineAfter: Option.none()
      }])
      if (reply._tag !== "Acquired") return yield* Effect.die(reply)
      yield* backend.release([{
        ...term,
        fencingToken: reply.fencingToken,
        exit: "given-back",
        interrupted: false,
        state: Option.none()
      }])
      if (reply.fencingToken >= fencingToken) break
    }
    yield* TestClock.setTime(now)
  })
})
