/**
 * PGlite, PostgreSQL inside the process, as an Effect `SqlClient`.
 *
 * SQL that runs over `@effect/sql-pg` runs here too: the dialect is `pg`, and
 * parameters, results and errors have the same JavaScript types as there, as
 * far as both clients allow.
 *
 * **Details**
 *
 * The same statement with the same parameters means the same to both clients
 * when every parameter is cast in the SQL (`$1::bigint`, `$2::text[]`), and is
 * one of these:
 *
 * - `string`, `boolean`, `bigint`, `Date`, `null`, an integer `number`.
 * - `Uint8Array` for `bytea`: PGlite refuses the `\x…` string that sql-pg takes.
 * - `JSON.stringify(value)` for `jsonb`: sql-pg refuses a plain object.
 * - arrays of `string`, `bigint`, `boolean`, `Date` or `Uint8Array`, where
 *   elements may be `null`. sql-pg infers the type of an array from its
 *   elements: one that holds only nulls must be sent as the string
 *   `{NULL,NULL}`, which both pass through, and numbers must not mix int4 with
 *   int8 or float8.
 *
 * Results agree for `bigint` (a JavaScript `bigint`), the integers and floats,
 * `boolean`, `text`, `uuid`, `numeric` (a string), `bytea` (a `Uint8Array`),
 * `jsonb` (parsed), `timestamptz` (a `Date`) and arrays of these, but not for
 * `interval`, `inet`, or `infinity`.
 *
 * **Gotchas**
 *
 * PGlite has one session. A transaction holds it until it ends, so other
 * fibers' statements wait, and there is no true contention to test. It cannot
 * cancel a statement: an interrupted one runs to its end before anything else
 * does. It runs on the calling thread, which a slow statement blocks. The
 * settings that let a server end a session (`transaction_timeout`,
 * `idle_in_transaction_session_timeout`, `idle_session_timeout`) must stay 0:
 * PGlite 0.5 runs for ever in its own loop when one of them passes, and the
 * thread with it.
 *
 * A directory must not be opened twice at the same time; nothing prevents it.
 *
 * @stability unstable
 * @since 0.1.0
 */

import { PGlite, type Results } from "@electric-sql/pglite"
import * as Context from "effect/Context"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Queue from "effect/Queue"
import * as Reactivity from "effect/reactivity/Reactivity"
import type * as Scope from "effect/Scope"
import * as Semaphore from "effect/Semaphore"
import * as Client from "effect/sql/SqlClient"
import type { Connection } from "effect/sql/SqlConnection"
import * as SqlError from "effect/sql/SqlError"
import * as Statement from "effect/sql/Statement"
import * as Stream from "effect/Stream"

/**
 * The runtime type identifier for `PgliteClient`.
 *
 * @stability unstable
 * @category type IDs
 * @since 0.1.0
 */
export const TypeId: TypeId = "~worklease/layers/PgliteClient"

/**
 * The type-level identifier for `PgliteClient`.
 *
 * @stability unstable
 * @category type IDs
 * @since 0.1.0
 */
export type TypeId = "~worklease/layers/PgliteClient"

/**
 * A notification received from `NOTIFY` or `pg_notify`.
 *
 * @stability unstable
 * @category models
 * @since 0.1.0
 */
export interface Notification {
  readonly channel: string
  readonly payload: string
}

/**
 * A `SqlClient` over one PGlite instance.
 *
 * @stability unstable
 * @category models
 * @since 0.1.0
 */
export interface PgliteClient extends Client.SqlClient {
  readonly [TypeId]: TypeId
  /**
   * The instance itself. Statements run on it directly do not wait for an open
   * transaction: they become part of it.
   */
  readonly pglite: PGlite
  /**
   * Queues the channel's notifications until the scope closes. Called inside a
   * transaction, it takes effect when that commits.
   */
  readonly listen: (
    channel: string
  ) => Effect.Effect<Queue.Dequeue<Notification, SqlError.SqlError>, SqlError.SqlError, Scope.Scope>
}

