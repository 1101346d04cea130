/**
 * A process that is a member of a pool, for tests that end and kill it. Prints what it does, one JSON object per line.
 */
import * as NodeRuntime from "@effect/platform-node/NodeRuntime"
import { Effect, Layer, Logger, Option, Schedule } from "effect"
import { writeSync } from "node:fs"
import { Lease, Pool } from "worklease"
import * as CountedBackend from "../../support/CountedBackend.ts"
import * as Executions from "./Executions.ts"
import { keysOf, Partition } from "./PoolProcess.ts"

export interface Options {
  readonly url: string
  readonly holderId: string
  readonly memberId?: string | undefined
  readonly keys: number
  /** In milliseconds, as all that follows. */
  readonly ttl: number
  readonly interval: number
  readonly handoffTimeout: number
  /** How often it makes a checkpoint, if it does. */
  readonly checkpointEvery?: number | undefined
  /** How long it goes on when it is asked to hand over. */
  readonly linger: number
}

export type Counts = Readonly<Record<CountedBackend.Operation, number>>

export type Said =
  /** Its pool is made, and joins. */
  | { readonly _tag: "Started" }
  | { readonly _tag: "Began" | "Asked"; readonly key: string }
  | { readonly _tag: "Counted"; readonly counts: Counts }

const say = (said: Said) => Effect.sync(() => writeSync(1, JSON.stringify(said) + "\n"))

const member = (options: Options, counts: ReturnType<typeof CountedBackend.make>) =>
  Effect.gen(function*() {
    const executions = yield* Executions.Executions
    const { checkpointEvery, holderId, linger } = options
    const sayCounts = Effect.suspend(() =>
      say({
        _tag: "Counted",
        counts: {
          acquire: counts.acquire.statements,
          renew: counts.renew.statements,
          checkpoint: counts.checkpoint.statements,
          release: counts.release.statements,
          inspect: counts.inspect.statements
        }
      })
    )
    yield* Effect.addFinalizer(() => sayCounts)
    yield* Pool.make({
      work: Partition,
      keys: keysOf(options.keys),
      memberId: options.memberId,
      interval: options.interval,
      handoffTimeout: options.handoffTimeout,
      run: (work, key) => {
        const token = work.token.fencingToken
        let offset = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.offset })
        const asked = Effect.gen(function*() {
          yield* work.awaitYieldRequest
          yield* say({ _tag: "Asked", key })
          yield* Effect.sleep(linger)
          return yield* work.handOff({ offset: offset + 1 })
        })
        const working = checkpointEvery === undefined ? Effect.never : Effect.gen(function*() {
          while (true) {
            yield* Effect.sleep(checkpointEvery)
            yield* work.checkpoint({ offset: ++offset })
          }
        })
        return Effect.acquireUseRelease(
          Effect.andThen(executions.begin(key, token, holderId), say({ _tag: "Began", key })),
          () => Effect.raceFirst(asked, working),
          () => executions.end(key, token)
        )
      }
    })
    yield* say({ _tag: "Started" })
    yield* Effect.repeat(sayCounts, Schedule.spaced("100 millis"))
  }).pipe(Effect.scoped)

/** Ends when the process that started this one does, in whatever way. */
const orphaned = Effect.callback<void>((resume) => {
  process.stdin.resume().once("close", () => resume(Effect.void))
  return Effect.sync(() => process.stdin.destroy())
})

const main = (options: Options) => {
  const counts = CountedBackend.make()
  return member(options, counts).pipe(
    Effect.provide(
      Lease.layerWith({
        holderId: options.holderId,
        ttl: options.ttl,
        renewEvery: options.ttl / 4,
        // Long, for a machine that has other things to do.
        operationTimeout: options.ttl / 2
      }).pipe(
        Layer.provide(CountedBackend.layer(counts)),
        Layer.provideMerge(Executions.layer(options.url))
      )
    ),
    Effect.raceFirst(orphaned),
    Effect.tapCause((cause) => Effect.logError("The member failed", cause)),
    // Standard output is for what it says.
    Effect.provide(Logger.layer([Logger.withConsoleError(Logger.formatSimple)]))
  )
}

if (process.argv[2] !== undefined) {
  NodeRuntime.runMain(main(JSON.parse(process.argv[2])), { disableErrorReporting: true })
}
