/**
 * PostgreSQL's own benchmark tool, where there is one.
 */
import { Data, Effect, Option, Stream } from "effect"
import { ChildProcess } from "effect/process"
import { existsSync, mkdtempSync, readdirSync, rmSync, writeFileSync } from "node:fs"
import { tmpdir } from "node:os"
import { delimiter, join } from "node:path"
import { connections } from "./Database.ts"

export class PgbenchFailed extends Data.TaggedError("PgbenchFailed")<{ readonly message: string }> {}

const installed = "/usr/lib/postgresql"

/** The newest of a Debian system, or the one on the PATH. */
export const find = (): string | undefined => {
  const versions = existsSync(installed) ? readdirSync(installed).sort((a, b) => Number(b) - Number(a)) : []
  return [
    ...versions.map((version) => join(installed, version, "bin")),
    ...(process.env.PATH ?? "").split(delimiter)
  ].map((directory) => join(directory, "pgbench")).find(existsSync)
}

/** `pgbench (PostgreSQL) 15.18` says `15.18`. */
export const version = (path: string) =>
  run(path, ["--version"]).pipe(
    Effect.map((output) => /\d+(\.\d+)*/.exec(output)?.[0] ?? output.trim()),
    Effect.orElseSucceed(() => "unknown")
  )

/** It knows no others. */
export const wholeSeconds = (seconds: number): number => Math.max(1, Math.round(seconds))

/** Runs a script of one statement over our number of connections: statements per second. */
export const rate = Effect.fnUntraced(function*(options: {
  readonly path: string
  readonly url: string
  readonly script: string
  readonly variables: Readonly<Record<string, string>>
  readonly seconds: number
}) {
  const directory = yield* Effect.acquireRelease(
    Effect.sync(() => mkdtempSync(join(tmpdir(), "worklease-pgbench-"))),
    (directory) => Effect.sync(() => rmSync(directory, { recursive: true, force: true }))
  )
  const file = join(directory, "script.sql")
  writeFileSync(file, options.script)
  const output = yield* run(options.path, [
    "--no-vacuum",
    "--protocol=prepared",
    `--client=${connections}`,
    "--jobs=2",
    `--time=${wholeSeconds(options.seconds)}`,
    `--file=${file}`,
    ...Object.entries(options.variables).map(([name, value]) => `--define=${name}=${value}`),
    options.url
  ])
  return yield* Option.match(perSecond(output), {
    onNone: () => Effect.fail(new PgbenchFailed({ message: `pgbench said no rate:\n${output.trim()}` })),
    onSome: Effect.succeed
  })
}, Effect.scoped)

/** From what it prints at its end. */
export const perSecond = (output: string): Option.Option<number> => {
  if (/number of failed transactions: [1-9]/.test(output)) return Option.none()
  const found = /^tps = ([\d.]+)/m.exec(output)
  return found === null ? Option.none() : Option.some(Number(found[1]))
}

const run = Effect.fnUntraced(function*(path: string, args: ReadonlyArray<string>) {
  const handle = yield* ChildProcess.make(path, args, { stdin: "ignore", killSignal: "SIGKILL" })
  const output = yield* handle.all.pipe(Stream.decodeText, Stream.mkString)
  const code = yield* handle.exitCode
  if (code !== 0) return yield* new PgbenchFailed({ message: `pgbench ended with code ${code}:\n${output.trim()}` })
  return output
}, Effect.scoped)