/**
 * The service tag for `PgliteClient`.
 *
 * @stability unstable
 * @category services
 * @since 0.1.0
 */
export const PgliteClient: Context.Service<PgliteClient, PgliteClient> = Context.Service<PgliteClient>(
  "worklease/layers/PgliteClient"
)

/**
 * Where the database is kept.
 *
 * @stability unstable
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /**
   * A directory, or another location that PGlite knows (`idb://name`). Created
   * when missing, but not its parents. By default the database is in memory,
   * and gone when the scope closes.
   */
  readonly dataDir?: string | undefined
  /**
   * A dump of `PGlite.dumpDataDir` to begin with. It fails when `dataDir`
   * already holds a database.
   */
  readonly loadDataDir?: Blob | undefined
  /**
   * Answers before changes have reached the file system, where that is
   * asynchronous (`idb://`). Defaults to `false`.
   */
  readonly relaxedDurability?: boolean | undefined
  /** Attributes added to the span of every statement. */
  readonly spanAttributes?: Readonly<Record<string, unknown>> | undefined
}

/**
 * Opens a database for as long as the scope is open.
 *
 * Fails with a `SqlError` whose reason is a `ConnectionError` when it cannot
 * be opened.
 *
 * @stability unstable
 * @category constructors
 * @since 0.1.0
 */
export const make = Effect.fnUntraced(function*(
  options?: Options | undefined
): Effect.fn.Return<PgliteClient, SqlError.SqlError, Scope.Scope | Reactivity.Reactivity> {
  const pglite = yield* Effect.acquireRelease(open(options), close)
  const semaphore = Semaphore.makeUnsafe(1)
  const connection = makeConnection(pglite)
  const { acquirer, borrower, isTransaction, transactionAcquirer } = Client.makeSqliteAcquirers({
    connection: Effect.succeed(connection),
    semaphore,
    isTransaction: () => !pglite.closed && pglite.isInTransaction()
  })

  const client = yield* Client.make({
    acquirer,
    borrower,
    transactionAcquirer,
    isTransaction,
    // No `onCommitFailure`: after a failed COMMIT, PostgreSQL has no transaction left to clean up.
    commit,
    releaseSavepoint: (name) => `RELEASE SAVEPOINT ${name}`,
    compiler: makeCompiler(),
    driver: "pglite",
    spanAttributes: [
      ...Object.entries(options?.spanAttributes ?? {}),
      ["db.system.name", "postgresql"],
      ["db.namespace", "postgres"]
    ]
  })

  const listeners = new Map<string, number>()
  const listen: PgliteClient["listen"] = Effect.fnUntraced(function*(channel) {
    const queue = yield* Queue.make<Notification, SqlError.SqlError>()
    yield* Effect.addFinalizer(() => Queue.shutdown(queue))
    yield* Effect.acquireRelease(
      Effect.sync(() =>
        pglite.onNotification((from, payload) => {
          if (from === channel) Queue.offerUnsafe(queue, { channel, payload })
        })
      ),
      (off) => Effect.sync(off)
    )
    yield* Effect.acquireRelease(
      Effect.tap(client.unsafe(`LISTEN ${quote(channel)}`), () =>
        Effect.sync(() => {
          listeners.set(channel, (listeners.get(channel) ?? 0) + 1)
        })),
      () =>
        Effect.suspend(() => {
          const rest = (listeners.get(channel) ?? 1) - 1
          if (rest > 0) {
            listeners.set(channel, rest)
            return Effect.void
          }
          listeners.delete(channel)
          return Effect.ignoreCause(client.unsafe(`UNLISTEN ${quote(channel)}`))
        })
    )
    return queue
  })

  return Object.assign(client, { [TypeId]: TypeId, pglite, listen })
})

/**
 * Provides a `SqlClient` on a PGlite database, and the `PgliteClient` itself.
 *
 * **Example** (A database in memory)
 *
 * ```ts import.meta.vitest
 * import { Effect } from "effect"
 * import { SqlClient } from "effect/sql"
 * import * as PgliteClient from "worklease/layers/PgliteClient"
 *
 * const program = Effect.gen(function*() {
 *   const sql = yield* SqlClient.SqlClient
 *   return yield* sql`SELECT ${[1n, 2n]}::bigint[] AS "values"`
 * }).pipe(Effect.provide(PgliteClient.layer()))
 *
 * await Effect.runPromise(program) // => [{ values: [1n, 2n] }]
 * ```
 *
 * @stability unstable
 * @category layers
 * @since 0.1.0
 */
