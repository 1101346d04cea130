/**
 * Measures what is promised about speed, and judges it: `npm run bench`.
 */
import * as NodeRuntime from "@effect/platform-node/NodeRuntime"
import * as NodeServices from "@effect/platform-node/NodeServices"
import { Data, Effect, Layer, Logger, Option, Runtime } from "effect"
import { Command, Flag } from "effect/cli"
import { mkdirSync, writeFileSync } from "node:fs"
import { fileURLToPath } from "node:url"
import * as EmbeddedPostgres from "../support/EmbeddedPostgres.ts"
import * as Chart from "./Chart.ts"
import * as Machine from "./Machine.ts"
import * as Pgbench from "./Pgbench.ts"
import * as Progress from "./Progress.ts"
import * as Report from "./Report.ts"
import * as Run from "./Run.ts"
import type { SizeName, Target } from "./Target.ts"
import { targets } from "./targets/index.ts"

const flags = {
  quick: Flag.Boolean("quick").pipe(
    Flag.withDescription("Measure smaller sizes, in less than two minutes"),
    Flag.withDefault(false)
  ),
  only: Flag.String("only").pipe(
    Flag.withDescription(
      `Measure these targets only: --only 1,5 (${targets.map(({ name, number }) => `${number} ${name}`).join(", ")})`
    ),
    Flag.optional
  ),
  write: Flag.Boolean("write").pipe(
    Flag.withDescription("Write docs/performance.md and docs/performance.svg, of a full run of all targets"),
    Flag.withDefault(false)
  ),
  // For the tests: shows that everything works, and nothing else.
  tiny: Flag.Boolean("tiny").pipe(Flag.withHidden, Flag.withDefault(false))
}

/** What a user can do about it is all there is to say. */
class Misused extends Data.TaggedError("Misused")<{ readonly message: string }> {
  override readonly [Runtime.errorReported] = false
}

const chosen = (only: Option.Option<string>): Effect.Effect<ReadonlyArray<Target>, Misused> =>
  Option.match(only, {
    onNone: () => Effect.succeed(targets),
    onSome: (list) => {
      const numbers = list.split(",").map((number) => number.trim())
      const unknown = numbers.find((number) => !targets.some((target) => String(target.number) === number))
      return unknown === undefined
        ? Effect.succeed(targets.filter(({ number }) => numbers.includes(String(number))))
        : misused(`There is no target ${JSON.stringify(unknown)}: they are 1 to ${targets.length}.`)
    }
  })

const misused = (message: string): Effect.Effect<never, Misused> =>
  Effect.andThen(Effect.sync(() => console.error(message)), Effect.fail(new Misused({ message })))

const command = Command.make(
  "npm run bench --",
  flags,
  Effect.fnUntraced(function*({ only, quick, tiny, write }) {
    const size: SizeName = tiny ? "tiny" : quick ? "quick" : "full"
    if (write && (size !== "full" || Option.isSome(only))) {
      return yield* misused("--write is for a full run of all targets: not with --quick or --only.")
    }
    const selected = yield* chosen(only)
    const started = performance.now()
    // As PostgreSQL comes, and not as tests want it: a commit is on disk.
    const server = yield* EmbeddedPostgres.start({ settings: { fsync: "on", full_page_writes: "on" } })
    const pgbench = Pgbench.find()
    const version = pgbench === undefined ? undefined : yield* Pgbench.version(pgbench)
    const machine = yield* Machine.describe(server, version)
    yield* say(Report.heading({ machine, size }))
    yield* say(
      selected.map((target) => `${String(target.number).padStart(3)}  ${target.name}: ${target.describe(size)}`)
    )

    const results = yield* Run.all(selected, size, { server, pgbench, progress: yield* Progress.make })

    const report: Report.Report = {
      machine,
      size,
      results,
      seconds: (performance.now() - started) / 1000,
      date: new Date().toISOString().slice(0, 10)
    }
    yield* say(`\n${Report.text(report)}`)
    if (write) yield* save(report)
    // A target that falls short is a result; one that fails is not.
    if (results.some(({ outcome }) => "failed" in outcome)) process.exitCode = 1
  }, Effect.scoped)
).pipe(
  Command.withDescription("Measures what is promised about speed, beside what it is compared with")
)

const say = (lines: string | ReadonlyArray<string>): Effect.Effect<void> =>
  Effect.sync(() => console.log([lines].flat().join("\n")))

const save = (report: Report.Report): Effect.Effect<void> =>
  Effect.sync(() => {
    const docs = fileURLToPath(new URL("../docs", import.meta.url))
    mkdirSync(docs, { recursive: true })
    const panels = report.results.flatMap(({ outcome }) => "failed" in outcome ? [] : outcome.panels ?? [])
    writeFileSync(`${docs}/performance.md`, Report.markdown(report))
    writeFileSync(`${docs}/performance.svg`, Chart.svg(Report.chartTitle, panels))
  })

command.pipe(
  Command.run({ version: "0" }),
  Effect.provide(Layer.merge(
    NodeServices.layer,
    // Standard output is for the table.
    Logger.layer([Logger.withConsoleError(Logger.formatSimple)])
  )),
  NodeRuntime.runMain
)
