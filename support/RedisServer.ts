/**
 * A real Redis or Valkey for tests, examples, the demo and benchmarks.
 *
 * Runs the `redis-server` or `valkey-server` that it finds on the PATH (or
 * that the environment variable `REDIS_SERVER` names), on a free port of the
 * loopback interface and in a temporary directory of its own. Where
 * `REDIS_URL` is set, `url` uses that server instead.
 *
 * A server ends with its scope. It ends too, and its directory goes, when the
 * process that started it dies in any way: the shell that runs it reads a pipe
 * that only that process holds open.
 *
 * Nothing here reads the `Clock`, so servers can be started under `TestClock`.
 */
import * as Data from "effect/Data"
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import { type ChildProcess, spawn } from "node:child_process"
import { accessSync, constants } from "node:fs"
import { mkdtemp, readFile } from "node:fs/promises"
import * as Net from "node:net"
import * as Os from "node:os"
import * as Path from "node:path"

/** What could not be done, what the server said, and what to do about it. */
export class RedisServerError extends Data.TaggedError("RedisServerError")<{ readonly message: string }> {}

export interface RedisServer {
  readonly port: number
  readonly url: string
  /** Crashes the server: SIGKILL. */
  readonly kill: Effect.Effect<void>
  /** Stops the server with a signal, so that it answers nothing, or lets it go on. */
  readonly signal: (signal: "SIGSTOP" | "SIGCONT") => Effect.Effect<void>
  /** Kills the server if it is running, and starts it again on the same port and data. */
  readonly restart: Effect.Effect<void, RedisServerError>
  /** Sends one command over a connection of its own, and answers the reply as the protocol has it. */
  readonly command: (...args: ReadonlyArray<string>) => Effect.Effect<string, RedisServerError>
}

export interface Options {
  /** Settings, such as `{ appendonly: "yes" }`. Nothing is written to disk by default. */
  readonly settings?: Readonly<Record<string, string>> | undefined
}

export const howToGetOne = "Install redis-server or valkey-server (on Debian: apt-get install redis-server), " +
  "name one in REDIS_SERVER, or name a running one in REDIS_URL."

/** Where the server's program is, if there is one. */
export const program: string | undefined = process.env.REDIS_SERVER ??
  ["redis-server", "valkey-server"]
    .flatMap((name) => (process.env.PATH ?? "").split(Path.delimiter).map((directory) => Path.join(directory, name)))
    .find((path) => {
      try {
        accessSync(path, constants.X_OK)
        return true
      } catch {
        return false
      }
    })

/** Whether tests of this backend can run here. */
export const isAvailable: boolean = program !== undefined || process.env.REDIS_URL !== undefined

/** The URL of a server for as long as the scope is open: the one that `REDIS_URL` names, or one that is started. */
export const url: Effect.Effect<string, RedisServerError, Scope.Scope> = Effect.suspend(() =>
  process.env.REDIS_URL !== undefined ? Effect.succeed(process.env.REDIS_URL) : Effect.map(start(), (_) => _.url)
)

const shell = `"$@" & pid=$!; echo $pid; cat > /dev/null; kill -9 $pid 2> /dev/null; wait $pid; rm -rf "$WORKLEASE_DIR"`

