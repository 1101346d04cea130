import { assert, describe, it } from "@effect/vitest"
import * as Cause from "effect/Cause"
import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as Queue from "effect/Queue"
import * as Reactivity from "effect/reactivity/Reactivity"
import * as SqlClient from "effect/sql/SqlClient"
import type { SqlError } from "effect/sql/SqlError"
import * as Stream from "effect/Stream"
import * as TestClock from "effect/testing/TestClock"
import * as fs from "node:fs"
import * as os from "node:os"
import * as path from "node:path"
import { make, PgliteClient } from "../../src/layers/PgliteClient.ts"
import * as PgliteClientModule from "../../src/layers/PgliteClient.ts"
import { freshDatabase } from "../support/Postgres.ts"

const bytes = (...values: ReadonlyArray<number>) => Uint8Array.from(values)

const code = (error: SqlError): unknown => (error.reason.cause as { readonly code?: unknown }).code

const temporaryDirectory = Effect.acquireRelease(
  Effect.sync(() => fs.mkdtempSync(path.join(os.tmpdir(), "worklease-pglite-"))),
  (directory) => Effect.sync(() => fs.rmSync(directory, { recursive: true, force: true }))
)

/** A copy of the shared database: opens in a fraction of the time of a new one. */
const copy = Effect.gen(function*() {
  const { pglite } = yield* PgliteClient
  return yield* Effect.promise(() => pglite.dumpDataDir("none"))
})

/** Counts the statements that run at the same time on the instance. */
const watch = (client: PgliteClient) => {
  const query = client.pglite.query
  const counts = { running: 0, most: 0, ended: 0 }
  client.pglite.query = async function(...args: Array<any>) {
    counts.most = Math.max(counts.most, ++counts.running)
    try {
      // Time for others to overlap, if they can.
      await new Promise((resolve) => setTimeout(resolve, 5))
      return await query.apply(client.pglite, args as any) as any
    } finally {
      counts.running--
      counts.ended++
    }
  }
  return Effect.as(
    Effect.addFinalizer(() =>
      Effect.sync(() => {
        client.pglite.query = query
      })
    ),
    counts
  )
}

