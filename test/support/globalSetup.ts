/** Starts one PostgreSQL that all test files share; `Postgres.ts` gives each of them databases of its own. */
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Scope from "effect/Scope"
import type { TestProject } from "vitest/node"
import * as EmbeddedPostgres from "../../support/EmbeddedPostgres.ts"
import * as RedisServer from "../../support/RedisServer.ts"

declare module "vitest" {
  interface ProvidedContext {
    /** Why there is no server, if there is none. */
    readonly postgres: {
      readonly url: string
      readonly version: EmbeddedPostgres.Version
    } | { readonly error: string }
  }
}

export default async (project: TestProject): Promise<() => Promise<void>> => {
  // Where CI is set, its tests run all the same, and fail.
  if (!RedisServer.isAvailable) console.warn(`The Redis backend is not tested here. ${RedisServer.howToGetOne}`)
  const scope = Scope.makeUnsafe()
  await EmbeddedPostgres.start().pipe(
    Effect.match({
      onSuccess: ({ url, version }) => project.provide("postgres", { url, version }),
      // Tests without a database can run all the same.
      onFailure: ({ message }) => project.provide("postgres", { error: message })
    }),
    Scope.provide(scope),
    Effect.runPromise
  )
  return () => Effect.runPromise(Scope.close(scope, Exit.void))
}