/** Starts a server for as long as the scope is open. */
export const start = Effect.fnUntraced(function*(
  options?: Options
): Effect.fn.Return<RedisServer, RedisServerError, Scope.Scope> {
  if (program === undefined) {
    return yield* new RedisServerError({ message: `There is no redis-server here. ${howToGetOne}` })
  }
  const path = program
  const directory = yield* Effect.promise(() => mkdtemp(Path.join(Os.tmpdir(), "worklease-redis-")))
  const [port, clusterPort] = yield* Effect.promise(() => freePorts(2))
  const settings: Record<string, string> = {
    bind: "127.0.0.1",
    port: String(port),
    dir: directory,
    save: "",
    appendonly: "no",
    logfile: Path.join(directory, "server.log"),
    ...options?.settings
  }
  if (settings["cluster-enabled"] === "yes") settings["cluster-port"] = String(clusterPort)
  const args = Object.entries(settings).flatMap(([name, value]) => [`--${name}`, value])

  let running: { readonly child: ChildProcess; readonly pid: number } | undefined
  const signal = (name: NodeJS.Signals) =>
    Effect.sync(() => {
      if (running === undefined) return
      try {
        process.kill(running.pid, name)
      } catch {
        // It has ended by itself.
      }
    })

  const end = Effect.suspend(() => {
    const child = running?.child
    if (child === undefined) return Effect.void
    running = undefined
    return Effect.promise(() =>
      new Promise<void>((resolve) => {
        if (child.exitCode !== null || child.signalCode !== null) return resolve()
        child.once("exit", () => resolve())
        child.stdin!.end()
      })
    )
  })

  const begin = Effect.tryPromise({
    try: async () => {
      const child = spawn("sh", ["-c", shell, "sh", path, ...args], {
        stdio: ["pipe", "pipe", "ignore"],
        // A signal for the group of the process that started it must not end the shell before it has cleaned up.
        detached: true,
        // Only the last one takes it away.
        env: { ...process.env, WORKLEASE_DIR: directory }
      })
      const pid = await new Promise<number>((resolve, reject) => {
        child.once("error", reject)
        child.stdout!.once("data", (data) => resolve(Number(String(data))))
      })
      running = { child, pid }
      for (let i = 0; i < 600; i++) {
        const reply = await roundTrip(port, ["PING"]).catch(() => "")
        if (reply.startsWith("+PONG")) return
        await new Promise((resolve) => setTimeout(resolve, 25))
      }
      throw new Error(await readFile(settings.logfile, "utf8").catch(() => "no log"))
    },
    catch: (error) => new RedisServerError({ message: `${path} does not start: ${String(error)}` })
  })

  yield* Effect.acquireRelease(begin, () => end)

  const kill = Effect.andThen(
    signal("SIGKILL"),
    Effect.promise(async () => {
      while (await roundTrip(port, ["PING"]).then(() => true, () => false)) {
        await new Promise((resolve) => setTimeout(resolve, 5))
      }
    })
  )

  return {
    port,
    url: `redis://127.0.0.1:${port}`,
    kill,
    signal,
    restart: Effect.suspend(() => {
      const before = running?.child
      // The shell would take the directory away.
      return Effect.andThen(kill, Effect.andThen(Effect.sync(() => before?.kill("SIGKILL")), begin))
    }),
    command: (...args) =>
      Effect.tryPromise({
        try: () => roundTrip(port, args),
        catch: (error) => new RedisServerError({ message: String(error) })
      })
  }
})

/** Three masters, each with a third of the slots. */
export const startCluster = Effect.gen(function*() {
  const nodes = yield* Effect.forEach(
    [0, 1, 2],
    () => start({ settings: { "cluster-enabled": "yes", "cluster-node-timeout": "2000" } }),
    { concurrency: "unbounded" }
  )
  const bounds = [0, 5461, 10923, 16384]
  for (const [index, node] of nodes.entries()) {
    yield* node.command("CLUSTER", "SET-CONFIG-EPOCH", String(index + 1))
    yield* node.command("CLUSTER", "ADDSLOTSRANGE", String(bounds[index]), String(bounds[index + 1] - 1))
  }
  const buses = yield* Effect.forEach(
    nodes,
    (node) => Effect.map(node.command("CONFIG", "GET", "cluster-port"), (reply) => reply.trim().split("\r\n").at(-1)!)
  )
  for (const node of nodes.slice(1)) {
    yield* node.command("CLUSTER", "MEET", "127.0.0.1", String(nodes[0].port), buses[0])
  }
  for (const node of nodes) {
    yield* Effect.tryPromise({
      try: async () => {
        for (let i = 0; i < 800; i++) {
          const info = await roundTrip(node.port, ["CLUSTER", "INFO"])
          if (/cluster_state:ok/.test(info) && /cluster_known_nodes:3/.test(info)) return
          await new Promise((resolve) => setTimeout(resolve, 25))
        }
        throw new Error("The nodes do not find each other")
      },
      catch: (error) => new RedisServerError({ message: String(error) })
    })
  }
  return nodes
})

const freePorts = async (count: number): Promise<ReadonlyArray<number>> => {
  const servers = await Promise.all(Array.from({ length: count }, () =>
    new Promise<Net.Server>((resolve, reject) => {
      const server = Net.createServer()
      server.once("error", reject)
      server.listen(0, "127.0.0.1", () => resolve(server))
    })))
  const ports = servers.map((server) => (server.address() as Net.AddressInfo).port)
  await Promise.all(servers.map((server) => new Promise((resolve) => server.close(resolve))))
  return ports
}

/** One command over a connection of its own. The reply is complete when nothing more comes for a moment. */
const roundTrip = (port: number, args: ReadonlyArray<string>): Promise<string> =>
  new Promise((resolve, reject) => {
    const socket = Net.connect(port, "127.0.0.1")
    let reply = ""
    socket.setTimeout(2000, () => socket.destroy(new Error("no answer")))
    socket.once("error", reject)
    socket.once("close", () => reject(new Error("closed")))
    socket.on("data", (data) => {
      reply += String(data)
      socket.setTimeout(20, () => {
        resolve(reply)
        socket.destroy()
      })
    })
    socket.write(
      `*${args.length}\r\n${args.map((arg) => `$${Buffer.byteLength(arg)}\r\n${arg}\r\n`).join("")}`
    )
  })
