/** A process that owns a PostgreSQL, for tests of what happens when it dies. Prints what it has, then waits. */
import * as Effect from "effect/Effect"
import { writeSync } from "node:fs"
import * as EmbeddedPostgres from "../../support/EmbeddedPostgres.ts"

const options: EmbeddedPostgres.Options = JSON.parse(process.argv[2] ?? "{}")

setInterval(() => {}, 60_000)

Effect.gen(function*() {
  const server = yield* EmbeddedPostgres.start(options)
  const [row] = yield* server.execute("SELECT current_setting('server_version') AS version")
  writeSync(
    1,
    JSON.stringify({
      pid: yield* server.pid,
      directory: server.socketDirectory,
      url: server.url,
      uid: process.getuid!(),
      version: row.version
    }) + "\n"
  )
  return yield* Effect.never
}).pipe(Effect.scoped, Effect.runPromise).catch((error) => {
  writeSync(2, String(error))
  process.exit(1)
})
