import { assert, describe, it } from "@effect/vitest"
import { Effect, Option, Random, type Scope } from "effect"
import type { SqlClient } from "effect/sql"
import { type ChildProcess, spawn } from "node:child_process"
import { fileURLToPath } from "node:url"
import { Lease } from "worklease"
import * as Fenced from "./support/Fenced.ts"
import { checkpointed, Import } from "./support/Fenced.ts"
import type * as FencedImport from "./support/FencedImport.ts"
import { eventually, pause } from "./support/Sessions.ts"

const lease = {
  ttl: "1 second",
  renewEvery: "300 millis",
  safetyMargin: "100 millis",
  operationTimeout: "200 millis",
  pollInterval: "50 millis"
} as const

const window = 900

interface Importer {
  readonly process: ChildProcess
  readonly said: ReadonlyArray<FencedImport.Said>
}

const isOver = ({ process }: Importer) => process.exitCode !== null || process.signalCode !== null

/** Starts a process, which does not outlive the scope. */
const importer = (options: FencedImport.Options): Effect.Effect<Importer, never, Scope.Scope> =>
  Effect.acquireRelease(
    Effect.sync(() => {
      const script = fileURLToPath(new URL("./support/FencedImport.ts", import.meta.url))
      const child = spawn(process.execPath, ["--no-warnings", script, JSON.stringify(options)], {
        stdio: ["ignore", "pipe", "inherit"],
        env: { ...process.env, NODE_OPTIONS: "" }
      })
      const said: Array<FencedImport.Said> = []
      let rest = ""
      child.stdout.on("data", (chunk) => {
        const lines = (rest + chunk).split("\n")
        rest = lines.pop()!
        for (const line of lines) if (line.startsWith("{")) said.push(JSON.parse(line))
      })
      return { process: child, said }
    }),
    ({ process }) => Effect.sync(() => process.kill("SIGKILL"))
  )

const says = (importer: Importer, tag: FencedImport.Said["_tag"]) =>
  eventually(`it says ${tag}`, Effect.sync(() => importer.said.some((said) => said._tag === tag)))

/** How often each line of each work ID is in the table. */
const counts = (sql: SqlClient.SqlClient) =>
  sql.unsafe<{ readonly number: number; readonly line: number; readonly count: number }>(
    "SELECT number, line, count(*)::integer AS count FROM written GROUP BY number, line ORDER BY number, line"
  )

describe("Fence between processes", () => {
  it.live("workers that are killed again and again write every line exactly once", () =>
    Effect.gen(function*() {
      const { process, sql, url } = yield* Fenced.postgres()
      yield* process()
      const keys = ["a", "b", "c", "d"]
      const lines = 300
      let started = 0
      const start = Effect.suspend(() =>
        importer({ url, holderId: `worker-${started++}`, lease, keys, lines, batch: 5, fenced: true, pause: 20 })
      )
      const workers = yield* Effect.all([start, start, start])
      let kills = 0
      yield* eventually(
        "everything is written, and enough was killed",
        Effect.gen(function*() {
          yield* pause(yield* Random.nextIntBetween(100, 500))
          const sums = yield* Effect.forEach(keys, (key) => checkpointed(sql, key))
          if (sums.every((line) => line === lines)) return true
          // Whoever has something to lose.
          const victims = workers.filter((worker) => !isOver(worker) && worker.said.length > 0)
          if (kills < 10 && victims.length > 0) {
            victims[yield* Random.nextIntBetween(0, victims.length, { halfOpen: true })].process.kill("SIGKILL")
            kills++
            workers.push(yield* start)
          }
          return false
        }),
        40_000
      )
      assert.isAtLeast(kills, 5)
      const resumed = workers.flatMap(({ said }) => said.filter((said) => said._tag === "Resumed"))
      assert.isAtLeast(resumed.filter(({ exit, line }) => exit === "expired" && line > 0 && line < lines).length, 2)
      assert.deepStrictEqual(
        yield* counts(sql),
        keys.flatMap((_, number) => Array.from({ length: lines }, (_, i) => ({ number, line: i + 1, count: 1 })))
      )
    }))

  for (const fenced of [true, false]) {
    it.live(`a worker that dies between write and checkpoint leaves ${fenced ? "nothing" : "a line to be written twice without the fence"}`, () =>
      Effect.gen(function*() {
        const { sql, url } = yield* Fenced.postgres()
        const options = { url, lease, keys: ["a"], lines: 5, batch: 1, fenced, pause: 0 }
        const first = yield* importer({ ...options, holderId: "first", at: { line: 3, what: "die" } })
        yield* eventually("it has died", Effect.sync(() => isOver(first)))
        assert.strictEqual(first.process.signalCode, "SIGKILL")
        const second = yield* importer({ ...options, holderId: "second" })
        yield* says(second, "Ended")
        assert.deepStrictEqual(second.said, [
          { _tag: "Resumed", key: "a", line: 2, exit: "expired" },
          { _tag: "Ended", how: "done" }
        ])
        assert.deepStrictEqual(
          yield* counts(sql),
          [1, 2, 3, 4, 5].map((line) => ({ number: 0, line, count: line === 3 && !fenced ? 2 : 1 }))
        )
      }))
  }

  for (const what of ["wait", "wait after the checkpoint", "wait under a statement"] as const) {
    it.live(`a worker that is frozen (${what}) delays its successor by two windows at most, and commits nothing when it wakes`, () =>
      Effect.gen(function*() {
        const { process, sql, url } = yield* Fenced.postgres()
        const options = { url, lease, keys: ["a"], lines: 3, batch: 1, fenced: true, pause: 0 }
        const frozen = yield* importer({ ...options, holderId: "frozen", at: { line: 2, what } })
        yield* says(frozen, "Waiting")
        frozen.process.kill("SIGSTOP")
        const start = performance.now()
        const b = yield* process({ ...lease, holderId: "b" })
        yield* Effect.gen(function*() {
          const { prior, token } = yield* Lease.acquire(Import.id("a"), { wait: true })
          const waited = performance.now() - start
          // And what a slow machine takes.
          assert.isBelow(waited, 2 * window + 2000)
          // It had a fenced transaction open all the time, and it is still frozen.
          assert.deepInclude(prior, { exit: "expired", state: Option.some({ line: 1 }) })
          assert.isUndefined(frozen.said.find(({ _tag }) => _tag === "Ended"))
          yield* Lease.release(token, "yielded")
        }).pipe(Effect.provide(b))
        frozen.process.kill("SIGCONT")
        yield* says(frozen, "Ended")
        assert.deepStrictEqual(frozen.said.at(-1), { _tag: "Ended", how: "LeaseLost" })
        assert.deepStrictEqual(yield* counts(sql), [{ number: 0, line: 1, count: 1 }])
        assert.strictEqual(yield* checkpointed(sql), 1)

        const successor = yield* importer({ ...options, holderId: "successor" })
        yield* says(successor, "Ended")
        assert.deepStrictEqual(yield* counts(sql), [1, 2, 3].map((line) => ({ number: 0, line, count: 1 })))
      }))
  }
})
