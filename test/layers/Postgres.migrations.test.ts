import { PgClient } from "@effect/sql-pg"
import { assert, describe, it } from "@effect/vitest"
import { Duration, Effect, Fiber, Layer, Option, Redacted, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { execFile } from "node:child_process"
import { fileURLToPath } from "node:url"
import { Backend, Checkpoint, Fence, Lease, LeaseError, Work, Worker } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import { freshDatabase } from "../support/Postgres.ts"
import * as Sessions from "../support/Sessions.ts"
import * as TcpProxy from "../support/TcpProxy.ts"

const Count = Work.make("count", Checkpoint.make(Schema.Struct({ n: Schema.Number })))

/** A database's tables, as far as they matter: what two databases with the same ones have in common. */
const tablesOf = (sql: SqlClient.SqlClient) =>
  Effect.all([
    sql.unsafe(`SELECT n.nspname, c.relname, c.reloptions, c.relpersistence, a.attnum::int, a.attname,
        format_type(a.atttypid, a.atttypmod) AS type, a.attnotnull, co.collname::text AS collation,
        pg_get_expr(d.adbin, d.adrelid) AS default_value, a.attidentity::text, a.attgenerated::text
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace JOIN pg_attribute a ON a.attrelid = c.oid
      LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
      LEFT JOIN pg_collation co ON co.oid = a.attcollation
      WHERE n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema' AND c.relkind = 'r'
        AND a.attnum > 0 AND NOT a.attisdropped
      ORDER BY 1, 2, 5`),
    sql.unsafe(`SELECT n.nspname, conname, contype::text, pg_get_constraintdef(k.oid) AS definition
      FROM pg_constraint k JOIN pg_namespace n ON n.oid = k.connamespace
      WHERE n.nspname NOT LIKE 'pg\\_%' AND n.nspname <> 'information_schema' ORDER BY 1, 2`),
    sql.unsafe(`SELECT schemaname, tablename, indexdef FROM pg_indexes
      WHERE schemaname NOT LIKE 'pg\\_%' AND schemaname <> 'information_schema' ORDER BY 3`),
    sql.unsafe(`SELECT schemaname, relname FROM pg_stat_user_tables ORDER BY 1, 2`)
  ])

/** Migrates, over a pool of its own. */
const migrate = (url: string, options: Postgres.Options = {}) =>
  Effect.scoped(Layer.build(
    Layer.fresh(Postgres.layerMigrations(options)).pipe(
      Layer.provide(Layer.fresh(PgClient.layer({ url: Redacted.make(url) })))
    )
  ))

/** Everything that the layer can do. */
const everything = Effect.gen(function*() {
  const backend = yield* Backend.Backend
  const sql = yield* SqlClient.SqlClient
  const first = yield* Lease.acquire(Count.id("a"))
  assert.strictEqual(first.prior.exit, "none")
  yield* Lease.renew(first.token)
  yield* Lease.checkpoint(first.token, { n: 1 })
  assert.deepStrictEqual(yield* Lease.readCheckpoint(first.token), Option.some({ n: 1 }))
  assert.strictEqual((yield* Effect.flip(Lease.acquire(Count.id("a"))))._tag, "LeaseHeld")
  assert.isTrue(yield* Lease.requestYield(Count.id("a"), { deadline: "1 minute" }))
  yield* Lease.release(first.token, "yielded", { n: 2 })
  const seen = yield* Worker.run(
    Count.id("a"),
    Effect.fnUntraced(function*(work) {
      yield* sql.withTransaction(work.checkpoint({ n: 3 }))
      yield* Fence.transaction(work.checkpoint({ n: 4 }), work)
      yield* work.leaveAs("retired")
      return work.prior
    })
  )
  assert.strictEqual(seen.exit, "yielded")
  assert.deepStrictEqual(seen.state, Option.some({ n: 2 }))
  const { prior, token } = yield* Lease.acquire(Count.id("a"))
  assert.strictEqual(prior.exit, "retired")
  assert.deepStrictEqual(prior.state, Option.some({ n: 4 }))
  assert.isTrue(token.fencingToken > first.token.fencingToken)
  // The server's clock, within what a test may take.
  assert.isBelow(Math.abs(token.expiresAt - 30_000 - performance.timeOrigin - performance.now()), 20_000)
  assert.lengthOf(yield* backend.list({ prefix: "count:", after: Option.none(), limit: 10 }), 1)
  assert.lengthOf(yield* backend.list({ prefix: "count:", after: Option.some("count:a"), limit: 10 }), 0)
  yield* Lease.forget(token)
  assert.strictEqual(yield* backend.sweep({ retention: Duration.hours(1), limit: 10 }), 0)
})

describe("Postgres migrations", () => {
  for (const serializable of [false, true]) {
    it.live(
      `8 at once on an empty database all succeed${
        serializable ? ", where transactions are serializable by default" : ""
      }`,
      () =>
        Effect.gen(function*() {
          for (const options of [{}, {}, { schema: "new one" }]) {
            const { url } = yield* freshDatabase({ serializable })
            yield* Effect.forEach(Array.from({ length: 8 }), () => migrate(url, options), { concurrency: "unbounded" })
            const sql = yield* Sessions.session(url)
            const schema = options.schema ?? "public"
            assert.deepStrictEqual(yield* sql.unsafe(`SELECT version FROM "${schema}".worklease_migrations`), [
              { version: 1 },
              { version: 2 }
            ])
            assert.deepStrictEqual(
              yield* sql.unsafe(`SELECT fencing_token FROM "${schema}".worklease_high_water_mark`),
              [{ fencing_token: BigInt(0) }]
            )
          }
        })
    )
  }

  it.live("8 processes at once on an empty database all succeed", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const script = fileURLToPath(new URL("../support/migrator.ts", import.meta.url))
      yield* Effect.forEach(
        Array.from({ length: 8 }),
        () =>
          Effect.callback<void, Error>((resume) => {
            execFile(
              process.execPath,
              ["--no-warnings", script, url],
              (error) => resume(error === null ? Effect.void : Effect.fail(error))
            )
          }),
        { concurrency: "unbounded" }
      )
      yield* Effect.provide(everything, Sessions.process(url))
    }))

  it.live("run again they change nothing, and only read", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const sql = yield* Sessions.session(url)
      yield* migrate(url)
      yield* Effect.provide(Lease.acquire("a"), Sessions.process(url))
      const before = yield* tablesOf(sql)
      const rows = yield* sql.unsafe("SELECT to_jsonb(l)::text AS row FROM worklease l")
      yield* migrate(url)
      yield* sql.unsafe(`ALTER DATABASE "${new URL(url).pathname.slice(1)}" SET default_transaction_read_only = on`)
      yield* migrate(url)
      assert.deepStrictEqual(yield* tablesOf(sql), before)
      assert.deepStrictEqual(yield* sql.unsafe("SELECT to_jsonb(l)::text AS row FROM worklease l"), rows)
    }))

  it.live("one that fails half-way leaves nothing, and the next one succeeds", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const sql = yield* Sessions.session(url)
      yield* sql.unsafe("CREATE TABLE worklease_high_water_mark (something_else text)")
      const error = yield* Effect.flip(migrate(url))
      if (!(error instanceof LeaseError.BackendError)) return assert.fail(String(error))
      assert.strictEqual(error.operation, "migrate")
      assert.strictEqual(error.outcome, "rejected")
      assert.deepStrictEqual(yield* sql.unsafe("SELECT relname FROM pg_stat_user_tables"), [
        { relname: "worklease_high_water_mark" }
      ])
      yield* sql.unsafe("DROP TABLE worklease_high_water_mark")
      yield* migrate(url)
      yield* Effect.provide(everything, Sessions.process(url))
    }))

  it.live("one that vanishes half-way does not keep the others waiting for ever", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const proxy = yield* TcpProxy.make(url)
      yield* proxy.loseReply({ of: "CREATE TABLE", as: "silence" })
      const vanished = yield* Effect.forkChild(Effect.exit(migrate(proxy.url(url))))
      yield* Sessions.eventually("it hangs", Effect.map(proxy.lostReplies, (lost) => lost === 1))
      yield* Effect.timeout(migrate(url), "20 seconds")
      yield* Effect.provide(everything, Sessions.process(url))
      yield* proxy.cut
      yield* Fiber.join(vanished)
    }))

  for (const options of [{}, { schema: "O'Reilly \"x\"", table: "Ta.ble 1" }]) {
    it.live(`migrationSql(${JSON.stringify(options)}), run by hand, does what layerMigrations does`, () =>
      Effect.gen(function*() {
        const byHand = yield* freshDatabase()
        const byLayer = yield* freshDatabase()
        const hand = yield* Sessions.session(byHand.url)
        const statements = Postgres.migrationSql(options).split(/;\s*(?:\n|$)/).filter((statement) =>
          statement.trim() !== ""
        )
        for (const statement of statements) yield* hand.unsafe(statement)
        yield* migrate(byLayer.url, options)
        const layer = yield* Sessions.session(byLayer.url)
        const [columns, constraints, indexes] = yield* tablesOf(layer)
        assert.deepStrictEqual([columns.length > 0, constraints.length > 0, indexes.length], [true, true, 4])
        assert.deepStrictEqual(yield* tablesOf(hand), yield* tablesOf(layer))
        // The layer finds nothing left to do, and works.
        yield* migrate(byHand.url, options)
        assert.deepStrictEqual(yield* tablesOf(hand), yield* tablesOf(layer))
        yield* Effect.provide(everything, Sessions.process(byHand.url, options))
      }))
  }
})

