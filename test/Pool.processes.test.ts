/** Pools of real processes on real servers. Whether two executions overlap is told by the store. */
import { assert, describe, it } from "@effect/vitest"
import { Effect, type Scope } from "effect"
import { type ChildProcess, spawn } from "node:child_process"
import { fileURLToPath } from "node:url"
import * as RedisServer from "../support/RedisServer.ts"
import * as Executions from "./support/Executions.ts"
import type * as PoolMember from "./support/PoolMember.ts"
import { freshDatabase } from "./support/Postgres.ts"
import * as Redis from "./support/Redis.ts"
import { eventually, pause } from "./support/Sessions.ts"

/** Prints figures, and measures them on every backend. */
const withFigures = globalThis.process.env["POOL_FIGURES"] !== undefined

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

/** Waits until all are executed by these, evenly shared. */
const balanced = (keys: number, members: ReadonlyArray<Member>, millis = 40_000) =>
  eventually(
    `all are at work in ${members.map(({ holderId }) => holderId)}`,
    Effect.gen(function*() {
      yield* pause(100)
      const loads = yield* Executions.Executions.use(({ loads }) => loads)
      const each = members.map(({ holderId }) => loads.get(holderId) ?? 0)
      return each.reduce((sum, load) => sum + load, 0) === keys && Math.max(...each) - Math.min(...each) <= 1
    }),
    millis
  )

const says = (member: Member, tag: "Started" | "Began" | "Asked") =>
  eventually(`${member.holderId} says ${tag}`, Effect.sync(() => member.said.some(({ _tag }) => _tag === tag)))

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
  Effect.sync(() => {
    if (withFigures) console.log(`${what}: ${JSON.stringify(figures)}`)
  })

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

