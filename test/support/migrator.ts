/** A process of its own that migrates the database that it is told, as an application does when it starts. */
import * as PgClient from "@effect/sql-pg/PgClient"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Redacted from "effect/Redacted"
import * as Postgres from "worklease/layers/Postgres"

const layer = Postgres.layerMigrations({}).pipe(
  Layer.provide(PgClient.layer({ url: Redacted.make(process.argv[2]) }))
)

await Effect.runPromise(Effect.scoped(Layer.build(layer)))
