/**
 * An import that survives murder: `npm start`.
 *
 * Worker processes import a public data set into PostgreSQL, in fenced
 * transactions with checkpoints, or into Redis, in fenced writes. While they do, they are killed and frozen.
 * In the end every record is there, exactly once.
 */
import * as NodeRuntime from "@effect/platform-node/NodeRuntime"
import * as NodeServices from "@effect/platform-node/NodeServices"
import { Clock, Data, Effect, Option, Random, Runtime, Schema } from "effect"
import { Command, Flag } from "effect/cli"
import * as Check from "./Check.ts"
import * as Cities from "./Cities.ts"
import { count, plural, seconds } from "./Format.ts"
import { ttl, workId } from "./Import.ts"
import * as Processes from "./Processes.ts"
import { Run, type Worker } from "./Run.ts"
import * as Screen from "./Screen.ts"
import * as Store from "./Store.ts"
import * as Terminal from "./Terminal.ts"
import * as Trouble from "./Trouble.ts"

const atLeast = (minimum: number) => Schema.Int.check(Schema.isGreaterThanOrEqualTo(minimum))

const flags = {
  seed: Flag.Int("seed").pipe(
    Flag.withDescription("What the random choices of victims and moments follow from. A new one each time by default"),
    Flag.optional
  ),
  workers: Flag.Int("workers").pipe(
    Flag.withDescription("How many worker processes there are, replacements not counted. 3 by default"),
    Flag.withSchema(atLeast(1)),
    Flag.withDefault(3)
  ),
  kills: Flag.Int("kills").pipe(
    Flag.withDescription("How many of them are killed on the way. 6 by default"),
    Flag.withSchema(atLeast(0)),
    Flag.withDefault(6)
  ),
  records: Flag.Int("records").pipe(
    Flag.withDescription("Import only so many records. All by default"),
    Flag.withSchema(atLeast(Cities.partCount)),
    Flag.optional
  ),
  backend: Flag.Literals("backend", Store.Kind.literals).pipe(
    Flag.withDescription(
      "Where the leases and the records are. postgres by default; redis needs redis-server or valkey-server"
    ),
    Flag.withDefault("postgres" as const)
  ),
  fence: Flag.Boolean("fence").pipe(
    Flag.withDescription(
      "Write only while the lease is held (the default). With --no-fence, the import does not survive"
    ),
    Flag.withDefault(true)
  )
}

/** Everything is said already. */
class NotSurvived extends Data.TaggedError("NotSurvived") {
  override readonly [Runtime.errorReported] = false
}

const command = Command.make(
  "npm start --",
  flags,
  Effect.fnUntraced(function*(options) {
    const seed = Option.isSome(options.seed) ? options.seed.value : yield* Random.nextIntBetween(1, 10_000)
    const records = Option.getOrUndefined(options.records)
    const plan = yield* Random.withSeed(Trouble.plan(options.kills), seed)
    const parts = Cities.load(records)
    const run = new Run(parts, (part) => workId(part).value, yield* Clock.Clock)
    yield* Terminal.print([
      [["An import that survives murder", "bold"], [
        `  (again: npm start -- --seed ${seed}${options.backend === "redis" ? " --backend redis" : ""})`,
        "dim"
      ]],
      [[`${count(run.total)} cities in ${parts.length} work IDs, ${options.workers} workers, leases of ${ttl}`]],
      [[`Data: ${Cities.source}`, "dim"]],
      ...(options.fence ? [] : [[["The fence is taken out.", "bgRed", "bold"]] as const])
    ])

    const server = yield* Store.start(options.backend)
    yield* Store.prepare(options.backend, server.url)
    yield* Effect.gen(function*() {
      const processes = yield* Processes.make(run, {
        backend: options.backend,
        url: server.url,
        fence: options.fence,
        ...(records === undefined ? {} : { records })
      })
      yield* Screen.show(run)
      run.note("plain", `${server.name} runs; ${options.workers} workers start`)
      yield* Effect.forEach(Array.from({ length: options.workers }), () => processes.start, { discard: true })
      yield* Trouble.make(run, processes, plan)
      yield* run.until("the import is over", () => run.finished, 120)
      yield* run.until("all workers have ended", () => run.workers.every(hasEnded))
    }).pipe(
      Effect.scoped,
      Effect.catchTag("Stuck", (stuck) => Effect.sync(() => run.problem(stuck.message))),
      Effect.andThen(judge(run, parts)),
      Effect.provide(Store.layer(options.backend, server.url))
    )
  }, Effect.scoped)
).pipe(
  Command.withDescription(
    "Worker processes import a data set into PostgreSQL or Redis while they are killed and frozen"
  )
)

const hasEnded = (worker: Worker): boolean => worker.state === "killed" || worker.state === "ended"

/** Compares what was written with the source, and says how the run has come out. */
const judge = Effect.fnUntraced(function*(run: Run, parts: ReadonlyArray<ReadonlyArray<Cities.City>>) {
  const { different, missing, repeated, rows, zombies } = yield* Check.check(parts)
  if (missing + repeated + different > 0 || rows !== run.total) {
    run.problems.push(
      `${count(missing)} of ${count(run.total)} records are missing, and ${count(repeated)} are there more than once`,
      `${count(different)} rows differ from the source`
    )
  }
  if (zombies > 0) {
    run.problems.push(`${count(zombies)} rows were written under a fencing token after a later one had been`)
  }
  if (run.problems.length > 0) {
    yield* Terminal.print([
      [],
      [["The import has not survived:", "bold"]],
      ...run.problems.map((problem): Terminal.Line => [["  ✗ ", "red"], [problem]])
    ])
    return yield* new NotSurvived()
  }
  const gaps = [...run.gaps].sort((a, b) => a - b)
  const [shortest, median, longest] = [gaps[0], gaps[gaps.length >> 1], gaps.at(-1)!].map(seconds)
  const facts = [
    `each of ${count(run.total)} records is there exactly once, as the source has it`,
    "no zombie write: nothing was written under a fencing token after a later one",
    `${plural(run.kills.length, "worker")} killed with SIGKILL: others continued all that they held`,
    ...run.freezes.map(({ lost, millis, worker }) => {
      const frozen = `${worker.holderId} frozen with SIGSTOP for ${seconds(millis)}`
      return `${frozen}: it lost ${plural(lost, "lease")} and wrote nothing more`
    }),
    `${gaps.length} takeovers, with gaps of ${shortest} to ${longest} (median ${median})`
  ]
  yield* Terminal.print([
    [],
    [["The import has survived", "bold"], [`, in ${seconds(run.now)}:`]],
    ...facts.map((fact): Terminal.Line => [["  ✓ ", "green"], [fact]])
  ])
})

command.pipe(
  Command.run({ version: "0" }),
  Effect.provide(NodeServices.layer),
  NodeRuntime.runMain
)
