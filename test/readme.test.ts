/**
 * Runs the code of README.md, as it stands there. `npm run check` compiles it.
 *
 * A block is extracted by scripts/readme.mjs. What its hidden prelude exports
 * is run here; a test that it defines runs by itself. The contract suite is
 * left to test/layers, where each backend has what it needs.
 */
import { assert, describe, it } from "@effect/vitest"
import type * as Config from "effect/Config"
import * as ConfigProvider from "effect/ConfigProvider"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as References from "effect/References"
import type * as Scope from "effect/Scope"
import * as SqlClient from "effect/sql/SqlClient"
import { TestClock, TestConsole } from "effect/testing"
import { execFileSync } from "node:child_process"
import { readdirSync, readFileSync } from "node:fs"
import { basename, dirname, join } from "node:path"
import type {
  Backend,
  Lease as LeaseModule,
  LeaseError,
  Pool as PoolModule,
  Renewal,
  Work as WorkModule
} from "worklease"
import { Fence, Lease, Worker } from "worklease"
import * as Memory from "worklease/layers/Memory"
import * as Pglite from "worklease/layers/Pglite"
import type { FencedWrites } from "worklease/layers/Redis"
import * as RedisServer from "../support/RedisServer.ts"
import * as Postgres from "./support/Postgres.ts"
import { executed, failing, pages, StepError, upload } from "./support/readme.ts"
import { isTested } from "./support/Redis.ts"

const root = dirname(import.meta.dirname)
execFileSync(process.execPath, [join(root, "scripts", "readme.mjs")], { stdio: "pipe" })

const directory = join(root, "typetest", "readme")

const blocks = await Promise.all(
  readdirSync(directory)
    .map((name) => ({ path: join(directory, name), source: readFileSync(join(directory, name), "utf8") }))
    .filter(({ source }) => !source.includes("BackendContract.suite("))
    .map(async ({ path, source }) => ({
      name: basename(path),
      definesTests: source.includes("it.effect("),
      exports: await import(/* @vite-ignore */ path) as Readonly<Record<string, unknown>>
    }))
)

const run = new Set(blocks.filter((block) => block.definesTests))

/** What one block of the README exports, by its name, which no other block uses. */
const code = <A>(name: string): A => {
  const [block, ...others] = blocks.filter((block) => name in block.exports)
  assert.isDefined(block, `README.md exports no ${name}`)
  assert.isEmpty(others, `README.md exports ${name} twice`)
  run.add(block)
  return block.exports[name] as A
}

type Run<A, E = never> = Effect.Effect<A, E | LeaseError.LeaseHeld | LeaseError.LeaseLost, LeaseModule.Leases>

const onMemory = Effect.provide(Layer.provideMerge(Lease.layer, Memory.layer))

