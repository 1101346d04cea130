/**
 * PostgreSQL where the application may not change the schema: an owner runs the
 * migrations, the application's role gets SELECT, INSERT, UPDATE and DELETE.
 * And what is said when the tables or a permission are missing.
 *
 * Starts a PostgreSQL of its own.
 *
 *     node examples/postgres-roles.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { PgClient } from "@effect/sql-pg"
import { Console, Effect, Layer, Redacted } from "effect"
import assert from "node:assert/strict"
import { Lease, Worker } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import * as EmbeddedPostgres from "../support/EmbeddedPostgres.ts"

const where = { schema: "coordination", table: "lease" }

const story = Effect.gen(function*() {
  const { url } = yield* EmbeddedPostgres.start()
  const execute = (statement: string) => EmbeddedPostgres.execute(url, statement)
  const client = (user: string) => PgClient.layer({ url: Redacted.make(url.replace("postgres@", `${user}@`)) })

  const run = Worker.run("job", (work) => Effect.succeed(work.token.fencingToken)).pipe(
    Effect.provide(
      Lease.layer.pipe(Layer.provide(Postgres.layerStorage(where)), Layer.provide(client("application")))
    )
  )
  yield* execute("CREATE ROLE application LOGIN")

  yield* Console.log("Before the migrations:")
  const missing = yield* Effect.flip(run)
  assert(missing._tag === "BackendError" && missing.reason._tag === "SchemaOutdated")
  assert.equal(missing.outcome, "rejected")
  yield* Console.log(`   ${missing.message}`)

  // The layer provides nothing: building it migrates.
  yield* Effect.provide(Effect.void, Layer.provide(Postgres.layerMigrations(where), client("postgres")))
  yield* Console.log("After the migrations, without permissions:")
  const denied = yield* Effect.flip(run)
  assert(denied._tag === "BackendError" && denied.reason._tag === "PermissionDenied")
  yield* Console.log(`   ${denied.message}`)

  yield* execute("GRANT USAGE ON SCHEMA coordination TO application")
  yield* execute("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA coordination TO application")
  yield* Console.log("With permissions:")
  yield* Console.log(`   the work ran, with token ${yield* run}`)

  yield* Console.log("The statements of the migrations, for those who run them elsewhere:")
  yield* Console.log(Postgres.migrationSql(where).replace(/^/gm, "   "))
})

NodeRuntime.runMain(Effect.scoped(story))
