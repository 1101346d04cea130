/** Databases on the PostgreSQL that `globalSetup.ts` started. */
import * as PgClient from "@effect/sql-pg/PgClient"
import * as Effect from "effect/Effect"
import type * as Layer from "effect/Layer"
import * as Redacted from "effect/Redacted"
import type * as Scope from "effect/Scope"
import type * as SqlClient from "effect/sql/SqlClient"
import type { SqlError } from "effect/sql/SqlError"
import { inject } from "vitest"
import * as EmbeddedPostgres from "../../support/EmbeddedPostgres.ts"

export interface FreshDatabase {
  readonly url: string
  /** A new pool on the database each time it is built. */
  readonly layer: Layer.Layer<PgClient.PgClient | SqlClient.SqlClient, SqlError>
}

/** The shared server's URL, where one may do anything that other tests do not notice. */
export const server: Effect.Effect<
  { readonly url: string; readonly version: EmbeddedPostgres.Version },
  EmbeddedPostgres.EmbeddedPostgresError
> = Effect.suspend(() => {
  const provided = inject("postgres")
  if (provided === undefined) {
    return new EmbeddedPostgres.EmbeddedPostgresError({
      message:
        "There is no shared PostgreSQL: vitest's configuration must name test/support/globalSetup.ts as globalSetup."
    })
  }
  return "error" in provided
    ? new EmbeddedPostgres.EmbeddedPostgresError({ message: provided.error })
    : Effect.succeed(provided)
})

/** Creates an empty database, which is dropped with the scope even while something is connected to it. */
export const freshDatabase = Effect.fnUntraced(function*(
  options?: {
    /** Transactions are serializable by default, as an administrator may have set it. Defaults to `false`. */
    readonly serializable?: boolean | undefined
    /** The size of each pool. Defaults to 10. */
    readonly maxConnections?: number | undefined
    /**
     * How many connections each pool opens at once and keeps. Under `TestClock`, one that is opened while the time jumps
     * has taken too long. Defaults to 0.
     */
    readonly minConnections?: number | undefined
  } | undefined
): Effect.fn.Return<FreshDatabase, EmbeddedPostgres.EmbeddedPostgresError, Scope.Scope> {
  const url = yield* EmbeddedPostgres.createDatabase((yield* server).url, {
    settings: options?.serializable === true ? { default_transaction_isolation: "serializable" } : {}
  })
  return {
    url,
    layer: PgClient.layer({
      url: Redacted.make(url),
      maxConnections: options?.maxConnections ?? 10,
      minConnections: options?.minConnections ?? 0
    })
  }
})