describe("Postgres options", () => {
  const names = [
    { schema: "leases" },
    { table: "leases" },
    { schema: "with.dot", table: "also.with.dot" },
    { schema: "with \"quotes\"", table: "it's `quoted\" too" },
    { schema: " spaces ", table: "and\ttabs\nand lines " },
    { schema: "UPPER", table: "Camel" },
    { schema: "emoji 🦤", table: "grüße-🔒" },
    { schema: "select", table: "table" },
    { schema: "$1", table: "%s; DROP TABLE x; --" },
    { schema: "s".repeat(63), table: "t".repeat(47) }
  ]
  for (const options of names) {
    it.live(`${JSON.stringify(options)} is honoured by the migrations and by every operation`, () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        yield* Effect.provide(everything, Sessions.process(url, options))
        const { schema = "public", table = "worklease" } = options as Postgres.Options
        assert.deepStrictEqual(
          yield* sql.unsafe("SELECT schemaname AS schema, relname AS table FROM pg_stat_user_tables ORDER BY 2"),
          ["", "_high_water_mark", "_migrations", "_waiters"].map((suffix) => ({ schema, table: `${table}${suffix}` }))
        )
      }))
  }

  it.live("two sets of tables in one database are independent", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const sets = [{}, { table: "other" }, { schema: "elsewhere" }, { schema: "elsewhere", table: "other" }]
      for (const options of sets) {
        yield* Effect.gen(function*() {
          const { prior, token } = yield* Lease.acquire(Count.id("a"))
          assert.strictEqual(prior.exit, "none")
          yield* Lease.checkpoint(token, { n: 1 })
          assert.strictEqual((yield* Effect.flip(Lease.acquire(Count.id("a"))))._tag, "LeaseHeld")
        }).pipe(Effect.provide(Sessions.process(url, options)))
      }
      // A token of one means nothing in another.
      yield* Effect.gen(function*() {
        const { token } = yield* Lease.acquire("b")
        const error = yield* Effect.flip(Effect.provide(Lease.renew(token), Sessions.process(url, sets[1])))
        assert.strictEqual(error._tag, "Fenced")
      }).pipe(Effect.provide(Sessions.process(url, sets[0])))
    }))

  it.live("names that do not fit are InvalidConfig, counted in bytes, before anything is sent", () =>
    Effect.gen(function*() {
      const nowhere = PgClient.layer({ url: Redacted.make("postgres://nobody@127.0.0.1:1/nothing") })
      for (
        const [field, options] of [
          ["schema", { schema: "" }],
          ["schema", { schema: "s".repeat(64) }],
          ["schema", { schema: "ü".repeat(32) }],
          ["schema", { schema: "with\0nul" }],
          ["table", { table: "" }],
          ["table", { table: "t".repeat(48) }],
          ["table", { table: "🦤".repeat(12) }],
          ["table", { table: "\0" }]
        ] as const
      ) {
        for (const layer of [Postgres.layerWith, Postgres.layerStorage, Postgres.layerMigrations]) {
          const error = yield* Effect.flip(Layer.build(
            Layer.provide(layer(options) as Layer.Layer<unknown, unknown, SqlClient.SqlClient>, nowhere)
          ))
          if (!(error instanceof LeaseError.InvalidConfig)) return assert.fail(String(error))
          assert.strictEqual(error.field, field)
          assert.include(error.message, "bytes")
        }
        assert.throws(() => Postgres.migrationSql(options), LeaseError.InvalidConfig)
      }
    }))

  describe("roles", () => {
    /** A role of its own that may log in, and nothing more. */
    const roleOf = Effect.fnUntraced(function*(url: string) {
      const sql = yield* Sessions.session(url)
      const database = new URL(url).pathname.slice(1)
      const role = `app_${database}`
      yield* Effect.acquireRelease(
        sql.unsafe(`CREATE ROLE ${role} LOGIN`),
        () => Effect.ignore(Effect.andThen(sql.unsafe(`DROP OWNED BY ${role}`), sql.unsafe(`DROP ROLE ${role}`)))
      )
      yield* sql.unsafe(`REVOKE CREATE ON SCHEMA public FROM PUBLIC`)
      yield* sql.unsafe(`REVOKE CREATE, TEMPORARY ON DATABASE "${database}" FROM PUBLIC`)
      const asRole = new URL(url)
      asRole.username = role
      return { role, sql, url: asRole.href }
    })

    it.live("layerStorage needs SELECT, INSERT, UPDATE and DELETE, and nothing more", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const { role, sql, url: asRole } = yield* roleOf(url)
        yield* migrate(url, { schema: "leases" })
        yield* sql.unsafe(`GRANT USAGE ON SCHEMA leases TO ${role}`)
        yield* sql.unsafe(
          `GRANT SELECT, INSERT, UPDATE, DELETE
            ON leases.worklease, leases.worklease_high_water_mark, leases.worklease_waiters TO ${role}`
        )
        const layer = Lease.layer.pipe(
          Layer.provideMerge(Postgres.layerStorage({ schema: "leases" })),
          Layer.provideMerge(PgClient.layer({ url: Redacted.make(asRole) }))
        )
        yield* Effect.gen(function*() {
          yield* everything
          // A sweep that finds something, too.
          yield* sql.unsafe("UPDATE leases.worklease SET expires_at = now() - interval '2 hours'")
          const backend = yield* Backend.Backend
          assert.strictEqual(yield* backend.sweep({ retention: Duration.zero, limit: 10 }), 1)
        }).pipe(Effect.provide(layer))
      }))

    it.live("layer works for a role that may create nothing, where everything is there already", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const { role, sql, url: asRole } = yield* roleOf(url)
        yield* migrate(url)
        yield* sql.unsafe(`GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO ${role}`)
        yield* Effect.provide(everything, Sessions.process(asRole))
      }))

    it.live("layer creates what is missing in a schema that exists, for a role that may create no schema", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const { role, sql, url: asRole } = yield* roleOf(url)
        yield* sql.unsafe(`CREATE SCHEMA leases`)
        yield* sql.unsafe(`GRANT USAGE, CREATE ON SCHEMA leases TO ${role}`)
        yield* Effect.provide(everything, Sessions.process(asRole, { schema: "leases" }))
      }))
  })

  describe("sessions", () => {
    const settings: ReadonlyArray<Readonly<Record<string, string>>> = [
      { search_path: "nothing_of_that_name" },
      { search_path: "" },
      { DateStyle: "SQL, DMY" },
      { DateStyle: "Postgres, MDY" },
      { TimeZone: "Pacific/Chatham" },
      { TimeZone: "<+14:45>-14:45" },
      { IntervalStyle: "sql_standard" },
      { IntervalStyle: "iso_8601", extra_float_digits: "-15", bytea_output: "escape" },
      { standard_conforming_strings: "off", backslash_quote: "on", escape_string_warning: "off" },
      { default_transaction_deferrable: "on", default_transaction_isolation: "repeatable read" },
      { default_transaction_isolation: "serializable" },
      { plan_cache_mode: "force_generic_plan", enable_seqscan: "off", enable_indexscan: "off" },
      { plan_cache_mode: "force_custom_plan", jit_above_cost: "0", enable_hashjoin: "off", enable_nestloop: "off" },
      { transform_null_equals: "on", array_nulls: "off", quote_all_identifiers: "on" },
      { row_security: "off", lock_timeout: "5s", statement_timeout: "30s", idle_in_transaction_session_timeout: "10s" }
    ]
    for (const startupParameters of settings) {
      it.live(`${JSON.stringify(startupParameters)} changes nothing`, () =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase()
          const layer = Lease.layer.pipe(
            Layer.provideMerge(Postgres.layer),
            Layer.provideMerge(PgClient.layer({ url: Redacted.make(url), startupParameters }))
          )
          const names = SqlClient.SqlClient.use((sql) =>
            sql.unsafe<{ readonly name: string }>("SELECT name FROM pg_settings WHERE source = 'client'")
          )
          yield* Effect.gen(function*() {
            assert.includeMembers((yield* names).map(({ name }) => name), Object.keys(startupParameters))
            yield* everything
          }).pipe(Effect.provide(layer))
        }))
    }

    for (
      const [what, config] of [
        [
          "names that it transforms",
          {
            transformQueryNames: (name: string) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`),
            transformResultNames: (name: string) => name.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase())
          }
        ],
        [
          "names that it spoils",
          { transformQueryNames: (name: string) => `${name}x`, transformResultNames: (name: string) => `x${name}` }
        ],
        ["no prepared statements", { prepare: false }],
        // As behind a pooler: no two statements on the same session.
        ["a new session for each statement", { connectionTTL: 0, prepare: false }],
        ["connections that several fibers share", { multiplex: true }],
        ["a single connection", { maxConnections: 1 }]
      ] as const
    ) {
      it.live(`a client with ${what} changes nothing`, () =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase()
          const layer = Lease.layer.pipe(
            Layer.provideMerge(Postgres.layer),
            Layer.provideMerge(PgClient.layer({ url: Redacted.make(url), ...config }))
          )
          yield* Effect.provide(everything, layer)
        }))
    }
  })
})