export const layer = (
  options?: Options | undefined
): Layer.Layer<PgliteClient | Client.SqlClient, SqlError.SqlError> =>
  Layer.effectContext(
    Effect.map(make(options), (client) =>
      Context.make(PgliteClient, client).pipe(
        Context.add(Client.SqlClient, client)
      ))
  ).pipe(Layer.provide(Reactivity.layer))

/**
 * Creates the statement compiler: PostgreSQL's dialect, for a client without
 * typed parameters.
 *
 * @stability unstable
 * @category constructors
 * @since 0.1.0
 */
export const makeCompiler = (): Statement.Compiler =>
  Statement.makeCompiler({
    dialect: "pg",
    placeholder(index) {
      return `$${index}`
    },
    onIdentifier: escape,
    onRecordUpdate(placeholders, alias, columns, values, returning) {
      return [
        `(values ${placeholders}) AS ${alias}${columns}${returning ? ` RETURNING ${returning[0]}` : ""}`,
        returning ? values.flat().concat(returning[1]) : values.flat()
      ]
    },
    // The one custom segment of the dialect is sql-pg's `json`.
    onCustom(type, placeholder) {
      return [placeholder(undefined), [JSON.stringify(type.paramA)]]
    }
  })

// internal

const escape = Statement.defaultEscape("\"")

// Unlike `escape`, a dot is part of the name.
const quote = (name: string): string => `"${name.replaceAll("\"", "\"\"")}"`

const open = (options: Options | undefined): Effect.Effect<PGlite, SqlError.SqlError> =>
  Effect.tryPromise({
    try: () =>
      PGlite.create({
        ...(options?.dataDir === undefined ? undefined : { dataDir: options.dataDir }),
        ...(options?.loadDataDir === undefined ? undefined : { loadDataDir: options.loadDataDir }),
        relaxedDurability: options?.relaxedDurability ?? false,
        // sql-pg answers a bigint whatever its size; PGlite's own bytea codec is several times slower.
        parsers: { [int8]: BigInt, [bytea]: bytesFromHex },
        serializers: { [bytea]: bytesToHex }
      }),
    catch: (cause) =>
      new SqlError.SqlError({
        reason: new SqlError.ConnectionError({
          cause,
          message: options?.dataDir === undefined
            ? "PgliteClient: Failed to open a database in memory"
            : `PgliteClient: Failed to open ${options.dataDir}, which must be a writable directory, ` +
              "empty or with a database in it",
          operation: "connect"
        })
      })
  })

const close = (pglite: PGlite): Effect.Effect<void> =>
  Effect.tryPromise(() => pglite.closed ? Promise.resolve() : pglite.close()).pipe(
    Effect.ignoreCause({ log: "Warn", message: "PgliteClient: Failed to close the database" })
  )

/**
 * PGlite cannot cancel, so a statement must be left to end before the session
 * is given to another fiber.
 */
const run = (
  pglite: PGlite,
  statement: string,
  params: ReadonlyArray<unknown>,
  rowMode: "object" | "array"
): Effect.Effect<Results<any>, SqlError.SqlError> =>
  Effect.uninterruptible(Effect.tryPromise({
    try: () => pglite.query<any>(statement, params as Array<unknown>, { rowMode }),
    catch: (cause) => new SqlError.SqlError({ reason: classify(pglite, cause) })
  }))

