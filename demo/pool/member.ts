/**
 * One member of the pool: a process that runs its share of the partitions until
 * it is told to end.
 */
import * as NodeRuntime from "@effect/platform-node/NodeRuntime"
import { Clock, Console, Effect, Layer, Logger, Option, Random, Schedule, Schema } from "effect"
import { Lease, Pool } from "worklease"
import * as CountedBackend from "../../support/CountedBackend.ts"
import * as Store from "../Store.ts"
import { keysOf, Partition, type Report, ReportLine, Settings, ttl } from "./Partitions.ts"

const settings = Schema.decodeUnknownSync(Settings)(process.argv[2])

const report = (report: Report) => Effect.flatMap(Effect.orDie(Schema.encodeEffect(ReportLine)(report)), Console.log)

const reportAt = (make: (at: number) => Report) => Effect.flatMap(Clock.currentTimeMillis, (at) => report(make(at)))

/** What a batch of a partition's records takes. */
const processBatch = Effect.flatMap(Random.nextBetween(200, 500), Effect.sleep)

const partitions = Pool.make({
  work: Partition,
  keys: keysOf(settings.keys),
  memberId: settings.memberId,
  run: (work, key) => {
    const token = work.token.fencingToken
    let offset = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.offset })
    const processPartition = Effect.gen(function*() {
      yield* work.awaitYieldRequest.pipe(
        Effect.andThen(reportAt((at) => ({ _tag: "Asked", key, token, at }))),
        Effect.forkChild
      )
      while (true) {
        yield* processBatch
        offset++
        // Where it leaves if it was asked to.
        yield* work.checkpoint({ offset })
        yield* reportAt((at) => ({ _tag: "Advanced", key, token, at, offset }))
      }
    })
    return Effect.acquireUseRelease(
      reportAt((at) => ({ _tag: "Began", key, token, at, offset, exit: work.prior.exit })),
      () => processPartition,
      () => reportAt((at) => ({ _tag: "Ended", key, token, at }))
    )
  }
})

const counts = CountedBackend.make()

const reportCounts = Effect.suspend(() =>
  report({
    _tag: "Counted",
    looks: counts.inspect.statements,
    statements: Object.values(counts).reduce((sum, { statements }) => sum + statements, 0)
  })
)

const member = Effect.gen(function*() {
  yield* reportAt((at) => ({ _tag: "Started", at }))
  yield* partitions
  yield* Effect.repeat(reportCounts, Schedule.spaced("250 millis"))
}).pipe(
  Effect.scoped,
  // SIGTERM interrupts: the pool has shut down by then.
  Effect.onInterrupt(() => reportAt((at) => ({ _tag: "Left", at })))
)

/** Ends when the process that started this one does, in whatever way. */
const orphaned = Effect.callback<void>((resume) => {
  process.stdin.resume().once("close", () => resume(Effect.void))
  return Effect.sync(() => process.stdin.destroy())
})

const layer = Lease.layerWith({ holderId: settings.holderId, ttl }).pipe(
  Layer.provide(CountedBackend.layer(counts)),
  Layer.provide(Store.layer(settings.backend, settings.url))
)

member.pipe(
  Effect.provide(layer),
  Effect.raceFirst(orphaned),
  Effect.tapCause((cause) => Effect.logError("The member failed", cause)),
  // Standard output is for reports.
  Effect.provide(Logger.layer([Logger.withConsoleError(Logger.formatSimple)])),
  NodeRuntime.runMain({ disableErrorReporting: true })
)