/** What costs much time is tested on one of the two only, unless figures are wanted. */
const suite = (name: "PostgreSQL" | "Redis", on: typeof onPostgres) => {
  const isOther = name === "Redis"

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
          checkpointEvery: 2000,
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

  const keys = 20
  const handoff = { keys, ttl: 3000, interval: 300, handoffTimeout: 2000, linger: 1000 }

  /** Who hands over half of it, and who waits for that. */
  const inMidHandoff = Effect.fnUntraced(function*(url: string) {
    const holder = yield* start({ ...handoff, url, holderId: "holder" })
    yield* balanced(keys, [holder])
    const receiver = yield* start({ ...handoff, url, holderId: "receiver" })
    yield* says(holder, "Asked")
    return { holder, receiver }
  })

  /** What was to move is at work again soon enough, and none has been executed twice at once. */
  const recovers = Effect.fnUntraced(function*(which: string, survivor: Member) {
    yield* eventually(
      "what was to move has begun again",
      Effect.map(executions, (all) => all.filter(({ executions }) => executions > 1).length >= keys / 2)
    )
    yield* balanced(keys, [survivor])
    const all = yield* executions
    assert.strictEqual(sum(all.map(({ overlaps }) => overlaps)), 0)
    const { max } = gapsOf(all)
    yield* figures(`${which} is killed in mid-handoff on ${name}`, { longestGapMillis: max })
    // And two rounds, on a machine that has other things to do.
    assert.isBelow(max, handoff.ttl + handoff.handoffTimeout + 2000)
  })

  const killings: ReadonlyArray<(url: string) => Effect.Effect<void, never, Executions.Executions | Scope.Scope>> = [
    Effect.fnUntraced(function*(url) {
      const { holder, receiver } = yield* inMidHandoff(url)
      yield* kill(holder)
      yield* recovers("the holder", receiver)
    }),
    Effect.fnUntraced(function*(url) {
      const { holder, receiver } = yield* inMidHandoff(url)
      yield* kill(receiver)
      yield* recovers("the receiver", holder)
    }),
    Effect.fnUntraced(function*(url) {
      const { holder, receiver } = yield* inMidHandoff(url)
      yield* says(receiver, "Began")
      yield* kill(receiver)
      yield* recovers("the receiver, when it has begun,", holder)
    })
  ]

  /** What two that have nothing to do send in so long. */
  const quietly = Effect.fnUntraced(function*(url: string, keys: number) {
    const options = { url, keys, ttl: 12_000, interval: 200, handoffTimeout: 10_000, linger: 0 }
    const members = [
      yield* start({ ...options, holderId: "a" }),
      yield* start({ ...options, holderId: "b" })
    ]
    yield* balanced(keys, members)
    yield* pause(1500)
    const before = members.map(({ counts }) => counts())
    const startedAt = performance.now()
    yield* pause(6000)
    const rounds = (performance.now() - startedAt) / options.interval
    const spent = members.map(({ counts }, index) => {
      const { renew, ...others } = counts()
      const coordinating = sum(
        Object.entries(others).map(([operation, count]) => count - before[index][operation as keyof PoolMember.Counts])
      )
      return { perRound: coordinating / rounds, renewals: renew - before[index].renew }
    })
    yield* figures(`a quiet pool of two on ${name} with ${keys} work IDs`, {
      statementsPerMemberAndRound: spent.map(({ perRound }) => Math.round(perRound * 100) / 100),
      renewalsPerMemberAndSecond: spent.map(({ renewals }) => Math.round(renewals / 0.6) / 10)
    })
    for (const { perRound } of spent) {
      assert.isAbove(perRound, 0.3)
      // One reads the members, and every tenth round another one how all stand. A round is a tenth shorter at times.
      assert.isBelow(perRound, 1.3)
    }
  })

  const sixth = Effect.fnUntraced(function*(url: string) {
    const keys = 40
    const join = (number: number) =>
      start({
        url,
        holderId: `p${number}`,
        keys,
        ttl: 10_000,
        interval: 500,
        handoffTimeout: 10_000,
        checkpointEvery: 1000,
        linger: 0
      })
    const members = yield* Effect.forEach([0, 1, 2, 3, 4], join)
    yield* balanced(keys, members)
    const before = yield* executions
    const sixth = yield* join(5)
    yield* says(sixth, "Started")
    const startedAt = performance.now()
    yield* balanced(keys, [...members, sixth])
    const took = performance.now() - startedAt
    // For several rounds.
    yield* pause(3000)
    const after = yield* executions
    const moved = after.filter(({ executions }, index) => executions > before[index].executions)
    assert.lengthOf(moved, 6)
    assert.isTrue(moved.every(({ holderId, overlaps }) => holderId === "p5" && overlaps === 0))
    assert.strictEqual(
      sum(after.map(({ executions }) => executions)),
      6 + sum(before.map(({ executions }) => executions))
    )
    yield* figures(`40 work IDs from 5 to 6 processes on ${name}`, {
      moves: moved.length,
      seconds: Math.round(took / 100) / 10,
      gapsMillis: gapsOf(moved.map((execution) => ({ ...execution, gaps: execution.gaps.slice(-1) })))
    })
  })

  describe(`pools of processes on ${name}`, () => {
    if (!isOther || withFigures) {
      it.live(
        "600 work IDs survive a rolling restart of six",
        () => on(rolling(false)),
        150_000
      )
    }

    if (isOther || withFigures) {
      it.live(
        "600 work IDs come back in a rolling restart of six with stable member IDs",
        () => on(rolling(true)),
        150_000
      )
    }

    it.live(
      "whichever side is killed in mid-handoff, all work IDs are at work again in time",
      () => Effect.forEach(killings, on, { concurrency: "unbounded", discard: true }),
      90_000
    )

    if (!isOther || withFigures) {
      it.live(
        "a quiet pool sends as many statements for 1,000 work IDs as for 10",
        () =>
          Effect.forEach([10, 1000], (keys) => on((url) => quietly(url, keys)), {
            concurrency: "unbounded",
            discard: true
          }),
        90_000
      )
    }

    if (!isOther || withFigures) {
      it.live(
        "of 40 work IDs 6 move to a sixth process, and no others",
        () => on(sixth),
        90_000
      )
    }
  })
}

suite("PostgreSQL", onPostgres)
if (Redis.isTested) suite("Redis", onRedis)
