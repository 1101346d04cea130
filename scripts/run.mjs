// What the scripts share: running programs, and reporting what came of it.
import { spawnSync } from "node:child_process"
import { readdirSync, realpathSync } from "node:fs"
import { delimiter, dirname, join } from "node:path"
import { fileURLToPath } from "node:url"

export const root = dirname(dirname(fileURLToPath(import.meta.url)))

// As npm sets it for its scripts: so that a script does the same when it is started without npm.
process.env.PATH = join(root, "node_modules", ".bin") + delimiter + process.env.PATH

/** What a step found wrong, as opposed to a mistake in the scripts: its message is all there is to show. */
export class Failure extends Error {}

/** Runs a program in the repository's root to its end. Answers what it printed, or throws that. */
export const run = (command, ...args) => {
  const result = spawnSync(command, args, { cwd: root, encoding: "utf8", shell: process.platform === "win32" })
  if (result.status === 0) return result.stdout
  throw new Failure(`${result.stdout ?? ""}${result.stderr ?? ""}${result.error ?? ""}`.trim())
}

/** Runs a step and prints its name and how it went. The first one that fails ends the process. */
export const report = (name, step) => {
  const started = performance.now()
  try {
    step()
    console.log(`ok    ${name} (${((performance.now() - started) / 1000).toFixed(1)} s)`)
  } catch (error) {
    console.error(`FAIL  ${name}\n\n${error instanceof Failure ? error.message : error.stack}\n`)
    process.exit(1)
  }
}

/** Whether a script was started, and not imported by another one. */
export const isMain = (meta) => meta.filename === realpathSync(process.argv[1])

/** The files under a directory whose names end in `suffix`, as sorted paths relative to it, with slashes. */
export const files = (dir, suffix) =>
  readdirSync(join(root, dir), { recursive: true })
    .map((file) => file.replaceAll("\\", "/"))
    .filter((file) => file.endsWith(suffix))
    .sort()