describe("README.md", () => {
  describe("the first screen", () => {
    const onboard = code<(tenant: string) => Run<void, StepError>>("onboard")
    const layer = code<Layer.Layer<LeaseModule.Leases | SqlClient.SqlClient, LeaseError.BackendError>>("WorkleaseLayer")

    it.effect("continues with the step that failed, on PostgreSQL", () =>
      Effect.gen(function*() {
        const { url } = yield* Postgres.freshDatabase()
        const program = Effect.gen(function*() {
          failing.add("charge card")
          assert.deepStrictEqual(yield* Effect.flip(onboard("acme")), new StepError({ step: "charge card" }))
          yield* onboard("acme")
          yield* onboard("initech")
          const sql = yield* SqlClient.SqlClient
          return yield* sql`SELECT work_id, exit FROM worklease ORDER BY work_id`
        })
        const rows = yield* program.pipe(
          Effect.provide(layer),
          Effect.provideService(
            ConfigProvider.ConfigProvider,
            ConfigProvider.fromEnv({ env: { DATABASE_URL: url } })
          )
        )
        const all = ["create account", "charge card", "send invitation"]
        assert.deepStrictEqual(executed.splice(0), ["create account", "charge card", ...all.slice(1), ...all])
        assert.deepStrictEqual(rows, [
          { work_id: "onboarding:acme", exit: "finished" },
          { work_id: "onboarding:initech", exit: "finished" }
        ])
      }))

    it.effect("is refused while somebody else does it", () =>
      Effect.gen(function*() {
        yield* Lease.acquire("onboarding:acme").pipe(Effect.provide(Lease.layerWith({ holderId: "other" })))
        const held = yield* Effect.flip(onboard("acme"))
        assert.strictEqual(held._tag, "LeaseHeld")
        assert.deepStrictEqual(executed, [])
      }).pipe(onMemory))
  })

  it.effect("an upgraded checkpoint reads both versions", () =>
    Effect.gen(function*() {
      const { checkpoint } = code<WorkModule.Work<{ readonly offset: number; readonly failed: ReadonlyArray<string> }>>(
        "Import"
      )
      assert(checkpoint !== undefined)
      const read = (version: number, json: string) =>
        checkpoint.decode("import:x", { version, bytes: new TextEncoder().encode(json) })
      assert.deepStrictEqual(yield* read(1, `{"offset":3}`), { offset: 3, failed: [] })
      assert.deepStrictEqual(yield* read(2, `{"offset":3,"failed":["a"]}`), { offset: 3, failed: ["a"] })
      assert.strictEqual((yield* Effect.flip(read(3, "{}")))._tag, "CheckpointDecodeError")
    }))

  it.effect("a worker retires", () =>
    Effect.gen(function*() {
      const importFile = code<(file: string) => Run<number>>("importFile")
      assert.strictEqual(yield* importFile("a.csv"), 3)
      const { prior } = yield* Lease.acquire("import:a.csv")
      assert.strictEqual(prior.exit, "retired")
    }).pipe(onMemory))

  it.effect("a shutdown leaves at a safe point", () =>
    Effect.gen(function*() {
      const copy = code<
        (table: string, rows: number, stopping: Deferred.Deferred<void>) => Run<void, LeaseError.Yielded>
      >("copy")
      const stopping = yield* Deferred.make<void>()
      const fiber = yield* Effect.forkChild(Effect.flip(copy("users", 100, stopping)))
      yield* TestClock.adjust("95 millis")
      yield* Deferred.succeed(stopping, undefined)
      yield* TestClock.adjust("10 millis")
      assert.strictEqual((yield* Fiber.join(fiber))._tag, "Yielded")
      const { prior } = yield* Lease.acquire("copy:users")
      assert.strictEqual(prior.exit, "yielded")
    }).pipe(onMemory))

  it.effect("layers for fencing, and in the process", () =>
    Effect.gen(function*() {
      type Provided = Layer.Layer<LeaseModule.Leases | Fence.Fence | SqlClient.SqlClient, unknown>
      const provided = Effect.gen(function*() {
        yield* Fence.Fence
        const sql = yield* SqlClient.SqlClient
        yield* Lease.acquire("job")
        return yield* sql`SELECT work_id FROM worklease`
      })
      const { url } = yield* Postgres.freshDatabase()
      const environment = ConfigProvider.fromEnv({ env: { DATABASE_URL: url } })
      for (const name of ["FencedLayer", "InProcess"]) {
        const rows = yield* Effect.provide(provided, code<Provided>(name)).pipe(
          Effect.provideService(ConfigProvider.ConfigProvider, environment)
        )
        assert.deepStrictEqual(rows, [{ work_id: "job" }])
      }
    }))

  it.effect("withLease and hold", () =>
    Effect.gen(function*() {
      yield* code<Run<void>>("report")
      const warmUp = yield* Effect.forkChild(code<Run<void>>("warmUp"))
      yield* TestClock.adjust("9 seconds")
      assert.isUndefined(warmUp.pollUnsafe())
      yield* TestClock.adjust("2 seconds")
      yield* Fiber.join(warmUp)
      for (const workId of ["nightly-report", "cache-warm-up"]) {
        assert.strictEqual((yield* Lease.acquire(workId)).prior.exit, "finished")
      }
    }).pipe(onMemory))

  it.effect("waiting", () =>
    Effect.gen(function*() {
      const { token } = yield* Lease.acquire("scheduler")
      const standby = yield* code<Run<LeaseModule.ExitMode | "expired" | "none">>("standby").pipe(
        Effect.provide(Lease.layer),
        Effect.forkChild
      )
      yield* TestClock.adjust("5 seconds")
      assert.isUndefined(standby.pollUnsafe())
      yield* Lease.release(token, "yielded")
      assert.strictEqual(yield* Fiber.join(standby), "yielded")
    }).pipe(onMemory))

  it.effect("handing over", () =>
    Effect.gen(function*() {
      const crawl = code<Run<undefined, LeaseError.Yielded>>("crawl")
      const drain = code<Effect.Effect<boolean, LeaseError.BackendError, LeaseModule.Leases>>("drain")
      assert.isFalse(yield* drain)
      const first = yield* Effect.forkChild(crawl)
      yield* TestClock.adjust("5 seconds")
      assert.isTrue(yield* drain)
      yield* TestClock.adjust("6 seconds")
      assert.strictEqual((yield* Effect.flip(Fiber.join(first)))._tag, "Yielded")
      const { prior, token } = yield* Lease.acquire("crawl:example.com")
      assert.strictEqual(prior.exit, "yielded")
      yield* Lease.release(token, "yielded")

      // It left after ten pages, which took as many seconds; its successor has the others left.
      const second = yield* Effect.forkChild(crawl)
      yield* TestClock.adjust(`${pages - 11} seconds`)
      assert.isUndefined(second.pollUnsafe())
      yield* TestClock.adjust("2 seconds")
      yield* Fiber.join(second)
    }).pipe(onMemory))

  it.effect("rows and progress together, on PGlite", () =>
    Effect.gen(function*() {
      const importRows = code<(file: string, lines: ReadonlyArray<string>) => Run<void>>("importRows")
      const sql = yield* SqlClient.SqlClient
      yield* sql`CREATE TABLE imported (file text, line integer, text text CHECK (text <> 'bad'))`
      const rows = sql`SELECT text FROM imported ORDER BY line`.values
      assert.isTrue(Exit.isFailure(yield* Effect.exit(importRows("f", ["a", "b", "bad", "d"]))))
      assert.deepStrictEqual(yield* rows, [["a"], ["b"]])
      yield* importRows("f", ["a", "b", "c", "d"])
      assert.deepStrictEqual(yield* rows, [["a"], ["b"], ["c"], ["d"]])
    }).pipe(TestClock.withLive, Effect.provide(Layer.provideMerge(Lease.layer, Pglite.layer))))

  it.effect("leaders", () =>
    Effect.gen(function*() {
      const scheduler = code<Layer.Layer<never, LeaseError.InvalidWorkId, LeaseModule.Leases>>("Scheduler")
      const whoLeads = code<Effect.Effect<void, LeaseError.BackendError, LeaseModule.Leases>>("whoLeads")
      const isHealthy = code<Effect.Effect<boolean, never, LeaseModule.Leases>>("isHealthy")
      const { holderId } = yield* Lease.Leases
      yield* Effect.forkScoped(whoLeads)
      yield* TestClock.adjust("1 second")
      yield* Effect.scoped(Effect.andThen(Layer.build(scheduler), TestClock.adjust("10 minutes")))
      yield* TestClock.adjust("1 second")
      assert.deepStrictEqual(yield* TestConsole.logLines, ["nobody", "Elected", holderId, "Relinquished", "nobody"])
      assert.isTrue(yield* isHealthy)
    }).pipe(Effect.provideService(References.MinimumLogLevel, "Warn"), onMemory))

  it.effect("pools", () =>
    Effect.gen(function*() {
      const partitions = code<
        Effect.Effect<PoolModule.Pool, LeaseError.InvalidConfig, Scope.Scope | LeaseModule.Leases>
      >("partitions")
      const watch = code<(pool: PoolModule.Pool) => Effect.Effect<void>>("watch")
      const pool = yield* partitions
      yield* Effect.forkScoped(watch(pool))
      yield* TestClock.adjust("5 seconds")
      const stopping = yield* Effect.forkScoped(pool.shutdown)
      yield* TestClock.adjust("1 second")
      yield* Fiber.join(stopping)
      const lines = yield* TestConsole.logLines
      assert.isTrue(lines.join().includes("4,at work"))
      assert.deepStrictEqual(lines.slice(-2), [0, "at work"])
      assert.strictEqual((yield* Lease.acquire("partition:3")).prior.exit, "yielded")
    }).pipe(Effect.provideService(References.MinimumLogLevel, "Warn"), onMemory))

  it.effect("the policy", () =>
    Effect.gen(function*() {
      const layer = code<Layer.Layer<LeaseModule.Leases, never, Backend.Backend>>("ProcessLayer")
      const policy = code<Renewal.Policy>("policy")
      assert.deepStrictEqual(policy.renewEvery, Duration.seconds(100))
      yield* code<Run<void>>("slow")
      const window = yield* Worker.run("x", (work) => work.window).pipe(
        Effect.provide(layer),
        Effect.provideService(
          ConfigProvider.ConfigProvider,
          ConfigProvider.fromEnv({ env: { LEASE_TTL: "10 minutes" } })
        )
      )
      assert.deepStrictEqual(window, Duration.minutes(9))
    }).pipe(onMemory))

  it.effect("the single operations", () =>
    Effect.gen(function*() {
      assert.strictEqual(yield* code<Run<string>>("byHand"), "none")
      assert.strictEqual(yield* code<Run<string>>("byHand"), "yielded")
    }).pipe(onMemory))

  it.effect("quarantine", () =>
    Effect.gen(function*() {
      const parseUpload = code<(id: string) => Run<string | undefined, StepError>>("parseUpload")
      const letGo = code<(id: string) => Run<boolean>>("letGo")
      for (let i = 0; i < 3; i++) assert.strictEqual((yield* Effect.flip(parseUpload("7")))._tag, "StepError")
      assert.isUndefined(yield* parseUpload("7"))
      assert.strictEqual(upload.parsed, 3)
      upload.isBroken = false
      assert.isTrue(yield* letGo("7"))
      assert.strictEqual(yield* parseUpload("7"), "parsed 7")
    }).pipe(onMemory))

  it.effect("errors", () =>
    Effect.gen(function*() {
      const attempt = code<Run<string>>("attempt")
      assert.strictEqual(yield* attempt, "done")
      yield* Lease.acquire("nightly-report").pipe(Effect.provide(Lease.layerWith({ holderId: "other" })))
      assert.strictEqual(yield* attempt, "other does it")
    }).pipe(onMemory))

  it.effect("an owner and an application, on PostgreSQL", () =>
    Effect.gen(function*() {
      const { layer } = yield* Postgres.freshDatabase()
      const owner = code<Layer.Layer<never, LeaseError.BackendError, SqlClient.SqlClient>>("Owner")
      const application = code<Layer.Layer<LeaseModule.Leases, never, SqlClient.SqlClient>>("Application")
      const program = Worker.run("job", () => Effect.succeed("done")).pipe(Effect.provide(application))
      yield* Effect.gen(function*() {
        const error = yield* Effect.flip(program)
        assert(error._tag === "BackendError")
        assert.strictEqual(error.reason._tag, "SchemaOutdated")
        yield* Effect.provide(Effect.void, owner)
        assert.strictEqual(yield* program, "done")
      }).pipe(Effect.provide(layer))
    }))

  // Where there is no Redis, they only compile.
  const onRedis = code<Layer.Layer<LeaseModule.Leases | Backend.Backend | FencedWrites, Config.ConfigError>>("OnRedis")
  const append = code<Effect.Effect<unknown, unknown, LeaseModule.Leases | FencedWrites>>("append")

  it.live.runIf(isTested)("leases and fenced writes, on Redis", () =>
    Effect.gen(function*() {
      const server = yield* RedisServer.start()
      yield* Effect.gen(function*() {
        yield* append
        yield* append
      }).pipe(
        Effect.provide(onRedis),
        Effect.provideService(
          ConfigProvider.ConfigProvider,
          ConfigProvider.fromEnv({ env: { REDIS_URL: server.url } })
        )
      )
      const entries = yield* server.command("LRANGE", "entries:{ledger}", "0", "-1")
      assert.strictEqual(entries, "*1\r\n$15\r\nthe first entry\r\n")
    }))

  it("runs every block", () => {
    assert.deepStrictEqual(blocks.filter((block) => !run.has(block)).map((block) => block.name), [])
  })
})
