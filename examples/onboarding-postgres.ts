/**
 * The program on the README's first screen, on a real PostgreSQL: a worker
 * process is killed in the middle of a step, and another worker continues with
 * that step.
 *
 * Starts a PostgreSQL of its own.
 *
 *     node examples/onboarding-postgres.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { PgClient } from "@effect/sql-pg"
import { Config, ConfigProvider, Console, Effect, Layer, Option, Schema } from "effect"
import { SqlClient } from "effect/sql"
import assert from "node:assert/strict"
import { spawn } from "node:child_process"
import { createInterface } from "node:readline"
import { Checkpoint, Lease, Work, Worker } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import * as EmbeddedPostgres from "../support/EmbeddedPostgres.ts"

// ---- the program

const Onboarding = Work.make(
  "onboarding",
  Checkpoint.make(Schema.Struct({ completed: Schema.Array(Schema.String) }))
)

/** A step that takes half a second, and notes in the database that it ran. */
const step = (id: string) => ({
  id,
  execute: Effect.gen(function*() {
    const sql = yield* SqlClient.SqlClient
    yield* sql`INSERT INTO step_started (step) VALUES (${id})`
    yield* Console.log(`      ${id}: started`)
    yield* Effect.sleep("500 millis")
    yield* Console.log(`      ${id}: done`)
  })
})

const steps = ["create account", "charge card", "send invitation"].map(step)

const onboard = (tenant: string) =>
  Worker.run(
    Onboarding.id(tenant),
    Effect.fnUntraced(function*(work) {
      let completed = Option.getOrUndefined(work.prior.state)?.completed ?? []
      yield* Console.log(
        `   ${work.token.holderId}: the last one ${work.prior.exit}, ${completed.length} of ${steps.length} steps done`
      )
      for (const step of steps.filter((_) => !completed.includes(_.id))) {
        yield* step.execute
        completed = completed.concat(step.id)
        yield* work.checkpoint({ completed })
      }
      return work.prior
    }),
    { wait: true }
  )

/** A lease of 3 seconds, so that nobody has to watch this example for 30. */
const workleaseLayer = (holderId: string) =>
  Lease.layerWith({ holderId, ttl: "3 seconds" }).pipe(
    Layer.provide(Postgres.layer),
    Layer.provideMerge(PgClient.layerConfig({ url: Config.Redacted("DATABASE_URL") }))
  )

// ---- the story

/** Runs a worker in a process of its own, and kills it when it prints `line`. */
const killedAt = (line: string, databaseUrl: string) =>
  Effect.callback<NodeJS.Signals | null>((resume) => {
    const worker = spawn(process.execPath, [import.meta.filename, "worker"], {
      env: { ...process.env, DATABASE_URL: databaseUrl },
      stdio: ["ignore", "pipe", "inherit"]
    })
    createInterface(worker.stdout).on("line", (printed) => {
      console.log(printed)
      if (printed.trim() === line) worker.kill("SIGKILL")
    })
    worker.on("exit", (_code, signal) => resume(Effect.succeed(signal)))
    return Effect.sync(() => worker.kill("SIGKILL"))
  })

const story = Effect.gen(function*() {
  const { url } = yield* EmbeddedPostgres.start()
  yield* EmbeddedPostgres.execute(url, "CREATE TABLE step_started (step text NOT NULL)")

  yield* Console.log("A worker process begins, and is killed while it charges the card:")
  const signal = yield* killedAt("charge card: started", url)
  assert.equal(signal, "SIGKILL")

  yield* Console.log("Another worker waits until the lease expires, and continues:")
  const prior = yield* onboard("acme").pipe(
    Effect.provide(workleaseLayer("second worker")),
    Effect.provideService(ConfigProvider.ConfigProvider, ConfigProvider.fromEnv({ env: { DATABASE_URL: url } }))
  )
  assert.equal(prior.exit, "expired")
  assert.deepEqual(prior.state, Option.some({ completed: ["create account"] }))
  assert.deepEqual(prior.holderId, Option.some("first worker"))

  const started = yield* EmbeddedPostgres.execute(
    url,
    "SELECT step, count(*)::integer AS times FROM step_started GROUP BY 1"
  )
  const times = Object.fromEntries(started.map((row) => [row.step, row.times]))
  // Charging the card began twice: a step that must not happen twice needs an idempotency key, or a fenced transaction.
  assert.deepEqual(times, { "create account": 1, "charge card": 2, "send invitation": 1 })
  yield* Console.log("The account was created once. Only the step that was interrupted ran again.")
})

NodeRuntime.runMain(
  process.argv[2] === "worker"
    ? onboard("acme").pipe(Effect.provide(workleaseLayer("first worker")))
    : Effect.scoped(story)
)
