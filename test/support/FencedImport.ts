/**
 * A process that imports lines into the table `written`, for tests that kill and freeze it. Prints what it does, one
 * JSON object per line.
 */
import { Effect, Option } from "effect"
import { SqlClient } from "effect/sql"
import { writeSync } from "node:fs"
import { Fence, type Lease, Worker } from "worklease"
import { Import, write } from "./Fenced.ts"
import * as Sessions from "./Sessions.ts"

export interface Options {
  readonly url: string
  readonly holderId: string
  readonly lease: Lease.LayerOptions
  /** The work IDs to import, all at once, each by whoever gets it. */
  readonly keys: ReadonlyArray<string>
  readonly lines: number
  /** How many lines go into one transaction. */
  readonly batch: number
  /** Whether each batch commits together with the checkpoint that tells of it. */
  readonly fenced: boolean
  /** The milliseconds that a batch takes. */
  readonly pause: number
  /** What happens at this line: after it was written, and before it is committed or there is a checkpoint of it. */
  readonly at?: {
    readonly line: number
    /** Dies of SIGKILL, or says so and goes on after a while: it then gets frozen. */
    readonly what: "die" | "wait" | "wait under a statement" | "wait after the checkpoint"
  } | undefined
}

export type Said =
  | { readonly _tag: "Resumed"; readonly key: string; readonly line: number; readonly exit: string }
  | { readonly _tag: "Waiting" }
  | { readonly _tag: "Ended"; readonly how: string }

const say = (said: Said) => Effect.sync(() => writeSync(1, JSON.stringify(said) + "\n"))

const importLines = Effect.fnUntraced(
  function*(options: Options, key: string, work: Lease.Lease<{ readonly line: number }>) {
    const number = options.keys.indexOf(key)
    let line = Option.match(work.prior.state, { onNone: () => 0, onSome: ({ line }) => line })
    yield* say({ _tag: "Resumed", key, line, exit: work.prior.exit })
    const wait = Effect.andThen(say({ _tag: "Waiting" }), Sessions.pause(300))
    while (line < options.lines) {
      const end = Math.min(line + options.batch, options.lines)
      const { at } = options
      const isHere = at !== undefined && line < at.line && at.line <= end
      const batch = Effect.gen(function*() {
        for (let next = line + 1; next <= end; next++) yield* write(next, number)
        if (isHere && at.what === "die") process.kill(process.pid, "SIGKILL")
        if (isHere && at.what === "wait") yield* wait
        if (isHere && at.what === "wait under a statement") {
          const sql = yield* SqlClient.SqlClient
          yield* say({ _tag: "Waiting" })
          yield* sql.unsafe("SELECT pg_sleep(60)")
        }
        yield* Sessions.pause(options.pause)
        yield* work.checkpoint({ line: end })
        if (isHere && at.what === "wait after the checkpoint") yield* wait
      })
      yield* options.fenced ? Fence.transaction(batch, work) : batch
      line = end
    }
  }
)

const main = (options: Options) =>
  Effect.forEach(
    options.keys,
    (key) => Worker.run(Import.id(key), (work) => importLines(options, key, work), { wait: true }),
    { concurrency: "unbounded", discard: true }
  ).pipe(
    Effect.provide(Sessions.process(options.url, { ...options.lease, holderId: options.holderId })),
    Effect.matchEffect({
      onSuccess: () => say({ _tag: "Ended", how: "done" }),
      onFailure: (error) => say({ _tag: "Ended", how: (error as { readonly _tag: string })._tag })
    })
  )

if (process.argv[2] !== undefined) Effect.runFork(main(JSON.parse(process.argv[2])))