const makeConnection = (pglite: PGlite): Connection => {
  const rows = (statement: string, params: ReadonlyArray<unknown>) =>
    Effect.map(run(pglite, statement, params, "object"), (results) => results.rows)
  const execute: Connection["execute"] = (statement, params, transformRows) =>
    transformRows === undefined ? rows(statement, params) : Effect.map(rows(statement, params), transformRows)
  const executeValues: Connection["executeValues"] = (statement, params) =>
    Effect.map(run(pglite, statement, params, "array"), (results) => results.rows)
  return {
    execute,
    executeUnprepared: execute,
    executeRaw: (statement, params) => run(pglite, statement, params, "object"),
    executeValues,
    executeValuesUnprepared: executeValues,
    // PGlite has the whole result before it answers.
    executeStream: (statement, params, transformRows) =>
      Stream.fromArrayEffect(execute(statement, params, transformRows))
  }
}

/** PostgreSQL answers `ROLLBACK` to the `COMMIT` of an aborted transaction, and no error. */
const commit = (connection: Connection): Effect.Effect<void, SqlError.SqlError> =>
  Effect.flatMap(
    connection.executeRaw("COMMIT", []) as Effect.Effect<Results, SqlError.SqlError>,
    (results) =>
      results.command === "ROLLBACK"
        ? Effect.fail(
          new SqlError.SqlError({
            reason: new SqlError.UnknownError({
              cause: new Error("COMMIT rolled back an aborted transaction"),
              message: "PgliteClient: COMMIT rolled back an aborted transaction",
              operation: "commit"
            })
          })
        )
        : Effect.void
  )

/** As `@effect/sql-pg` does it. */
const classify = (pglite: PGlite, cause: unknown): SqlError.SqlErrorReason => {
  const props = { cause, message: "PgliteClient: Query failed", operation: "query" }
  if (typeof cause !== "object" || cause === null) return new SqlError.UnknownError(props)
  // PGlite adds the values of the statement to its errors, where they would end up in logs.
  if ("params" in cause) delete cause.params
  const code = "code" in cause && typeof cause.code === "string" ? cause.code : undefined
  if (code === undefined) {
    return pglite.ready ? new SqlError.UnknownError(props) : new SqlError.ConnectionError(props)
  }
  if (code.startsWith("08")) return new SqlError.ConnectionError(props)
  if (code.startsWith("28")) return new SqlError.AuthenticationError(props)
  if (code === "42501") return new SqlError.AuthorizationError(props)
  if (code.startsWith("42")) return new SqlError.SqlSyntaxError(props)
  if (code === "23505") {
    const constraint = "constraint" in cause && typeof cause.constraint === "string" ? cause.constraint.trim() : ""
    return new SqlError.UniqueViolation({ ...props, constraint: constraint === "" ? "unknown" : constraint })
  }
  if (code.startsWith("23")) return new SqlError.ConstraintError(props)
  if (code === "40P01") return new SqlError.DeadlockError(props)
  if (code === "40001") return new SqlError.SerializationError(props)
  if (code === "55P03") return new SqlError.LockTimeoutError(props)
  if (code === "57014") return new SqlError.StatementTimeoutError(props)
  return new SqlError.UnknownError(props)
}

const bytea = 17
const int8 = 20

const hexDigits = new TextEncoder().encode("0123456789abcdef")
const hexValues = Uint8Array.from({ length: 128 }, (_, code) => Math.max(0, hexDigits.indexOf(code)))
const ascii = new TextDecoder()

const bytesToHex = (bytes: unknown): string => {
  if (!(bytes instanceof Uint8Array)) throw new TypeError("Expected a Uint8Array for bytea")
  const hex = new Uint8Array(2 + bytes.length * 2)
  hex[0] = 0x5c
  hex[1] = 0x78
  for (let i = 0, j = 2; i < bytes.length; i++, j += 2) {
    hex[j] = hexDigits[bytes[i] >> 4]
    hex[j + 1] = hexDigits[bytes[i] & 15]
  }
  return ascii.decode(hex)
}

const bytesFromHex = (hex: string): Uint8Array => {
  const bytes = new Uint8Array((hex.length - 2) >> 1)
  for (let i = 0, j = 2; i < bytes.length; i++, j += 2) {
    bytes[i] = (hexValues[hex.charCodeAt(j)] << 4) | hexValues[hex.charCodeAt(j + 1)]
  }
  return bytes
}
