/** Pools of real processes on real servers. Whether two executions overlap is told by the store. */
import { assert, describe, it } from "@effect/vitest"
import { Effect, Layer, type Scope } from "effect"
import { type ChildProcess, spawn } from "node:child_process"
import { fileURLToPath } from "node:url"
import * as RedisServer from "../support/RedisServer.ts"
import * as Executions from "./support/Executions.ts"
import type * as PoolMember from "./support/PoolMember.ts"
import { freshDatabase } from "./support/Postgres.ts"
import * as Redis from "./support/Redis.ts"
import { eventually, pause } from "./support/Sessions.ts"

interface Member {
  readonly holderId: string
  readonly process: ChildProcess
  readonly said: ReadonlyArray<PoolMember.Said>
  readonly counts: () => PoolMember.Counts
}

const isOver = ({ process }: Member) => process.exitCode !== null || process.signalCode !== null

/** Starts a process, which does not outlive the scope. */
const start = (options: PoolMember.Options): Effect.Effect<Member, never, Scope.Scope> =>
  Effect.acquireRelease(
    Effect.sync(() => {
      const script = fileURLToPath(new URL("./support/PoolMember.ts", import.meta.url))
      const child = spawn(process.execPath, ["--no-warnings", script, JSON.stringify(options)], {
        stdio: ["pipe", "pipe", "inherit"],
        env: { ...process.env, NODE_OPTIONS: "" }
      })
      const said: Array<PoolMember.Said> = []
      let counts: PoolMember.Counts = { acquire: 0, renew: 0, checkpoint: 0, release: 0, inspect: 0 }
      let rest = ""
      child.stdout.on("data", (chunk) => {
        const lines = (rest + chunk).split("\n")
        rest = lines.pop()!
        for (const line of lines) {
          const next: PoolMember.Said = JSON.parse(line)
          if (next._tag === "Counted") counts = next.counts
          else said.push(next)
        }
      })
      return { holderId: options.holderId, process: child, said, counts: () => counts }
    }),
    ({ process }) => Effect.sync(() => process.kill("SIGKILL"))
  )

/** SIGTERM, until it has ended: it hands over all that it has. */
const shutdown = Effect.fnUntraced(function*(member: Member) {
  member.process.kill("SIGTERM")
  yield* eventually(`${member.holderId} has ended`, Effect.sync(() => isOver(member)))
  // Not with a signal: it has ended by itself.
  assert.isNull(member.process.signalCode)
})

/** SIGKILL. */
const kill = Effect.fnUntraced(function*(member: Member) {
  member.process.kill("SIGKILL")
  yield* eventually(`${member.holderId} is dead`, Effect.sync(() => isOver(member)))
  yield* Executions.Executions.use(({ died }) => died(member.holderId))
})

const executions = Executions.Executions.use(({ all }) => all)

/** How many are executed by each. */
const loads = (all: ReadonlyArray<Executions.Execution>, members: ReadonlyArray<Member>): ReadonlyArray<number> =>
  members.map(({ holderId }) => all.filter((execution) => execution.holderId === holderId).length)

/** Waits until all are executed by these, evenly shared. */
const balanced = (keys: number, members: ReadonlyArray<Member>, millis = 40_000) =>
  eventually(
    `all are at work in ${members.map(({ holderId }) => holderId)}`,
    Effect.gen(function*() {
      yield* pause(50)
      const each = loads(yield* executions, members)
      if (process.env.DEBUG_LOADS) console.log(Math.round(performance.now()), each.join(" "), JSON.stringify(total(members)))
      return each.reduce((sum, load) => sum + load, 0) === keys && Math.max(...each) - Math.min(...each) <= 1
    }),
    millis
  )

const sum = (numbers: ReadonlyArray<number>) => numbers.reduce((sum, number) => sum + number, 0)

const total = (members: ReadonlyArray<Member>): PoolMember.Counts =>
  members.map(({ counts }) => counts()).reduce((a, b) => ({
    acquire: a.acquire + b.acquire,
    renew: a.renew + b.renew,
    checkpoint: a.checkpoint + b.checkpoint,
    release: a.release + b.release,
    inspect: a.inspect + b.inspect
  }))

