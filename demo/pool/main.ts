/**
 * Many work IDs over processes that come and go: `npm run demo:pool`.
 *
 * Processes share partitions in a pool, over PostgreSQL or Redis. They become
 * more, one is killed, one is redeployed, and they become fewer. In the end it
 * is checked that no partition was ever executed twice at once.
 */
import * as NodeRuntime from "@effect/platform-node/NodeRuntime"
import * as NodeServices from "@effect/platform-node/NodeServices"
import { Clock, Data, Effect, Layer, Option, Random, Runtime, Schema } from "effect"
import { Command, Flag } from "effect/cli"
import { Lease } from "worklease"
import { count, plural, seconds } from "../Format.ts"
import * as Store from "../Store.ts"
import * as Terminal from "../Terminal.ts"
import { Fleet, gap } from "./Fleet.ts"
import { keysOf, Partition, ttl } from "./Partitions.ts"
import * as Processes from "./Processes.ts"
import * as Screen from "./Screen.ts"
import * as Script from "./Script.ts"

const between = (minimum: number, maximum: number) => Schema.Int.check(Schema.isBetween({ minimum, maximum }))

const flags = {
  members: Flag.Int("members").pipe(
    Flag.withDescription("How many processes there are at the most, from 2 to 12. 5 by default"),
    Flag.withSchema(between(2, 12)),
    Flag.withDefault(5)
  ),
  keys: Flag.Int("keys").pipe(
    Flag.withDescription("How many partitions there are, from 1 to 1,000. 40 by default"),
    Flag.withSchema(between(1, 1000)),
    Flag.withDefault(40)
  ),
  pause: Flag.Int("pause").pipe(
    Flag.withDescription(
      "For how many milliseconds it watches, in each stage, that nothing moves any more. 4000 by default"
    ),
    Flag.withSchema(between(500, 600_000)),
    Flag.withDefault(4000)
  ),
  seed: Flag.Int("seed").pipe(
    Flag.withDescription(
      "What the choice of who is killed and who is redeployed follows from. A new one each time by default"
    ),
    Flag.optional
  ),
  backend: Flag.Literals("backend", Store.Kind.literals).pipe(
    Flag.withDescription("Where the leases are. postgres by default; redis needs redis-server or valkey-server"),
    Flag.withDefault("postgres" as const)
  )
}

/** Everything is said already. */
class Wrong extends Data.TaggedError("Wrong") {
  override readonly [Runtime.errorReported] = false
}

const command = Command.make(
  "npm run demo:pool --",
  flags,
  Effect.fnUntraced(function*({ backend, keys, members, pause, seed: given }) {
    const seed = Option.isSome(given) ? given.value : yield* Random.nextIntBetween(1, 10_000)
    const plan = yield* Random.withSeed(Script.plan(members), seed)
    const fleet = new Fleet(keysOf(keys), yield* Clock.Clock)
    yield* Terminal.print([
      [["A pool whose members come and go", "bold"], [
        `  (again: npm run demo:pool -- --seed ${seed}${backend === "redis" ? " --backend redis" : ""})`,
        "dim"
      ]],
      [[`${count(keys)} partitions, up to ${members} processes, leases of ${seconds(ttl)}`]]
    ])
    const server = yield* Store.start(backend)
    const result = yield* Effect.gen(function*() {
      const processes = yield* Processes.make(fleet, { backend, url: server.url, keys })
      yield* Screen.show(fleet)
      fleet.note("plain", `${server.name} runs`)
      return yield* Script.run(fleet, processes, plan, pause)
    }).pipe(
      Effect.scoped,
      Effect.catchTag("Stuck", (stuck) => {
        fleet.problem(stuck.message)
        return Effect.undefined
      })
    )
    const held = yield* Effect.provide(
      stillHeld(fleet),
      Lease.layer.pipe(Layer.provide(Store.layer(backend, server.url)))
    )
    yield* judge(fleet, result, held)
  }, Effect.scoped)
).pipe(Command.withDescription("Processes share partitions in a pool while they are started, killed and redeployed"))

