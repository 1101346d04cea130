// Measures the peers, one after the other, and prints the figures as one JSON document. See README.md.
//
//   node benchmarks/peers/run.mjs [--quick|--full] --postgres <url> [--redis <url>] [--only <name>]...
import * as Effect from "effect/Effect"
import { fork, spawn } from "node:child_process"
import { existsSync, readdirSync, readFileSync } from "node:fs"
import { join } from "node:path"
import { pathToFileURL } from "node:url"
import { parseArgs } from "node:util"
import { createDatabase } from "../../support/EmbeddedPostgres.ts"
import { startRedis } from "./redis.mjs"

const directory = import.meta.dirname
const names = readdirSync(directory).filter((name) => existsSync(join(directory, name, "peer.mjs"))).sort()

const usage = (problem) => {
  console.error(`${problem}

node benchmarks/peers/run.mjs [--quick|--full] --postgres <url> [--redis <url>] [--only <name>]...

  --quick     measures each peer for about 2.5 seconds (the default)
  --full      measures each peer for about 15 seconds
  --postgres  a server on which a database may be created for each peer
  --redis     a Redis, also REDIS_URL; without either one is started, where redis-server is installed
  --only      measures this peer only: ${names.join(", ")}`)
  process.exit(2)
}

const readOptions = () => {
  try {
    return parseArgs({
      options: {
        quick: { type: "boolean" },
        full: { type: "boolean" },
        postgres: { type: "string" },
        redis: { type: "string" },
        only: { type: "string", multiple: true }
      }
    }).values
  } catch (error) {
    return usage(error.message)
  }
}
const options = readOptions()
if (options.quick && options.full) usage("Either --quick or --full")
const unknown = options.only?.find((name) => !names.includes(name))
if (unknown !== undefined) usage(`There is no peer ${unknown}`)
const seconds = options.full ? 15 : 2.4
const timeLimit = (30 + seconds * 4) * 1000

const stopped = new AbortController()
process.once("SIGINT", () => stopped.abort())
process.once("SIGTERM", () => stopped.abort())

const say = (name, text) => process.stderr.write(`peers: ${name}: ${text}\n`)
const readJson = (...path) => JSON.parse(readFileSync(join(directory, ...path), "utf8"))

/** Runs a process to its end or to the time limit. Answers its exit code and the end of what it printed. */
const ended = (child, limit) =>
  new Promise((resolve) => {
    let said = ""
    for (const stream of [child.stdout, child.stderr]) {
      stream.setEncoding("utf8").on("data", (text) => {
        said = (said + text).slice(-2_000)
      })
    }
    const kill = () => child.kill("SIGKILL")
    let late = false
    const timer = setTimeout(() => {
      late = true
      kill()
    }, limit)
    stopped.signal.addEventListener("abort", kill)
    const answer = (code) => {
      clearTimeout(timer)
      stopped.signal.removeEventListener("abort", kill)
      resolve({ code, late, said: said.trim() })
    }
    child.once("close", answer)
    child.once("error", (error) => {
      said += error.message
      answer(undefined)
    })
  })

/** Compares contents, as `scripts/setup.mjs` does. */
const installed = (name) => {
  try {
    const have = readJson(name, "node_modules", ".package-lock.json").packages
    return Object.entries(readJson(name, "package-lock.json").packages).every(([path, wanted]) =>
      path === "" || wanted.optional || have[path]?.version === wanted.version
    )
  } catch {
    return false
  }
}

/** Answers what went wrong, or `undefined`. No dependency of a peer needs a script to be run for its installation. */
const install = async (name) => {
  if (installed(name)) return undefined
  say(name, "installing its dependencies")
  const cwd = join(directory, name)
  // The prefix is said out loud: `npm run` has told its children that of the repository.
  const args = ["ci", "--prefix", cwd, "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
  const [command, first] = process.env.npm_execpath === undefined
    ? ["npm", []]
    : [process.execPath, [process.env.npm_execpath]]
  const result = await ended(spawn(command, [...first, ...args], { cwd, stdio: ["ignore", "pipe", "pipe"] }), 300_000)
  if (result.code === 0) return undefined
  return `its dependencies could not be installed${result.late ? " within 300 s" : ""}\n${result.said}`
}

/** Answers what the child measured, or an error. */
const measure = async (name, servers) => {
  const script = pathToFileURL(join(directory, name, "peer.mjs")).href
  const child = fork(join(directory, "child.mjs"), [script, JSON.stringify({ ...servers, seconds })], {
    cwd: join(directory, name),
    stdio: ["ignore", "pipe", "pipe", "ipc"]
  })
  let answer
  child.on("message", (message) => {
    if (message.progress === undefined) answer = message
    else say(name, message.progress)
  })
  const result = await ended(child, timeLimit)
  if (answer?.error !== undefined) say(name, result.said)
  if (answer !== undefined) return answer
  const how = result.late ? `did not end within ${timeLimit / 1000} s` : `ended without figures (exit ${result.code})`
  return { error: `the measurement ${how}\n${result.said}`.trim() }
}

let redis
const servers = {
  postgres: (use) => {
    if (options.postgres === undefined) return Promise.resolve({ error: "no PostgreSQL: give its URL with --postgres" })
    return createDatabase(options.postgres).pipe(
      Effect.flatMap((postgres) => Effect.promise(() => use({ postgres }))),
      Effect.scoped,
      Effect.catch((error) => Effect.succeed({ error: `no database: ${error.message}` })),
      Effect.runPromise
    )
  },
  redis: async (use) => {
    const url = options.redis ?? process.env.REDIS_URL
    redis ??= url ? { url } : await startRedis()
    return redis.url === undefined ? { error: redis.error } : use({ redis: redis.url })
  }
}

const runPeer = async (name) => {
  const { about } = await import(pathToFileURL(join(directory, name, "peer.mjs")).href)
  const problem = await install(name)
  const result = problem === undefined
    ? await servers[about.server]((server) => measure(name, server))
    : { error: problem }
  for (const { label, value, unit } of result.figures ?? []) say(name, `${label}: ${Math.round(value)} ${unit}`)
  if (result.error !== undefined) say(name, result.error)
  return {
    name: about.package,
    version: readJson(name, "package.json").dependencies[about.package],
    operation: result.on === undefined ? about.operation : `${about.operation}, on ${result.on}`,
    figures: result.figures ?? [],
    comparedWith: about.comparedWith,
    comparable: about.comparable,
    notComparable: about.notComparable,
    ...(result.error === undefined ? undefined : { error: result.error })
  }
}

const peers = []
for (const name of options.only ?? names) {
  if (!stopped.signal.aborted) peers.push(await runPeer(name))
}
await redis?.stop?.()
if (stopped.signal.aborted) process.exit(130)
console.log(JSON.stringify({ peers }, undefined, 2))
