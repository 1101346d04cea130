/**
 * One worker process: takes whatever part is free, continues it where its last
 * holder stopped, and looks for the next one, until all are finished.
 */
import * as NodeRuntime from "@effect/platform-node/NodeRuntime"
import { Array as Arr, Console, Duration, Effect, Layer, Logger, Option, Random, Schema } from "effect"
import { Lease, Worker } from "worklease"
import * as Cities from "./Cities.ts"
import { type Report, ReportLine, Settings, ttl, workId } from "./Import.ts"
import * as Store from "./Store.ts"

/** The parts that a process works on at a time: not so many that the survivors take all that a victim leaves behind. */
const slots = 3

/** The records that are written together. */
const batchSize = 290

/** After each write, or it would all be over before there is anything to see. */
const rest = Effect.flatMap(Random.nextBetween(200, 400), Effect.sleep)

const settings = Schema.decodeUnknownSync(Settings)(process.argv[2])

const parts = Cities.load(settings.records)

const report = (report: Report) => Effect.flatMap(Effect.orDie(Schema.encodeEffect(ReportLine)(report)), Console.log)

const importPart = (part: number) =>
  Worker.run(
    workId(part),
    Effect.fnUntraced(function*(work) {
      const records = yield* Store.Records
      const cities = parts[part]
      const token = work.token.fencingToken
      if (work.prior.exit === "finished") return
      let next = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.next })
      const prior = { exit: work.prior.exit, holderId: Option.getOrNull(work.prior.holderId) }
      yield* report({ _tag: "Acquired", part, token, next, prior })
      for (const batch of Arr.chunksOf(cities.slice(next), batchSize)) {
        const rows = Arr.map(batch, (city, index) => Object.assign({ token, part, record: next + index }, city))
        next += rows.length
        yield* records.write({ work, rows, next, before: stopIfAsked(part), fence: settings.fence })
        yield* report({ _tag: "Wrote", part, token, next })
        yield* rest
      }
      yield* report({ _tag: "Finished", part, token })
    })
  )

/** What this process knows to be left, and what of that is in the hands of one of its slots. */
const unfinished = new Set(parts.keys())
const inHand = new Set<number>()

/** Imports one part after the other. Where all that are left are held, it looks again when the first may be free. */
const importWhatIsFree = Effect.gen(function*() {
  while (unfinished.size > 0) {
    let wait = Duration.millis(500)
    for (const part of yield* Random.shuffle(unfinished)) {
      if (inHand.has(part) || !unfinished.has(part)) continue
      inHand.add(part)
      yield* importPart(part).pipe(
        Effect.andThen(Effect.sync(() => unfinished.delete(part))),
        Effect.catchTag("LeaseHeld", (held) =>
          Effect.sync(() => {
            wait = Duration.min(wait, held.retryAfter)
          })),
        Effect.catchTag(
          "LeaseLost",
          ({ reason }) => report({ _tag: "Lost", part, token: reason.fencingToken ?? 0n, why: reason._tag })
        ),
        Effect.catch((error) => report({ _tag: "Failed", part, why: error.message }))
      )
      inHand.delete(part)
    }
    yield* Effect.sleep(Duration.max(wait, Duration.millis(50)))
  }
})

// -----------------------------------------------------------------------------
// being frozen at the worst moment
// -----------------------------------------------------------------------------

let isAskedToStop = false
process.on("SIGUSR2", () => {
  isAskedToStop = true
})

/** Between the last look at the lease and the write: whoever stops here wakes up and writes, if nothing keeps it. */
const stopIfAsked = (part: number) =>
  Effect.suspend(() => {
    if (!isAskedToStop) return Effect.void
    isAskedToStop = false
    return Effect.andThen(
      report({ _tag: "Stopping", part }),
      Effect.sync(() => process.kill(process.pid, "SIGSTOP"))
    )
  })

// -----------------------------------------------------------------------------
// the process
// -----------------------------------------------------------------------------

/** Ends when the process that started this one does, in whatever way. */
const orphaned = Effect.callback<void>((resume) => {
  process.stdin.resume().once("close", () => resume(Effect.void))
  return Effect.sync(() => process.stdin.destroy())
})

const layer = Lease.layerWith({ holderId: settings.holderId, ttl }).pipe(
  Layer.provideMerge(Store.layer(settings.backend, settings.url))
)

Effect.replicateEffect(importWhatIsFree, slots, { concurrency: "unbounded", discard: true }).pipe(
  Effect.provide(layer),
  Effect.raceFirst(orphaned),
  Effect.tapCause((cause) => Effect.logError("The worker failed", cause)),
  // Standard output is for reports.
  Effect.provide(Logger.layer([Logger.withConsoleError(Logger.formatSimple)])),
  NodeRuntime.runMain({ disableErrorReporting: true })
)