/** The work IDs that are held though nobody is left. */
const stillHeld = (fleet: Fleet) =>
  Effect.map(
    Lease.inspect(fleet.partitions.map(({ key }) => Partition.id(key))),
    (records) => records.filter(({ term }) => Option.isSome(term) && term.value.status === "held").length
  )

/** Compares what was executed when, and says how it has come out. */
const judge = Effect.fnUntraced(function*(
  fleet: Fleet,
  result: Effect.Success<ReturnType<typeof Script.run>> | undefined,
  held: number
) {
  const { problems } = fleet
  let executions = 0
  for (const partition of fleet.partitions) {
    executions += partition.executions.length
    // In the order of their fencing tokens.
    partition.executions.forEach(({ beganAt, endedAt, member, offset }, index) => {
      const { holderId } = member
      if (endedAt === undefined) problems.push(`${partition.key} did not end in ${holderId}`)
      if (index === 0) return
      const before = partition.executions[index - 1]
      if (before.endedAt === undefined || before.endedAt > beganAt) {
        problems.push(`${partition.key} was executed by ${before.member.holderId} and ${holderId} at once`)
      }
      if (offset < before.stored) {
        problems.push(`${partition.key} went on at ${offset} in ${holderId}, but had come to ${before.stored} before`)
      }
    })
  }
  if (held > 0) problems.push(`${plural(held, "partition")} ${held === 1 ? "is" : "are"} still held, by nobody`)
  // Who comes back so late may find that others have gone on.
  const wasInTime = result !== undefined && result.away < ttl - 500
  if (wasInTime && !result.hasAllBack) {
    problems.push(`${result.redeployed} was redeployed, and did not get back what it had`)
  }
  if (problems.length > 0 || result === undefined) {
    yield* Terminal.print([
      [],
      [["Not as it should be:", "bold"]],
      ...problems.map((problem): Terminal.Line => [["  ✗ ", "red"], [problem]])
    ])
    return yield* new Wrong()
  }
  const facts = [
    `no partition was executed twice at once: ${count(executions)} executions, compared by fencing token`,
    "each went on where the last checkpoint before it was",
    `all ${count(fleet.partitions.length)} at work, evenly shared, at the end of each stage, and then nothing moved`,
    wasInTime
      ? `${result.redeployed} was away for ${
        seconds(result.away)
      } when it was redeployed, and got back all ${result.returned} that it had`
      : `${result.redeployed} was away for ${
        seconds(result.away)
      } when it was redeployed: too long to be sure to get back what it had`,
    "nothing is held any more, now that all have left"
  ]
  yield* Terminal.print([
    [],
    [["As it should be", "bold"], [`, in ${seconds(fleet.now)}:`]],
    ...facts.map((fact): Terminal.Line => [["  ✓ ", "green"], [fact]]),
    [],
    [[
      "                       moves (needed)  settled after  gap: median  longest  statements/s (to coordinate)",
      "dim"
    ]],
    ...result.outcomes.map(({ looks, moves, needed, statements, title, took }): Terminal.Line => {
      const gaps = moves.map(({ gap }) => gap).sort((a, b) => a - b)
      const of = (index: number) => gaps.length === 0 ? "–" : gap(gaps[index])
      return [[
        `  ${title.padEnd(20)} ${`${moves.length} (${needed})`.padStart(14)} ${seconds(took).padStart(14)} ${
          of(gaps.length >> 1).padStart(12)
        } ${of(gaps.length - 1).padStart(8)} ${`${Math.round(statements)} (${Math.round(looks)})`.padStart(28)}`
      ]]
    })
  ])
})

command.pipe(
  Command.run({ version: "0" }),
  Effect.provide(NodeServices.layer),
  NodeRuntime.runMain
)
