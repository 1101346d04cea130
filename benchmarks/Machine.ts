/**
 * Where it is measured, and with what.
 */
import { Effect } from "effect"
import { readFileSync } from "node:fs"
import { createRequire } from "node:module"
import * as Os from "node:os"
import type * as EmbeddedPostgres from "../support/EmbeddedPostgres.ts"

export interface Machine {
  readonly cpu: string
  readonly cores: number
  readonly memory: number
  /** The load average of the last minute before the start. */
  readonly load: number
  readonly system: string
  /** Name and version of what takes part. */
  readonly versions: ReadonlyArray<readonly [name: string, version: string]>
  /** The server's settings that matter here. */
  readonly settings: ReadonlyArray<readonly [name: string, value: string]>
}

export const describe = Effect.fnUntraced(function*(
  server: EmbeddedPostgres.EmbeddedPostgres,
  pgbench: string | undefined
): Effect.fn.Return<Machine, EmbeddedPostgres.EmbeddedPostgresError> {
  const cpus = Os.cpus()
  const settings = yield* server.execute(
    `SELECT name, current_setting(name) AS value FROM pg_settings WHERE name IN (
      'server_version', 'fsync', 'full_page_writes', 'synchronous_commit', 'shared_buffers', 'max_connections', 'autovacuum'
    ) ORDER BY name`
  )
  const setting = settings.map(({ name, value }) => [String(name), String(value)] as const)
  return {
    cpu: cpus[0]?.model.trim() ?? "unknown",
    cores: Os.availableParallelism(),
    memory: Os.totalmem(),
    load: Os.loadavg()[0],
    system: `${Os.type()} ${Os.release()} ${Os.arch()}`,
    versions: [
      ["Node", process.versions.node],
      ["PostgreSQL", setting.find(([name]) => name === "server_version")?.[1] ?? server.version],
      ["effect", versionOf("effect")],
      ["@effect/sql-pg", versionOf("@effect/sql-pg")],
      ["worklease", JSON.parse(readFileSync(new URL("../package.json", import.meta.url), "utf8")).version as string],
      ["pgbench", pgbench ?? "not found"]
    ],
    settings: setting.filter(([name]) => name !== "server_version")
  }
})

const versionOf = (name: string): string =>
  (createRequire(import.meta.url)(`${name}/package.json`) as { readonly version: string }).version