const figures = (what: string, figures: Readonly<Record<string, unknown>>) =>
  Effect.sync(() => console.log(`${what}: ${JSON.stringify(figures)}`))

const gapsOf = (all: ReadonlyArray<Executions.Execution>) => {
  const gaps = all.flatMap(({ gaps }) => gaps).sort((a, b) => a - b)
  const of = (index: number) => Math.round(gaps[Math.min(gaps.length - 1, index)] * 10) / 10
  return {
    count: gaps.length,
    median: of(gaps.length >> 1),
    p99: of(Math.floor(gaps.length * 0.99)),
    max: of(gaps.length)
  }
}

const onPostgres = <A, E>(test: (url: string) => Effect.Effect<A, E, Executions.Executions | Scope.Scope>) =>
  Effect.gen(function*() {
    const { layer, url } = yield* freshDatabase()
    yield* Effect.provide(Executions.prepare, layer)
    return yield* Effect.provide(test(url), Executions.layer(url))
  }).pipe(Effect.scoped)

const onRedis = <A, E>(test: (url: string) => Effect.Effect<A, E, Executions.Executions | Scope.Scope>) =>
  Effect.gen(function*() {
    const { url } = yield* RedisServer.start()
    return yield* Effect.provide(test(url), Executions.layer(url))
  }).pipe(Effect.scoped)

const suite = (name: string, on: typeof onPostgres) => {
  const rolling = (isStable: boolean) => (url: string) =>
    Effect.gen(function*() {
      const keys = 600
      const numbers = [0, 1, 2, 3, 4, 5]
      const members: Array<Member> = []
      const starts: Array<Member> = []
      const startAt = Effect.fnUntraced(function*(number: number) {
        const member = yield* start({
          url,
          holderId: `p${number}-${starts.length}`,
          memberId: isStable ? `p${number}` : undefined,
          keys,
          ttl: 20_000,
          interval: 500,
          handoffTimeout: 10_000,
          checkpointEvery: 1000,
          linger: 0
        })
        starts.push(member)
        members[number] = member
      })
      yield* Effect.forEach(numbers, startAt)
      yield* balanced(keys, members)
      const before = yield* executions
      const ran = sum(before.map(({ executions }) => executions))
      const counted = total(starts)
      const startedAt = performance.now()
      for (const number of numbers) {
        yield* shutdown(members[number])
        yield* startAt(number)
        yield* balanced(keys, members)
      }
      const took = performance.now() - startedAt
      const after = yield* executions
      const counts = total(starts)
      yield* Effect.forEach(members, shutdown, { concurrency: "unbounded" })
      const all = yield* executions
      assert.lengthOf(all, keys)
      assert.strictEqual(sum(all.map(({ overlaps }) => overlaps)), 0, "none is executed twice at once")
      assert.isTrue(all.every(({ holderId }) => holderId === undefined), "all have ended")
      const moves = sum(after.map(({ executions }) => executions)) - ran
      // Each start of one costs the shares of two at the most: what it had goes to others, and what it gets comes from them.
      if (isStable) assert.strictEqual(moves, keys, "each goes back to where it was")
      else assert.isAtMost(moves, 2 * keys + 60)
      yield* figures(`rolling restart on ${name}${isStable ? ", stable member IDs" : ""}`, {
        seconds: Math.round(took / 100) / 10,
        moves,
        gapsMillis: gapsOf(after.map((execution, index) => ({
          ...execution,
          gaps: execution.gaps.slice(before[index].gaps.length)
        }))),
        statements: Object.fromEntries(
          Object.entries(counts).map((
            [operation, count]
          ) => [operation, count - counted[operation as keyof typeof counted]])
        )
      })
    })

  describe(`pools of processes on ${name}`, () => {
    it.live("600 work IDs survive a rolling restart of six", () => on(rolling(false)), 150_000)

    it.live("600 work IDs come back in a rolling restart of six with stable member IDs", () => on(rolling(true)), 150_000)
  })
}

suite("PostgreSQL", onPostgres)
if (Redis.isTested) suite("Redis", onRedis)

void Layer
