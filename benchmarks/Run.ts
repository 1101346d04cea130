/**
 * Runs targets, one after the other. What goes wrong with one is its result,
 * and the others are measured.
 */
import { Cause, Data, Effect } from "effect"
import type { ChildProcessSpawner } from "effect/process"
import { Bench } from "./Bench.ts"
import type { Progress } from "./Progress.ts"
import { type Figure, type Result, type SizeName, type Target, verdictOf } from "./Target.ts"

/** In seconds: a target that has not ended by then never will. */
const timeLimit: Readonly<Record<SizeName, number>> = { full: 900, quick: 120, tiny: 60 }

class TookTooLong extends Data.TaggedError("TookTooLong")<{ readonly message: string }> {}

export const all = Effect.fnUntraced(function*(
  targets: ReadonlyArray<Target>,
  size: SizeName,
  options: Pick<Bench["Service"], "server" | "pgbench"> & {
    readonly progress: Progress
    readonly seconds?: number | undefined
  }
): Effect.fn.Return<ReadonlyArray<Result>, never, ChildProcessSpawner.ChildProcessSpawner> {
  const { pgbench, progress, seconds = timeLimit[size], server } = options
  const figures = new Map<string, Figure>()
  const results: Array<Result> = []
  for (const target of targets) {
    yield* progress.begin(`${String(target.number).padStart(2)} ${target.name}`)
    const result = yield* Effect.provideService(one(target, size, seconds), Bench, {
      server,
      pgbench,
      progress: progress.say,
      figures
    })
    results.push(result)
    if (!("failed" in result.outcome)) {
      for (const [name, figure] of Object.entries(result.outcome.figures ?? {})) figures.set(name, figure)
    }
    yield* progress.end(verdictOf(result))
  }
  return results
})

const one = Effect.fnUntraced(function*(target: Target, size: SizeName, seconds: number) {
  const started = performance.now()
  const outcome = yield* target.run(size).pipe(
    Effect.scoped,
    Effect.timeoutOrElse({
      duration: seconds * 1000,
      orElse: () => Effect.fail(new TookTooLong({ message: `It took longer than ${seconds} s` }))
    }),
    Effect.catchCause((cause) =>
      Cause.hasInterruptsOnly(cause)
        ? Effect.interrupt
        : Effect.succeed({ failed: whyOf(cause), details: Cause.pretty(cause) })
    )
  )
  return {
    target,
    size: target.describe(size),
    seconds: (performance.now() - started) / 1000,
    outcome
  }
})

/** The first line, which fits into the table. */
const whyOf = (cause: Cause.Cause<unknown>): string => {
  const error = Cause.squash(cause)
  return (error instanceof Error ? error.message : String(error)).split("\n")[0]
}