describe("PgliteClient", () => {
  it.layer(PgliteClientModule.layer(), { timeout: "60 seconds" })("in memory", (it) => {
    describe("values", () => {
      it.effect("scalars round-trip", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const rows = yield* sql`SELECT
            ${9223372036854775807n}::bigint AS big, ${1n}::bigint AS small, ${5}::bigint AS number, ${7}::integer AS int,
            ${2.5}::float8 AS float, ${true}::boolean AS bool, ${"é€😀 \\ \" '"}::text AS text, ${null}::text AS nothing,
            ${bytes(0, 1, 92, 255)}::bytea AS bytes, ${bytes()}::bytea AS empty, ${null}::bytea AS "noBytes",
            ${JSON.stringify({ a: ["1", null] })}::jsonb AS json, ${new Date(1234567)}::timestamptz AS instant,
            1.50::numeric AS numeric, ${"12"}::integer AS "fromString"`
          assert.deepStrictEqual(rows, [{
            big: 9223372036854775807n,
            small: 1n,
            number: 5n,
            int: 7,
            float: 2.5,
            bool: true,
            text: "é€😀 \\ \" '",
            nothing: null,
            bytes: bytes(0, 1, 92, 255),
            empty: bytes(),
            noBytes: null,
            json: { a: ["1", null] },
            instant: new Date(1234567),
            numeric: "1.50",
            fromString: 12
          }])
        }))

      it.effect("every byte round-trips", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const all = Uint8Array.from({ length: 256 }, (_, i) => i)
          // A view into a larger buffer must not be sent as the whole of it.
          const view = new Uint8Array(all.buffer, 10, 3)
          const [row] = yield* sql<any>`SELECT ${all}::bytea AS a, ${view}::bytea AS v, ${
            Buffer.from([1, 2])
          }::bytea AS b`
          assert.deepStrictEqual(row, { a: all, v: bytes(10, 11, 12), b: bytes(1, 2) })
        }))

      it.effect("arrays round-trip", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const texts = ["a", null, "x,\"\\{}' NULL", "NULL", "", "é€😀"]
          const bigs = [1n, null, -9223372036854775808n]
          const binary = [bytes(0, 255), null, bytes()]
          const [row] = yield* sql<any>`SELECT ${texts}::text[] AS texts, ${bigs}::bigint[] AS bigs,
            ${binary}::bytea[] AS binary, ${[true, null]}::boolean[] AS bools, ${[]}::bytea[] AS none,
            ${["1", null]}::bigint[] AS strings, ${"{NULL,NULL}"}::bytea[] AS nulls`
          assert.deepStrictEqual(row, {
            texts,
            bigs,
            binary,
            bools: [true, null],
            none: [],
            strings: [1n, null],
            nulls: [null, null]
          })
        }))

      it.effect("a batch goes in as unnest", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const ids = Array.from({ length: 500 }, (_, i) => `work:${i}`)
          const states = ids.map((_, i) => i % 3 === 0 ? null : Uint8Array.from({ length: i }, () => i))
          const rows = yield* sql<any>`SELECT id, state
            FROM unnest(${ids}::text[], ${states}::bytea[]) WITH ORDINALITY AS t(id, state, n) ORDER BY n`
          assert.deepStrictEqual(rows, ids.map((id, i) => ({ id, state: states[i] })))
        }))

      it.effect("a string is refused for bytea, before anything is sent", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const error = yield* Effect.flip(sql`SELECT ${"\\x00"}::bytea`)
          assert.strictEqual(error.reason._tag, "UnknownError")
          assert.strictEqual(code(error), undefined)
          assert.deepStrictEqual(yield* sql`SELECT 1 AS a`, [{ a: 1 }])
        }))
    })

    describe("agreement with sql-pg", () => {
      const all = Uint8Array.from({ length: 256 }, (_, i) => i)
      const statements: ReadonlyArray<readonly [statement: string, ...params: ReadonlyArray<unknown>]> = [
        ["SELECT $1::bigint AS a, $2::bigint AS b, $3::bigint AS c, $4::bigint AS d", 1n, 5, 5_000_000_000, "7"],
        [
          "SELECT $1::integer AS a, $2::smallint AS b, $3::float8 AS c, $4::float8 AS d, $5::numeric AS e",
          1,
          2,
          3,
          4.5,
          "6.70"
        ],
        ["SELECT $1::text AS a, $2::text AS b, $3::text AS c, $4::text AS d", "x", "", "é€😀 \\ \" ' {NULL}", 5],
        ["SELECT $1::boolean AS a, $2::boolean AS b, $3::text AS c, $4::bytea AS d", true, null, null, undefined],
        ["SELECT $1::bytea AS a, $2::bytea AS b, length($1::bytea) AS c", all, new Uint8Array()],
        ["SELECT $1::jsonb AS a, $2::json AS b", JSON.stringify([{ a: "1" }, null]), JSON.stringify("text")],
        ["SELECT $1::timestamptz AS a, extract(epoch FROM $1::timestamptz) AS b", new Date(1_700_000_000_123)],
        ["SELECT $1::uuid AS a, pg_notify('c', 'p') AS b", "6f9619ff-8b86-d011-b42d-00cf4fc964ff"],
        ["SELECT $1::text[] AS a, $2::text[] AS b", ["a", null, "x,\"\\{}' NULL", "NULL", "", "é€😀"], []],
        ["SELECT $1::bigint[] AS a, $2::bigint[] AS b", [1n, null, -9223372036854775808n], ["1", null]],
        [
          "SELECT $1::bytea[] AS a, $2::bytea[] AS b, $3::bytea[] AS c",
          [all, null, new Uint8Array()],
          [],
          "{NULL,NULL}"
        ],
        ["SELECT $1::boolean[] AS a, $2::integer[] AS b, $3::timestamptz[] AS c", [true, null], [1, null], [
          new Date(0),
          null
        ]],
        ["SELECT $1::float8[] AS a, $2::text[] AS b", ["1", null, "2.5"], "{NULL}"],
        [
          "SELECT * FROM unnest($1::text[], $2::bigint[], $3::bytea[], $4::boolean[]) AS t(a, b, c, d)",
          ["x", "y"],
          [1n, null],
          [null, all],
          [true, false]
        ]
      ]

      it.effect("the same statements and parameters answer the same", () =>
        Effect.gen(function*() {
          const pglite = yield* SqlClient.SqlClient
          const { layer } = yield* freshDatabase({ maxConnections: 1 })
          yield* Effect.gen(function*() {
            const postgres = yield* SqlClient.SqlClient
            for (const [statement, ...params] of statements) {
              assert.deepStrictEqual(
                [statement, yield* pglite.unsafe(statement, params)],
                [statement, yield* postgres.unsafe(statement, params)]
              )
            }
          }).pipe(Effect.provide(layer))
        }))
    })

    describe("statements", () => {
      it.effect("compiles PostgreSQL", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          yield* sql`CREATE TABLE ${sql("Quoted \"name\"")} (id integer PRIMARY KEY, "some.name" text)`
          const rows = [{ id: 1, name: "a" }, { id: 2, name: "b" }]
          yield* sql`INSERT INTO ${sql("Quoted \"name\"")} (id, "some.name") SELECT * FROM (VALUES ${
            sql.csv(rows.map((row) => sql`(${row.id}::integer, ${row.name})`))
          }) AS t`
          assert.deepStrictEqual(
            yield* sql`SELECT "some.name" AS name FROM ${sql("Quoted \"name\"")} WHERE ${sql.in("id", [2, 3])}`,
            [{ name: "b" }]
          )
          assert.strictEqual(sql.onDialectOrElse({ pg: () => "pg", orElse: () => "other" }), "pg")
          assert.strictEqual(sql.driver, "pglite")
        }))

      it.effect("inserts and updates records", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          yield* sql`CREATE TABLE records (id integer PRIMARY KEY, name text)`
          assert.deepStrictEqual(
            yield* sql`INSERT INTO records ${sql.insert([{ id: 1, name: "a" }, { id: 2, name: "b" }]).returning("id")}`,
            [{ id: 1 }, { id: 2 }]
          )
          yield* sql`UPDATE records SET name = data.name FROM ${
            sql.updateValues([{ id: 1, name: "c" }], "data")
          } WHERE records.id = data.id::integer`
          yield* sql`UPDATE records SET ${sql.update({ name: "d" })} WHERE id = 2`
          assert.deepStrictEqual(yield* sql`SELECT name FROM records ORDER BY id`, [{ name: "c" }, { name: "d" }])
        }))

      it.effect("values, raw and stream", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const statement = sql<{ n: number }>`SELECT n::integer FROM generate_series(1, 3) AS n`
          assert.deepStrictEqual(yield* statement.values, [[1], [2], [3]])
          assert.deepStrictEqual(yield* statement.unprepared, [{ n: 1 }, { n: 2 }, { n: 3 }])
          assert.deepStrictEqual(yield* Stream.runCollect(statement.stream), [{ n: 1 }, { n: 2 }, { n: 3 }])
          const raw = (yield* statement.raw) as any
          assert.deepStrictEqual([raw.command, raw.rowCount, raw.rows.length], ["SELECT", 3, 3])
          assert.deepStrictEqual(yield* Stream.runCollect(Stream.take(statement.stream, 1)), [{ n: 1 }])
          assert.deepStrictEqual(yield* statement.values, [[1], [2], [3]])
        }))
    })

    describe("errors", () => {
      const cases: ReadonlyArray<readonly [statement: string, tag: string, sqlState: string]> = [
        ["selec", "SqlSyntaxError", "42601"],
        ["SELECT * FROM missing", "SqlSyntaxError", "42P01"],
        ["INSERT INTO errors VALUES (1, 1)", "UniqueViolation", "23505"],
        ["INSERT INTO errors VALUES (2, 0)", "ConstraintError", "23514"],
        ["INSERT INTO errors VALUES (2, NULL)", "ConstraintError", "23502"],
        ["SELECT 1 / 0", "UnknownError", "22012"],
        ["SET ROLE nobody_at_all", "UnknownError", "22023"],
        ["DO $$ BEGIN RAISE EXCEPTION SQLSTATE '08006'; END $$", "ConnectionError", "08006"],
        ["DO $$ BEGIN RAISE EXCEPTION SQLSTATE '28000'; END $$", "AuthenticationError", "28000"],
        ["DO $$ BEGIN RAISE EXCEPTION SQLSTATE '42501'; END $$", "AuthorizationError", "42501"],
        ["DO $$ BEGIN RAISE EXCEPTION SQLSTATE '40001'; END $$", "SerializationError", "40001"],
        ["DO $$ BEGIN RAISE EXCEPTION SQLSTATE '40P01'; END $$", "DeadlockError", "40P01"],
        ["DO $$ BEGIN RAISE EXCEPTION SQLSTATE '55P03'; END $$", "LockTimeoutError", "55P03"],
        ["DO $$ BEGIN RAISE EXCEPTION SQLSTATE '57014'; END $$", "StatementTimeoutError", "57014"]
      ]

      it.effect("are classified as sql-pg does", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          yield* sql`CREATE TABLE errors (id integer CONSTRAINT the_key PRIMARY KEY, n integer NOT NULL CHECK (n > 0))`
          yield* sql`INSERT INTO errors VALUES (1, 1)`
          for (const [statement, tag, sqlState] of cases) {
            const error = yield* Effect.flip(sql.unsafe(statement))
            assert.deepStrictEqual([statement, error.reason._tag, code(error)], [statement, tag, sqlState])
            if (error.reason._tag === "UniqueViolation") assert.strictEqual(error.reason.constraint, "the_key")
          }
        }))

      it.effect("do not carry the statement's values", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const error = yield* Effect.flip(sql`SELECT ${"secret"}::text, 1 / 0`)
          assert.notInclude(JSON.stringify(Object.entries(error.reason.cause as object)), "secret")
        }))
    })

    describe("transactions", () => {
      const table = Effect.fnUntraced(function*(name: string) {
        const sql = yield* SqlClient.SqlClient
        yield* sql`CREATE TABLE ${sql(name)} (id integer PRIMARY KEY)`
        return {
          sql,
          insert: (id: number) => sql`INSERT INTO ${sql(name)} VALUES (${id})`,
          ids: Effect.map(
            sql<{ id: number }>`SELECT id FROM ${sql(name)} ORDER BY id`,
            (rows) => rows.map((row) => row.id)
          )
        }
      })

      it.effect("commit, and roll back on failure", () =>
        Effect.gen(function*() {
          const { ids, insert, sql } = yield* table("transactions")
          assert.strictEqual(yield* sql.withTransaction(Effect.as(insert(1), "done")), "done")
          assert.strictEqual(
            yield* Effect.flip(sql.withTransaction(Effect.andThen(insert(2), Effect.fail("no")))),
            "no"
          )
          const exit = yield* Effect.exit(sql.withTransaction(Effect.andThen(insert(3), Effect.die("never"))))
          assert.isTrue(Exit.hasDies(exit))
          const error = yield* Effect.flip(sql.withTransaction(Effect.andThen(insert(4), insert(1))))
          assert.strictEqual(error.reason._tag, "UniqueViolation")
          assert.deepStrictEqual(yield* ids, [1])
        }))

      it.effect("roll back on interruption", () =>
        Effect.gen(function*() {
          const { ids, insert, sql } = yield* table("interruption")
          const inserted = yield* Deferred.make<void>()
          const fiber = yield* sql.withTransaction(
            insert(1).pipe(Effect.andThen(Deferred.succeed(inserted, void 0)), Effect.andThen(Effect.never))
          ).pipe(Effect.forkChild)
          yield* Deferred.await(inserted)
          yield* Fiber.interrupt(fiber)
          assert.deepStrictEqual(yield* ids, [])
        }))

      it.effect("nest as savepoints", () =>
        Effect.gen(function*() {
          const { ids, insert, sql } = yield* table("savepoints")
          yield* sql.withTransaction(Effect.gen(function*() {
            yield* insert(1)
            yield* Effect.flip(sql.withTransaction(Effect.andThen(insert(2), insert(2))))
            yield* sql.withTransaction(insert(3))
            yield* Effect.ignore(sql.withTransaction(Effect.andThen(sql.withTransaction(insert(4)), Effect.fail("no"))))
          }))
          assert.deepStrictEqual(yield* ids, [1, 3])
        }))

      it.effect("run afterCommit only once committed", () =>
        Effect.gen(function*() {
          const { ids, insert, sql } = yield* table("after_commit")
          const events: Array<string> = []
          const event = (name: string) => sql.afterCommit(Effect.sync(() => events.push(name)))
          yield* sql.withTransaction(Effect.gen(function*() {
            yield* insert(1)
            yield* sql.afterCommit(Effect.orDie(Effect.map(ids, (ids) => events.push(`outer ${ids}`))))
            yield* Effect.ignore(sql.withTransaction(Effect.andThen(event("dropped"), Effect.fail("no"))))
            yield* sql.withTransaction(event("inner"))
            events.push("body")
          }))
          yield* Effect.ignore(sql.withTransaction(Effect.andThen(event("dropped"), Effect.fail("no"))))
          assert.deepStrictEqual(events, ["body", "outer 1", "inner"])
        }))

      it.effect("begin as BeginTransaction says", () =>
        Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const level = sql`SELECT current_setting('transaction_isolation') AS level`
          const rows = yield* sql.withTransaction(level).pipe(
            Effect.provideService(SqlClient.BeginTransaction, "BEGIN ISOLATION LEVEL SERIALIZABLE")
          )
          assert.deepStrictEqual(rows, [{ level: "serializable" }])
          assert.deepStrictEqual(yield* sql.withTransaction(level), [{ level: "read committed" }])
        }))

      it.effect("fail when the COMMIT rolled back", () =>
        Effect.gen(function*() {
          const { ids, insert, sql } = yield* table("aborted")
          const events: Array<string> = []
          const error = yield* Effect.flip(sql.withTransaction(Effect.gen(function*() {
            yield* insert(1)
            yield* sql.afterCommit(Effect.sync(() => events.push("committed")))
            // The caller caught it; PostgreSQL has not forgotten.
            yield* Effect.ignore(insert(1))
          })))
          assert.deepStrictEqual([error.reason._tag, error.reason.operation], ["UnknownError", "commit"])
          assert.deepStrictEqual(events, [])
          assert.deepStrictEqual(yield* ids, [])
          yield* sql.withTransaction(insert(2))
          assert.deepStrictEqual(yield* ids, [2])
        }))

      it.effect("fail when the COMMIT fails, and leave the session usable", () =>
        Effect.gen(function*() {
          const { ids, insert, sql } = yield* table("deferred_parent")
          yield* sql`CREATE TABLE deferred_child (
            id integer REFERENCES deferred_parent DEFERRABLE INITIALLY DEFERRED
          )`
          const error = yield* Effect.flip(sql.withTransaction(sql`INSERT INTO deferred_child VALUES (7)`))
          assert.strictEqual(error.reason._tag, "ConstraintError")
          assert.strictEqual(code(error), "23503")
          yield* sql.withTransaction(insert(1))
          assert.deepStrictEqual(yield* ids, [1])
        }))

      it.effect("keep other fibers out, which can be interrupted while they wait", () =>
        Effect.gen(function*() {
          const { ids, insert, sql } = yield* table("exclusion")
          const inserted = yield* Deferred.make<void>()
          const finish = yield* Deferred.make<void>()
          const transaction = yield* sql.withTransaction(
            insert(1).pipe(
              Effect.andThen(Deferred.succeed(inserted, void 0)),
              Effect.andThen(Deferred.await(finish)),
              Effect.andThen(Effect.fail("no"))
            )
          ).pipe(Effect.exit, Effect.forkChild)
          yield* Deferred.await(inserted)
          const impatient = yield* Effect.forkChild(insert(2), { startImmediately: true })
          const patient = yield* Effect.forkChild(insert(3), { startImmediately: true })
          const reader = yield* Effect.forkChild(sql.withTransaction(ids), { startImmediately: true })
          yield* Fiber.interrupt(impatient)
          yield* Deferred.succeed(finish, void 0)
          yield* Fiber.join(transaction)
          yield* Fiber.join(patient)
          assert.deepStrictEqual(yield* Fiber.join(reader), [3])
        }))

      it.effect("an interrupted statement ends before the session is used again", () =>
        Effect.gen(function*() {
          const client = yield* PgliteClient
          const { ids, insert, sql } = yield* table("overlap")
          const counts = yield* watch(client)
          const statement = yield* Effect.forkChild(insert(1), { startImmediately: true })
          const next = yield* Effect.forkChild(ids, { startImmediately: true })
          assert.strictEqual(counts.running, 1)
          yield* Fiber.interrupt(statement)
          assert.isAtLeast(counts.ended, 1)
          assert.deepStrictEqual(yield* Fiber.join(next), [1])

          const inTransaction = yield* Effect.forkChild(sql.withTransaction(insert(2)), { startImmediately: true })
          while (counts.running === 0) yield* Effect.yieldNow
          yield* Fiber.interrupt(inTransaction)
          assert.strictEqual(counts.running, 0)
          assert.isFalse(client.pglite.isInTransaction())
          assert.deepStrictEqual(yield* ids, [1])
          assert.strictEqual(counts.most, 1)
        }))

      it.effect("many fibers, many interruptions", () =>
        Effect.gen(function*() {
          const client = yield* PgliteClient
          const { ids, insert, sql } = yield* table("many")
          const counts = yield* watch(client)
          const committed: Array<number> = []
          yield* Effect.forEach(
            Array.from({ length: 20 }, (_, i) => i),
            (i) =>
              sql.withTransaction(Effect.andThen(insert(i), sql`SELECT 1`)).pipe(
                Effect.andThen(Effect.sync(() => committed.push(i))),
                Effect.timeout(i % 2 === 0 ? "1 minute" : `${i * 7} millis`),
                Effect.exit,
                TestClock.withLive
              ),
            { concurrency: "unbounded" }
          )
          assert.strictEqual(counts.most, 1)
          assert.isFalse(client.pglite.isInTransaction())
          const stored = yield* ids
          // A COMMIT that was sent stands, also when its caller was told otherwise.
          assert.includeMembers([...stored], committed)
          assert.includeMembers(committed, [0, 2, 4, 6, 8, 10, 12, 14, 16, 18])
        }))
    })

    describe("listen", () => {
      it.effect("queues what is committed", () =>
        Effect.gen(function*() {
          const sql = yield* PgliteClient
          const channel = "a.Channel \"x\""
          const queue = yield* sql.listen(channel)
          const inner = yield* Effect.scoped(Effect.gen(function*() {
            const queue = yield* sql.listen(channel)
            yield* sql`SELECT pg_notify(${channel}, ${"first"})`
            return yield* Queue.take(queue)
          }))
          assert.deepStrictEqual(inner, { channel, payload: "first" })
          yield* Effect.ignore(sql.withTransaction(
            Effect.andThen(sql`SELECT pg_notify(${channel}, ${"rolled back"})`, Effect.fail("no"))
          ))
          yield* sql.withTransaction(sql`SELECT pg_notify(${channel}, ${"second"}), pg_notify('other', 'x')`)
          assert.deepStrictEqual(yield* Queue.take(queue), { channel, payload: "first" })
          assert.deepStrictEqual(yield* Queue.take(queue), { channel, payload: "second" })
          assert.strictEqual(yield* Queue.size(queue), 0)
        }))

      it.effect("stops listening with the last scope", () =>
        Effect.gen(function*() {
          const sql = yield* PgliteClient
          const listening = sql`SELECT pg_listening_channels() AS channel`
          const before = yield* listening
          yield* Effect.scoped(Effect.gen(function*() {
            yield* sql.listen("temporary")
            yield* Effect.scoped(sql.listen("temporary"))
            assert.deepInclude(yield* listening, { channel: "temporary" })
          }))
          assert.deepStrictEqual(yield* listening, before)
        }))
    })

    describe("closing", () => {
      it.effect("closes the instance; later statements fail with a typed error", () =>
        Effect.gen(function*() {
          const dump = yield* copy
          const client = yield* Effect.scoped(make({ loadDataDir: dump }))
          assert.isTrue(client.pglite.closed)
          const error = yield* Effect.flip(client`SELECT 1`)
          assert.strictEqual(error.reason._tag, "ConnectionError")
          const exit = yield* Effect.exit(client.withTransaction(client`SELECT 1`))
          assert.isTrue(Exit.isFailure(exit) && !Cause.hasDies(exit.cause))
        }).pipe(Effect.provide(Reactivity.layer)))

      it.effect("an open transaction sees a typed error, and is gone", () =>
        Effect.gen(function*() {
          const dump = yield* copy
          const client = yield* make({ loadDataDir: dump })
          const exit = yield* Effect.exit(client.withTransaction(Effect.gen(function*() {
            yield* client`SELECT 1`
            yield* Effect.promise(() => client.pglite.close())
            yield* client`SELECT 1`
          })))
          assert.isTrue(Exit.isFailure(exit) && !Cause.hasDies(exit.cause) && Cause.hasFails(exit.cause))
        }).pipe(Effect.scoped, Effect.provide(Reactivity.layer)))
    })

    describe("directories", () => {
      it.effect("keep what was committed", () =>
        Effect.gen(function*() {
          const directory = path.join(yield* temporaryDirectory, "database")
          const dump = yield* copy
          yield* Effect.gen(function*() {
            const sql = yield* SqlClient.SqlClient
            yield* sql`CREATE TABLE kept (value bytea)`
            yield* sql`INSERT INTO kept VALUES (${bytes(1, 2)})`
          }).pipe(Effect.provide(PgliteClientModule.layer({ dataDir: directory, loadDataDir: dump })))
          const rows = yield* Effect.flatMap(SqlClient.SqlClient, (sql) => sql`SELECT value FROM kept`).pipe(
            Effect.provide(PgliteClientModule.layer({ dataDir: directory }))
          )
          assert.deepStrictEqual(rows, [{ value: bytes(1, 2) }])
        }))

      it.effect("that cannot be used are a typed error", () =>
        Effect.gen(function*() {
          const directory = yield* temporaryDirectory
          fs.mkdirSync(path.join(directory, "corrupt"))
          fs.writeFileSync(path.join(directory, "corrupt", "PG_VERSION"), "18\n")
          for (const name of ["missing/child", "corrupt"]) {
            const error = yield* Effect.flip(
              Layer.build(PgliteClientModule.layer({ dataDir: path.join(directory, name) }))
            )
            assert.strictEqual(error.reason._tag, "ConnectionError")
            assert.include(error.message, path.join(directory, name))
          }
        }))
    })
  })
})
