/**
 * Leases in PostgreSQL (14 and later), over the application's own `SqlClient`.
 *
 * Every operation is one statement per batch, and a second one for what cannot
 * simply be done, so that no connection is held between operations and a
 * transaction-mode pooler may stand in between. It needs a transaction of its
 * own only where the database's default isolation is not read committed. The
 * server's clock decides, read after the row is locked.
 *
 * `layer` migrates, then provides. `layerStorage` only provides, and needs no
 * more than USAGE on the schema, and SELECT, INSERT, UPDATE and DELETE on the
 * tables; run `layerMigrations` or the statements of `migrationSql` elsewhere
 * then.
 *
 * **Example** (Leases in the application's database)
 *
 * ```ts
 * import { PgClient } from "@effect/sql-pg"
 * import { Config, Layer } from "effect"
 * import { Lease } from "worklease"
 * import * as Postgres from "worklease/layers/Postgres"
 *
 * const WorkleaseLayer = Lease.layer.pipe(
 *   Layer.provide(Postgres.layer),
 *   Layer.provideMerge(PgClient.layerConfig({ url: Config.Redacted("DATABASE_URL") }))
 * )
 * ```
 *
 * @since 0.1.0
 */

import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import * as Context from "effect/Context"
import * as SecureRandom from "effect/crypto/SecureRandom"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Predicate from "effect/Predicate"
import type * as Queue from "effect/Queue"
import * as References from "effect/References"
import type * as Scope from "effect/Scope"
import * as SqlClient from "effect/sql/SqlClient"
import * as SqlError from "effect/sql/SqlError"
import * as Backend from "../Backend.ts"
import { Fence } from "../Fence.ts"
import { mayBeOneItem } from "../internal/gather.ts"
import { resend } from "../internal/resend.ts"
import { backendError, timesOf, toMillis } from "../internal/storage.ts"
import * as Wakeups from "../internal/wakeups.ts"
import * as Window from "../internal/window.ts"
import {
  BackendError,
  type BackendErrorReason,
  Fenced,
  InvalidConfig,
  LeaseExpired,
  Other,
  PermissionDenied,
  SchemaOutdated,
  TimedOut,
  TokenExhausted,
  Unreachable
} from "../LeaseError.ts"

/**
 * Where the tables are.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** The schema of the tables. Created by the migrations if it is missing. Defaults to `public`. */
  readonly schema?: string | undefined
  /**
   * The name of the table of leases, and the beginning of the names of the
   * others. At most 47 UTF-8 bytes. Defaults to `worklease`.
   */
  readonly table?: string | undefined
  /**
   * Whether a waiting acquire is told at once when a lease is released or
   * forgotten, and a holder when it is asked to yield; and whether what is done
   * here tells others. Without it, waiting acquires poll, and requests to yield
   * come with renewals. Defaults to `true`.
   *
   * While something waits, or a lease is held that has been so for a second, it
   * costs one connection of the client's pool, which must have three or more:
   * one that is smaller is told nothing, and only tells others. A client that is
   * a single connection and no pool needs `false`.
   */
  readonly wakeups?: boolean | undefined
}

/**
 * Migrates, then provides a `Backend` and a `Fence`. Fails with `BackendError`
 * if the database cannot be reached or migrated.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer: Layer.Layer<Backend.Backend | Fence, BackendError, SqlClient.SqlClient> = Layer.suspend(() =>
  layerOf(namesUnsafe({}), {})
)

/**
 * Like `layer`, in another schema or under another name.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerWith = (
  options: Options
): Layer.Layer<Backend.Backend | Fence, BackendError | InvalidConfig, SqlClient.SqlClient> =>
  Layer.unwrap(Effect.map(namesOf(options), (names) => layerOf(names, options)))

/**
 * Provides a `Backend` and a `Fence` over tables that exist already. Sends
 * nothing by itself: a missing table is a `BackendError` of the operation that
 * misses it.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerStorage = (
  options: Options = {}
): Layer.Layer<Backend.Backend | Fence, InvalidConfig, SqlClient.SqlClient> =>
  Layer.unwrap(Effect.map(namesOf(options), (names) => storageOf(names, options)))

/**
 * Migrates. Forward-only, and safe when several processes start at once.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerMigrations = (
  options: Options = {}
): Layer.Layer<never, BackendError | InvalidConfig, SqlClient.SqlClient> =>
  Layer.effectDiscard(Effect.flatMap(namesOf(options), migrate))

/**
 * The statements that `layerMigrations` runs on an empty database, for those
 * who run their migrations elsewhere. Throws `InvalidConfig`.
 *
 * @category migrations
 * @since 0.1.0
 */
export const migrationSql = (options?: Options): string => {
  const names = namesUnsafe(options ?? {})
  return [
    `CREATE SCHEMA IF NOT EXISTS ${names.schema};`,
    `${createHistory(names)};`,
    ...migrations(names).flatMap((statements, index) =>
      statements.concat(`INSERT INTO ${names.history} (version) VALUES (${index + 1})`).map((_) => `${_};`)
    )
  ].join("\n\n")
}

// -----------------------------------------------------------------------------
// names
// -----------------------------------------------------------------------------

interface Names {
  readonly schema: string
  readonly leases: string
  readonly highWaterMark: string
  readonly waiters: string
  readonly history: string
}

/** PostgreSQL cuts longer names off, silently. */
const maxNameBytes = 63
const longestSuffix = "_high_water_mark"

const namesOf = (options: Options): Effect.Effect<Names, InvalidConfig> =>
  Effect.try({ try: () => namesUnsafe(options), catch: (error) => error as InvalidConfig })

const namesUnsafe = (options: Options): Names => {
  const schema = nameUnsafe("schema", options.schema ?? "public", maxNameBytes)
  const table = nameUnsafe("table", options.table ?? "worklease", maxNameBytes - longestSuffix.length)
  return {
    schema: quoted(schema),
    leases: `${quoted(schema)}.${quoted(table)}`,
    highWaterMark: `${quoted(schema)}.${quoted(`${table}${longestSuffix}`)}`,
    waiters: `${quoted(schema)}.${quoted(`${table}_waiters`)}`,
    history: `${quoted(schema)}.${quoted(`${table}_migrations`)}`
  }
}

const nameUnsafe = (field: string, name: string, maxBytes: number): string => {
  const bytes = new TextEncoder().encode(name).byteLength
  if (bytes >= 1 && bytes <= maxBytes && !name.includes("\0")) return name
  throw new InvalidConfig({ field, why: `it must be 1 to ${maxBytes} UTF-8 bytes without NUL, not ${bytes}` })
}

/** The client's own quoting would split a name at its dots. */
const quoted = (name: string): string => `"${name.replaceAll("\"", "\"\"")}"`

// -----------------------------------------------------------------------------
// migrations
// -----------------------------------------------------------------------------

/**
 * Only ever appended to. The record has room for what later versions need, so
 * that they need no migration.
 *
 * Much of each page stays free, and nothing that a renewal or a checkpoint
 * writes is indexed: both are heap-only updates then.
 */
const migrations = (names: Names): ReadonlyArray<ReadonlyArray<string>> => [[
  `CREATE TABLE ${names.leases} (
  work_id text COLLATE "C" NOT NULL PRIMARY KEY,
  holder_id text NOT NULL,
  fencing_token bigint NOT NULL,
  attempt text NOT NULL,
  acquired_at timestamptz NOT NULL,
  expires_at timestamptz NOT NULL,
  exit text,
  sequence bigint NOT NULL DEFAULT 0,
  state_version integer,
  state bytea,
  terms_without_progress integer NOT NULL DEFAULT 0,
  prior_exit text,
  prior_holder_id text,
  prior_fencing_token bigint,
  prior_attempt text,
  yield_requested boolean NOT NULL DEFAULT false,
  yield_deadline timestamptz,
  trace_context text
) WITH (fillfactor = 50)`,
  `CREATE TABLE ${names.highWaterMark} (
  only_row boolean NOT NULL DEFAULT true PRIMARY KEY CHECK (only_row),
  fencing_token bigint NOT NULL
)`,
  `INSERT INTO ${names.highWaterMark} (fencing_token) VALUES (0)`
], [
  // A row is inserted without a state, which makes it twice as long: there has to be room for that, and then for one
  // more version of each row of the page.
  `ALTER TABLE ${names.leases} SET (fillfactor = 20)`,
  // Few rows that come and go: they are cleaned up after by their number, and the file, which they would fill again, is
  // not cut off, for which every release would have to wait.
  `CREATE TABLE ${names.waiters} (
  work_id text COLLATE "C" NOT NULL,
  subscriber text COLLATE "C" NOT NULL,
  expires_at timestamptz NOT NULL,
  PRIMARY KEY (work_id, subscriber)
) WITH (
  fillfactor = 50,
  vacuum_truncate = false,
  autovacuum_vacuum_scale_factor = 0,
  autovacuum_vacuum_threshold = 500,
  autovacuum_analyze_scale_factor = 0,
  autovacuum_analyze_threshold = 500
)`
]]

const requiredVersion = 2

const createHistory = (names: Names): string =>
  `CREATE TABLE IF NOT EXISTS ${names.history} (
  version integer NOT NULL PRIMARY KEY,
  applied_at timestamptz NOT NULL DEFAULT now()
)`

const migrate = (names: Names): Effect.Effect<void, BackendError, SqlClient.SqlClient> =>
  Effect.flatMap(SqlClient.SqlClient, (client) => {
    const sql = client.withoutTransforms()
    const appliedVersion = Effect.map(
      sql.unsafe<{ readonly version: number | null }>(`SELECT max(version) AS version FROM ${names.history}`),
      ([row]) => row.version ?? 0
    )
    const pending = Effect.gen(function*() {
      // Whoever vanishes in the middle of it does not keep the others waiting for ever.
      if (!isEmbedded(sql)) yield* sql.unsafe("SET LOCAL idle_in_transaction_session_timeout = 5000")
      // Not IF NOT EXISTS alone, which fails when two sessions create the same thing at once.
      yield* sql.unsafe("SELECT pg_advisory_xact_lock(hashtextextended($1::text, 0))", [`worklease:${names.history}`])
      const [{ missing }] = yield* sql.unsafe<{ readonly missing: boolean }>(
        // A schema that exists may be one in which this role may not create others.
        `SELECT to_regnamespace($1::text) IS NULL AS missing`,
        [names.schema]
      )
      if (missing) yield* sql.unsafe(`CREATE SCHEMA ${names.schema}`)
      yield* sql.unsafe(createHistory(names))
      const applied = yield* appliedVersion
      for (const [index, statements] of migrations(names).entries()) {
        if (index + 1 <= applied) continue
        yield* Effect.forEach(statements, (statement) => sql.unsafe(statement), { discard: true })
        yield* sql.unsafe(`INSERT INTO ${names.history} (version) VALUES ($1::integer)`, [index + 1])
      }
    })
    return appliedVersion.pipe(
      // Missing, or not to be read: what follows either creates it or says why it cannot.
      Effect.catch((error) =>
        Predicate.isTagged(error.reason, "ConnectionError") ? Effect.fail(error) : Effect.succeed(0)
      ),
      Effect.flatMap((applied) => applied >= requiredVersion ? Effect.void : transactionOf(sql, pending)),
      Effect.mapError((error) => toBackendError("migrate", error)),
      Effect.withTracerEnabled(false)
    )
  })

// -----------------------------------------------------------------------------
// statements
// -----------------------------------------------------------------------------

const micros = (duration: Duration.Duration): bigint => BigInt(Math.round(Duration.toMillis(duration) * 1000))

/** By way of a double, which has the microseconds for some centuries yet, and is faster than `extract`. */
const epochMicros = (instant: string): string => `(date_part('epoch', ${instant}) * 1000000)::bigint`

const interval = (micros: string): string => `${micros} * interval '1 microsecond'`

const maxToken = "9223372036854775807"

/** Another level than read committed. */
const isolation = "nullif(current_setting('transaction_isolation'), 'read committed') AS isolation"

/**
 * In place of it where a statement runs in a transaction of its own: a client
 * that vanishes before its COMMIT keeps the rows that long, and not for ever.
 */
const boundedIdle = "set_config('idle_in_transaction_session_timeout', '1000', true) AS isolation"

/** The columns of a batch's items. The first is the work ID. */
type Columns = ReadonlyArray<readonly [name: string, type: string]>

/**
 * As one list for each column. The planner would count the lists that it sees,
 * find a plan for just as many cheaper than one for any number, and plan each
 * statement anew, which takes longer than running it.
 */
const manyItems = (columns: Columns): string => {
  const names = columns.map(([name]) => name).join(", ")
  const lists = columns.map(([, type], index) => `(SELECT $${index + 1}::${type}[])`).join(", ")
  return `SELECT ${names.replace("work_id", "work_id COLLATE \"C\" AS work_id")} FROM unnest(${lists}) AS i (${names})`
}

/** A value of an item, by the name of its column. */
type Item = (column: string) => string

const itemOf = (columns: Columns): Item => (column) => {
  const index = columns.findIndex(([name]) => name === column)
  return `$${index + 1}::${columns[index][1]}`
}

interface LockedUpdate {
  readonly items: Columns
  readonly lock: "UPDATE" | "NO KEY UPDATE"
  /** Which rows are locked, of those with the work ID of an item. */
  readonly locks?: ((item: Item) => string) | undefined
  /** Which of the locked rows are updated. */
  readonly matches: (item: Item) => string
  /** Whether those only that have not expired by then. */
  readonly unexpired?: boolean | undefined
  readonly set: (item: Item) => string
  readonly returning: string
}

/**
 * Updates the rows `l` of a batch without waiting for one: they are locked in
 * the order of their work IDs, skipping what is locked already. What is updated
 * is decided on locked rows, by a clock that is read after that. So no two
 * batches wait for each other, and no decision is older than its lock.
 *
 * A row is found again by the version that was locked, without a second look
 * into the index, and by nothing else: of more conditions the planner would
 * conclude that they are met by one row, and compare each with each. One that
 * is newer than the statement's snapshot is not found.
 */
const updateMany = (names: Names, update: LockedUpdate): string => {
  const item: Item = (column) => `k.${column}`
  return `WITH locked AS MATERIALIZED (
  SELECT k.*, l.ctid AS version, l.expires_at, (${update.matches(item)}) AS matches, ${isolation}
  FROM (${manyItems(update.items)}) k JOIN ${names.leases} l ON l.work_id = k.work_id
  ${update.locks === undefined ? "" : `WHERE ${update.locks(item)}`}
  ORDER BY l.work_id
  FOR ${update.lock} OF l SKIP LOCKED
)
UPDATE ${names.leases} l SET ${update.set(item)}
FROM locked k
WHERE l.ctid = k.version AND k.matches${update.unexpired === true ? " AND k.expires_at > clock_timestamp()" : ""}
RETURNING ${update.returning}, k.isolation`
}

/**
 * The same for one row, without the isolation. To get ready for the other would
 * take a lone operation longer than what it does.
 */
const updateOne = (names: Names, update: LockedUpdate): string => {
  const item = itemOf(update.items)
  return `UPDATE ${names.leases} l SET ${update.set(item)}
WHERE l.ctid = (
  SELECT l.ctid FROM ${names.leases} l
  WHERE l.work_id = ${item("work_id")}${update.locks === undefined ? "" : ` AND ${update.locks(item)}`}
  FOR ${update.lock} OF l SKIP LOCKED
) AND ${update.matches(item)}${update.unexpired === true ? " AND l.expires_at > clock_timestamp()" : ""}
RETURNING ${update.returning}`
}

const forOneOrMany = (names: Names, update: LockedUpdate) => ({
  one: updateOne(names, update),
  many: updateMany(names, update)
})

/**
 * The terms without progress before the term of row `l`. They are stored as −1
 * where it had expired and was lifted, so that it does not count itself.
 */
const countBefore = "greatest(l.terms_without_progress, 0)"

/** What a holder that takes row `l` would be told of the terms without progress. */
const countAfter = `CASE
      WHEN l.exit = 'forgotten' THEN 0
      WHEN l.exit IS NOT NULL THEN ${countBefore}
      WHEN l.sequence > 0 THEN 0
      ELSE l.terms_without_progress + 1
    END`

/** Whether that is less than `terms`, which are one or more. It is cheaper than to count. */
const countAfterIsLess = (terms: string): string =>
  `(l.terms_without_progress < ${terms} - (l.exit IS NULL)::integer OR (l.exit IS NULL AND l.sequence > 0))`

/** What a holder that takes row `l` would be told of its last term. */
const priorAfter = (column: "exit" | "holder_id" | "fencing_token"): string =>
  `CASE l.exit WHEN 'forgotten' THEN NULL WHEN 'given-back' THEN l.prior_${column}
    ELSE ${column === "exit" ? "coalesce(l.exit, 'expired')" : `l.${column}`} END`

const acquiredColumns = `l.fencing_token, ${epochMicros("l.expires_at")} AS expires_at, l.state_version,
    l.state, l.terms_without_progress, l.prior_exit, l.prior_holder_id, l.prior_fencing_token`

const acquireItems: Columns = [
  ["work_id", "text"],
  ["holder_id", "text"],
  ["attempt", "text"],
  ["ttl", "bigint"],
  ["quarantine_after", "bigint"]
]

/** More terms than there are. */
const neverQuarantined = 2n ** 63n - 1n

const isFree = "(l.exit IS NOT NULL OR l.expires_at <= clock_timestamp())"

/**
 * A term begins when its statement does: that is not before it was sent, from
 * when its holder counts.
 */
const acquiredAt = "statement_timestamp()"

/** Whether row `l` knows nothing of this attempt. */
const isNewAttempt = (item: Item): string =>
  `l.attempt <> ${item("attempt")} AND l.prior_attempt IS DISTINCT FROM ${item("attempt")}`

/** Locks only rows that it may take: a refused acquire writes nothing. What it has locked is as it was seen, so still free. */
const take: LockedUpdate = {
  items: acquireItems,
  lock: "UPDATE",
  locks: (item) => `${isFree} AND ${isNewAttempt(item)} AND ${countAfterIsLess(item("quarantine_after"))}`,
  set: (item) => `
    holder_id = ${item("holder_id")},
    fencing_token = greatest(l.fencing_token + 1, ${epochMicros(acquiredAt)}),
    attempt = ${item("attempt")},
    acquired_at = ${acquiredAt},
    expires_at = ${acquiredAt} + ${interval(item("ttl"))},
    exit = NULL,
    sequence = 0,
    terms_without_progress = ${countAfter},
    prior_exit = ${priorAfter("exit")},
    prior_holder_id = ${priorAfter("holder_id")},
    prior_fencing_token = ${priorAfter("fencing_token")},
    prior_attempt = l.attempt,
    yield_requested = false,
    yield_deadline = NULL,
    trace_context = NULL`,
  matches: () => `l.fencing_token < ${maxToken}`,
  returning: `l.work_id, ${acquiredColumns}`
}

/**
 * What a lone acquire mostly comes to: the lease is free, or held. The rest, a
 * work ID that is new among it, is not answered: to be ready for that, too,
 * would take each acquire longer. Nothing was taken then, for the snapshot that
 * finds a row to take has it to answer, too; and `acquireSql` decides all of it
 * anew, whatever has happened in between.
 */
const takeOneSql = (names: Names): string => {
  const item = itemOf(acquireItems)
  const isHeld = `l.exit IS NULL AND l.expires_at > clock_timestamp() AND ${isNewAttempt(item)}`
  const ifHeld = (value: string) => `CASE WHEN a.fencing_token IS NULL THEN ${value} END`
  return `WITH taken AS (
${updateOne(names, { ...take, returning: acquiredColumns })}
)
SELECT l.work_id, a.*, ${ifHeld("l.holder_id")} AS held_by,
  ${ifHeld(epochMicros("l.expires_at - clock_timestamp()"))} AS remaining
FROM ${names.leases} l LEFT JOIN taken a ON true
WHERE l.work_id = ${item("work_id")} AND (a.fencing_token IS NOT NULL OR (${isHeld}))`
}

/**
 * Takes what is free, inserts what is not there, and tells of the rest how it
 * is. A row that was locked, or is newer than the statement's snapshot, is
 * contended.
 *
 * Nowhere are two lists of a batch joined: a planner that knows their lengths
 * as little as this one compares each with each.
 */
const acquireSql = (names: Names): string =>
  `WITH taken AS (
${updateMany(names, take)}
), inserted AS (
  INSERT INTO ${names.leases} AS l (work_id, holder_id, fencing_token, attempt, acquired_at, expires_at)
  SELECT i.work_id, i.holder_id, greatest(m.fencing_token + 1, ${epochMicros(acquiredAt)}), i.attempt, ${acquiredAt},
    ${acquiredAt} + ${interval("i.ttl")}
  FROM (${manyItems(acquireItems)}) i CROSS JOIN (${highestToken(names)}) m
  WHERE m.fencing_token < ${maxToken} AND NOT EXISTS (SELECT FROM ${names.leases} l WHERE l.work_id = i.work_id)
  ORDER BY i.work_id
  ON CONFLICT (work_id) DO NOTHING
  RETURNING l.work_id, ${acquiredColumns}, ${isolation}
)
SELECT 'Acquired' AS reply, NULL::text AS held_by, NULL::bigint AS remaining, a.* FROM taken a
UNION ALL
SELECT 'Acquired', NULL, NULL, a.* FROM inserted a
UNION ALL
SELECT
  CASE
    WHEN l.work_id IS NULL THEN CASE WHEN (${highestToken(names)}) < ${maxToken} THEN 'Contended' ELSE 'Exhausted' END
    WHEN l.attempt = i.attempt THEN CASE
      WHEN l.exit IS NULL AND l.expires_at > c.now AND l.holder_id = i.holder_id THEN 'Acquired'
      ELSE 'AttemptEnded'
    END
    WHEN l.prior_attempt = i.attempt THEN 'AttemptEnded'
    WHEN l.exit IS NULL AND l.expires_at > c.now THEN 'Held'
    WHEN ${countAfter} >= i.quarantine_after THEN 'Quarantined'
    WHEN l.fencing_token = ${maxToken} THEN 'Exhausted'
    ELSE 'Contended'
  END,
  l.holder_id, ${epochMicros("l.expires_at")} - ${epochMicros("c.now")}, i.work_id,
  l.fencing_token, ${epochMicros("l.expires_at")},
  CASE WHEN l.attempt = i.attempt THEN l.state_version END, CASE WHEN l.attempt = i.attempt THEN l.state END,
  CASE WHEN l.attempt = i.attempt THEN ${countBefore} ELSE ${countAfter} END,
  ${
    (["exit", "holder_id", "fencing_token"] as const)
      .map((column) => `CASE WHEN l.attempt = i.attempt THEN l.prior_${column} ELSE ${priorAfter(column)} END`)
      .join(",\n  ")
  }, ${isolation}
FROM (${manyItems(acquireItems)}) i
  CROSS JOIN (SELECT clock_timestamp() AS now) c
  LEFT JOIN ${names.leases} l ON l.work_id = i.work_id
WHERE i.work_id NOT IN (SELECT a.work_id FROM taken a UNION ALL SELECT a.work_id FROM inserted a)`

const highestToken = (names: Names): string =>
  `SELECT coalesce(max(fencing_token), 0) AS fencing_token FROM ${names.highWaterMark}`

/**
 * Locks the rows of a batch by work ID only, in order, skipping those that are
 * locked; what is current and unexpired is decided on the locked rows, by a
 * clock that is read after that. So no two batches wait for each other, none
 * waits for one row, and no decision is older than its lock.
 */
const lockRows = (names: Names, input: string, columns: string, skipLocked = true): string =>
  `locked AS MATERIALIZED (
  SELECT i.*, l.ctid AS version, ${isolation}, l.holder_id = i.term_holder_id AND l.fencing_token = i.term_fencing_token AS is_current, ${columns}
  FROM ${input} i JOIN ${names.leases} l ON l.work_id = i.work_id
  ORDER BY l.work_id
  FOR NO KEY UPDATE OF l${skipLocked ? " SKIP LOCKED" : ""}
)`

const clock = `clock AS MATERIALIZED (
  SELECT c.now, ${epochMicros("c.now")} AS now_micros
  FROM (SELECT clock_timestamp() AS now, count(*) AS locked FROM locked) c
)`

/** What a plain extension answers. */
const extended = `l.work_id, ${epochMicros("l.expires_at")} AS expires_at`

/**
 * The replies to a batch: `decided`, and those without a locked row. Where a
 * row that is locked is waited for, one that was not found is not there.
 */
const replies = (names: Names, decided: string, columns: string, skipLocked = true): string =>
  `SELECT r.*, ${isolation} FROM (
  ${decided}
  UNION ALL
  SELECT i.work_id, ${
    skipLocked
      ? `CASE WHEN EXISTS (SELECT FROM ${names.leases} l WHERE l.work_id = i.work_id) THEN 'Busy' ELSE 'Fenced' END`
      : "'Fenced'"
  }${columns}
  FROM input i WHERE i.work_id NOT IN (SELECT k.work_id FROM locked k)
) r`

const extendReplies = (names: Names, skipLocked = true): string =>
  replies(
    names,
    `SELECT d.work_id, d.reply, d.extended_until_micros AS expires_at, d.yield_requested,
    ${epochMicros("d.yield_deadline")} - d.now_micros AS yield_remaining
  FROM decided d`,
    ", NULL, NULL, NULL",
    skipLocked
  )

const renewItems: Columns = [
  ["work_id", "text"],
  ["term_holder_id", "text"],
  ["term_fencing_token", "bigint"],
  ["ttl", "bigint"]
]

const renewColumns = "l.exit, l.expires_at, l.yield_requested, l.yield_deadline"

/** Whether row `l` is in the term of an item. */
const isCurrent = (item: Item): string =>
  `l.holder_id = ${item("term_holder_id")} AND l.fencing_token = ${item("term_fencing_token")} AND l.exit IS NULL`

const plainRenew: LockedUpdate = {
  items: renewItems,
  lock: "NO KEY UPDATE",
  set: (item) => `expires_at = clock_timestamp() + ${interval(item("ttl"))}`,
  matches: (item) => `${isCurrent(item)} AND NOT l.yield_requested`,
  unexpired: true,
  returning: extended
}

const renewSql = (names: Names): string =>
  `WITH input AS MATERIALIZED (
  ${manyItems(renewItems)}
), ${lockRows(names, "input", renewColumns)}, ${clock}, decided AS MATERIALIZED (
  SELECT k.*, c.now, c.now_micros, c.now + ${interval("k.ttl")} AS extended_until,
    c.now_micros + k.ttl AS extended_until_micros,
    CASE
      WHEN NOT k.is_current THEN 'Fenced'
      WHEN k.exit IS NOT NULL OR k.expires_at <= c.now THEN 'Expired'
      ELSE 'Done'
    END AS reply
  FROM locked k CROSS JOIN clock c
), updated AS (
  UPDATE ${names.leases} l SET expires_at = d.extended_until
  FROM decided d WHERE d.reply = 'Done' AND l.work_id = d.work_id
)
${extendReplies(names)}`

const checkpointItems: Columns = [
  ["work_id", "text"],
  ["term_holder_id", "text"],
  ["term_fencing_token", "bigint"],
  ["ttl", "bigint"],
  ["new_sequence", "bigint"],
  ["new_state_version", "bigint"],
  ["new_state", "bytea"]
]

const checkpointColumns = "l.exit, l.expires_at, l.sequence, l.yield_requested, l.yield_deadline"

const plainCheckpoint: LockedUpdate = {
  items: checkpointItems,
  lock: "NO KEY UPDATE",
  set: (item) => `
  expires_at = clock_timestamp() + ${interval(item("ttl"))},
  sequence = ${item("new_sequence")},
  state_version = ${item("new_state_version")},
  state = ${item("new_state")}`,
  matches: (item) => `${isCurrent(item)} AND ${item("new_sequence")} > l.sequence AND NOT l.yield_requested`,
  returning: extended
}

const checkpointSql = (names: Names, skipLocked: boolean): string =>
  `WITH input AS MATERIALIZED (
  ${manyItems(checkpointItems)}
), ${lockRows(names, "input", checkpointColumns, skipLocked)}, ${clock}, decided AS MATERIALIZED (
  SELECT k.*, c.now, c.now_micros,
    CASE WHEN k.new_sequence < k.sequence THEN k.expires_at ELSE c.now + ${interval("k.ttl")} END AS extended_until,
    CASE WHEN k.new_sequence < k.sequence THEN ${epochMicros("k.expires_at")} ELSE c.now_micros + k.ttl END
      AS extended_until_micros,
    CASE
      WHEN NOT k.is_current THEN 'Fenced'
      WHEN k.exit IS NOT NULL THEN 'Expired'
      ELSE 'Done'
    END AS reply
  FROM locked k CROSS JOIN clock c
), updated AS (
  UPDATE ${names.leases} l SET
    expires_at = d.extended_until,
    sequence = d.new_sequence,
    state_version = CASE WHEN d.new_sequence > d.sequence THEN d.new_state_version ELSE l.state_version END,
    state = CASE WHEN d.new_sequence > d.sequence THEN d.new_state ELSE l.state END
  FROM decided d WHERE d.reply = 'Done' AND d.new_sequence >= d.sequence AND l.work_id = d.work_id
)
${extendReplies(names, skipLocked)}`

/**
 * What an update that sets rows `l` free returns: it tells one of those who
 * wait, once it is committed; if that one has died, the others look again by
 * themselves. A notification, which all commits queue up for, is sent only
 * where somebody waits. Otherwise each row costs one look into an index. To be
 * ready for one costs less where it does not depend on the row: where the work
 * ID is a parameter.
 */
const notified = (names: Names, notifies: boolean, workId = "l.work_id"): string =>
  notifies
    ? `(
    SELECT pg_notify('${channelPrefix}' || w.subscriber, '${Wakeups.freed}' || w.work_id) FROM (
      SELECT w.work_id, w.subscriber FROM ${names.waiters} w
      WHERE w.work_id = ${workId} AND w.expires_at > clock_timestamp()
      ORDER BY random()
      LIMIT 1
    ) w
  )`
    : "NULL"

/** Each process has a channel of its own. */
const channelPrefix = "worklease_"

const releaseItems: Columns = [
  ["work_id", "text"],
  ["term_holder_id", "text"],
  ["term_fencing_token", "bigint"],
  ["new_exit", "text"],
  ["interrupted", "boolean"],
  ["new_sequence", "bigint"],
  ["new_state_version", "bigint"],
  ["new_state", "bytea"]
]

const releaseColumns = "l.exit, l.expires_at, l.sequence, l.prior_exit, l.prior_holder_id, l.prior_fencing_token"

/** What becomes of row `l` when it is released. */
const releaseRow = (item: Item, now: string): string => {
  const isNewer = `${item("new_sequence")} > l.sequence`
  return `
    exit = ${item("new_exit")},
    expires_at = ${now},
    sequence = greatest(l.sequence, ${item("new_sequence")}),
    state_version = CASE WHEN ${isNewer} THEN ${item("new_state_version")} ELSE l.state_version END,
    state = CASE WHEN ${isNewer} THEN ${item("new_state")} ELSE l.state END,
    terms_without_progress = CASE
      WHEN ${item("new_exit")} = 'given-back' THEN ${countBefore}
      WHEN ${item("new_exit")} IN ('finished', 'retired') OR greatest(l.sequence, ${item("new_sequence")}) > 0 THEN 0
      WHEN ${item("new_exit")} = 'abandoned' AND NOT ${item("interrupted")} THEN ${countBefore} + 1
      ELSE ${countBefore}
    END`
}

type PlainRelease = Omit<LockedUpdate, "returning">

const plainRelease: PlainRelease = {
  items: releaseItems,
  lock: "NO KEY UPDATE",
  set: (item) => releaseRow(item, "clock_timestamp()"),
  matches: isCurrent,
  unexpired: true
}

/** What most releases are: the work has come to its end, and leaves the state that is there. */
const plainEnd: PlainRelease = {
  ...plainRelease,
  items: releaseItems.slice(0, 4),
  set: (item) => `exit = ${item("new_exit")}, expires_at = clock_timestamp(), terms_without_progress = 0`
}

const isPlainEnd = ({ exit, state }: Backend.ReleaseRequest): boolean =>
  (exit === "finished" || exit === "retired") && Option.isNone(state)

const plainReleaseSql = (names: Names, notifies: boolean, plain: PlainRelease) => {
  const update = (notified: string): LockedUpdate => ({ ...plain, returning: `l.work_id, ${notified} AS notified` })
  const each = notified(names, notifies)
  // For a batch one look first, whether anybody waits for anything.
  const isWaitedFor = `EXISTS (
    SELECT FROM ${names.waiters} w WHERE w.work_id <> '${Wakeups.anyWorkId}' AND w.expires_at > clock_timestamp()
  )`
  return {
    one: updateOne(names, update(notified(names, notifies, itemOf(plain.items)("work_id")))),
    many: updateMany(names, update(notifies ? `CASE WHEN ${isWaitedFor} THEN ${each} END` : each))
  }
}

const releaseSql = (names: Names, notifies: boolean): string =>
  `WITH input AS MATERIALIZED (
  ${manyItems(releaseItems)}
), ${lockRows(names, "input", releaseColumns)}, ${clock}, decided AS MATERIALIZED (
  SELECT k.*, c.now,
    CASE
      WHEN NOT k.is_current THEN CASE
        WHEN k.prior_holder_id = k.term_holder_id AND k.prior_fencing_token = k.term_fencing_token
          AND k.prior_exit = k.new_exit THEN 'Done'
        ELSE 'Fenced'
      END
      WHEN k.exit = k.new_exit THEN 'Done'
      WHEN k.exit IS NOT NULL THEN 'Expired'
      WHEN k.expires_at <= c.now AND k.new_sequence = 0 AND NOT (k.new_exit = 'given-back' AND k.sequence = 0)
        THEN 'Expired'
      ELSE 'Release'
    END AS reply
  FROM locked k CROSS JOIN clock c
), updated AS (
  UPDATE ${names.leases} l SET ${releaseRow((column) => `k.${column}`, "k.now")}
  FROM decided k WHERE k.reply = 'Release' AND l.work_id = k.work_id
  RETURNING ${notified(names, notifies)}
)
${
    replies(
      names,
      "SELECT d.work_id, CASE d.reply WHEN 'Release' THEN 'Done' ELSE d.reply END AS reply FROM decided d",
      ""
    )
  }`

const readSql = (names: Names): string =>
  `SELECT l.state_version, l.state FROM ${names.leases} l
WHERE l.work_id = $1::text AND l.holder_id = $2::text AND l.fencing_token = $3::bigint`

/** Never deletes: a row that is gone could not keep its token. */
const forgetSql = (names: Names, notifies: boolean): string =>
  `WITH input AS MATERIALIZED (
  SELECT $1::text COLLATE "C" AS work_id, $2::text AS term_holder_id, $3::bigint AS term_fencing_token
), ${lockRows(names, "input", "l.exit")}, ${clock}, updated AS (
  UPDATE ${names.leases} l SET
    exit = 'forgotten',
    expires_at = c.now,
    state_version = NULL,
    state = NULL,
    terms_without_progress = 0,
    prior_exit = NULL,
    prior_holder_id = NULL,
    prior_fencing_token = NULL,
    yield_requested = false,
    yield_deadline = NULL,
    trace_context = NULL
  FROM locked k CROSS JOIN clock c
  WHERE k.is_current AND k.exit IS DISTINCT FROM 'forgotten' AND l.work_id = k.work_id
  RETURNING ${notified(names, notifies)}
)
${replies(names, "SELECT k.work_id, CASE WHEN k.is_current THEN 'Done' ELSE 'Fenced' END AS reply FROM locked k", "")}`

/** The process of the holder is not known: all are told that hold anything. */
const requestYieldSql = (names: Names, notifies: boolean): string =>
  `UPDATE ${names.leases} l SET
  yield_requested = true,
  yield_deadline = clock_timestamp() + ${interval("$2::bigint")}
WHERE l.work_id = $1::text AND l.exit IS NULL AND l.expires_at > clock_timestamp()
RETURNING 1 AS asked, ${isolation}, ${
    notifies
      ? `(
    SELECT count(pg_notify('${channelPrefix}' || w.subscriber, '${Wakeups.asked}' || l.work_id)::text)
    FROM ${names.waiters} w
    WHERE w.work_id = '${Wakeups.anyWorkId}' AND w.expires_at > clock_timestamp()
  )`
      : "NULL"
  } AS notified`

/** It waits for the row, which may expire meanwhile. What is lifted already is not written. */
const liftSql = (names: Names): string =>
  `WITH locked AS MATERIALIZED (
  SELECT l.* FROM ${names.leases} l WHERE l.work_id = $1::text
  FOR NO KEY UPDATE
), ${clock}, lifted AS MATERIALIZED (
  SELECT l.work_id, l.terms_without_progress,
    CASE WHEN l.exit IS NULL AND l.sequence = 0 AND l.expires_at <= c.now THEN -1 ELSE 0 END AS count
  FROM locked l CROSS JOIN clock c
), updated AS (
  UPDATE ${names.leases} l SET terms_without_progress = k.count
  FROM lifted k WHERE l.work_id = k.work_id AND k.terms_without_progress <> k.count
)
SELECT 1 AS known, ${isolation} FROM lifted`

/** In order, so that it and others wait for each other in one direction only. */
const registerSql = (names: Names): string =>
  `WITH registered AS (
  INSERT INTO ${names.waiters} (work_id, subscriber, expires_at)
  SELECT i.work_id, $2::text, clock_timestamp() + ${interval("$3::bigint")}
  FROM (${manyItems([["work_id", "text"]])}) i
  ORDER BY i.work_id
  ON CONFLICT (work_id, subscriber) DO UPDATE SET expires_at = excluded.expires_at
  RETURNING 1
)
SELECT count(*) AS registered, ${isolation} FROM registered`

/** Also what processes that have died have left. It waits for nobody: what is locked, somebody else is deleting. */
const unregisterSql = (names: Names): string =>
  `WITH ended AS MATERIALIZED (
  SELECT w.work_id, w.subscriber FROM ${names.waiters} w
  WHERE (w.subscriber = $2::text AND w.work_id = ANY ($1::text[])) OR w.expires_at <= clock_timestamp()
  FOR UPDATE SKIP LOCKED
), deleted AS (
  DELETE FROM ${names.waiters} w USING ended e WHERE w.work_id = e.work_id AND w.subscriber = e.subscriber
)
SELECT CASE WHEN $3::boolean THEN pg_notify('${channelPrefix}' || $2::text, '')::text END AS pinged, ${isolation}`

/** Somebody who does not wait any more was told: ends that, and tells somebody else. */
const passOnSql = (names: Names): string =>
  `WITH input AS MATERIALIZED (
  ${manyItems([["work_id", "text"]])}
), deleted AS (
  DELETE FROM ${names.waiters} w USING input i WHERE w.work_id = i.work_id AND w.subscriber = $2::text
)
SELECT pg_notify('${channelPrefix}' || w.subscriber, '${Wakeups.freed}' || i.work_id)::text AS notified, ${isolation}
FROM input i CROSS JOIN LATERAL (
  SELECT w.subscriber FROM ${names.waiters} w
  WHERE w.work_id = i.work_id AND w.subscriber <> $2::text AND w.expires_at > clock_timestamp()
  ORDER BY random()
  LIMIT 1
) w`

const sweepSql = (names: Names): string =>
  `WITH ended AS MATERIALIZED (
  SELECT l.work_id, l.fencing_token FROM ${names.leases} l
  WHERE (
      l.exit IN ('retired', 'forgotten')
      OR (l.exit = 'given-back' AND coalesce(l.prior_exit, 'retired') = 'retired')
    )
    AND l.expires_at < clock_timestamp() - greatest(${interval("$1::bigint")}, interval '1 hour')
  ORDER BY l.work_id
  LIMIT $2::bigint
  FOR UPDATE SKIP LOCKED
), raised AS (
  UPDATE ${names.highWaterMark} m SET fencing_token = greatest(m.fencing_token, e.fencing_token)
  FROM (SELECT max(fencing_token) AS fencing_token FROM ended) e WHERE e.fencing_token IS NOT NULL
), deleted AS (
  DELETE FROM ${names.leases} l USING ended e WHERE l.work_id = e.work_id RETURNING l.work_id
)
SELECT count(*) AS swept, ${isolation} FROM deleted`

const recordsSql = (names: Names, states: string): string =>
  `SELECT l.work_id, l.state_version, ${states} AS state, ${epochMicros("l.expires_at")} AS expires_at,
  ${epochMicros("(l.expires_at - c.now)")} AS remaining,
  CASE
    WHEN l.exit = 'given-back' THEN l.prior_exit
    WHEN l.exit = 'forgotten' THEN NULL
    WHEN l.exit IS NOT NULL THEN l.exit
    WHEN l.expires_at > c.now THEN 'held'
    ELSE 'expired'
  END AS status,
  CASE WHEN l.exit = 'given-back' THEN l.prior_holder_id ELSE l.holder_id END AS holder_id,
  CASE WHEN l.exit = 'given-back' THEN l.prior_fencing_token ELSE l.fencing_token END AS fencing_token,
  CASE WHEN l.exit IS NULL AND l.expires_at > c.now THEN ${countBefore} ELSE ${countAfter} END
    AS terms_without_progress
FROM ${names.leases} l CROSS JOIN (SELECT clock_timestamp() AS now) c`

const inspectSql = (names: Names): string =>
  `${recordsSql(names, "CASE WHEN $2::boolean THEN l.state END")}
WHERE l.work_id = ANY($1::text[])`

const listSql = (names: Names): string =>
  `${recordsSql(names, "l.state")}
WHERE starts_with(l.work_id, $1::text) AND l.work_id COLLATE "C" >= $1::text
  AND ($2::text IS NULL OR l.work_id COLLATE "C" > $2::text)
ORDER BY l.work_id COLLATE "C"
LIMIT $3::bigint`

/**
 * Pins the term: a takeover locks for update and is refused, while the
 * holder's own renewals pass. The transaction's ID is assigned by the lock
 * already. Where `bounded`, the server's timeouts are lowered, never raised,
 * to what is left of the window, so that it ends the transaction of a frozen
 * holder.
 */
const fenceSql = (names: Names, bounded: boolean): string => {
  const millisOf = (setting: string) => `nullif(extract(epoch FROM current_setting('${setting}')::interval) * 1000, 0)`
  const lowered = (setting: string) =>
    `set_config('${setting}', ceil(least(${millisOf(setting)}, $4::bigint))::text, true)`
  const whole = `, whole AS MATERIALIZED (
  SELECT CASE WHEN current_setting('server_version_num')::integer >= 170000 THEN
    -- It is counted anew from here: what has passed of the user's own has passed.
    least(
      ${millisOf("transaction_timeout")} - extract(epoch FROM c.now - transaction_timestamp()) * 1000,
      $4::bigint
    )
  END AS millis FROM clock c
), stopped AS MATERIALIZED (
  -- While it runs, PostgreSQL does not let it be changed.
  SELECT w.millis, CASE WHEN w.millis IS NOT NULL THEN set_config('transaction_timeout', '0', true) END AS transaction
  FROM whole w
)`
  const timeouts = `,
  ${lowered("idle_in_transaction_session_timeout")} AS idle,
  ${lowered("statement_timeout")} AS statement,
  CASE WHEN w.millis IS NOT NULL THEN
    set_config('transaction_timeout', ceil(greatest(w.millis, 1))::text, true)
  END AS whole`
  return `WITH locked AS MATERIALIZED (
  SELECT l.* FROM ${names.leases} l WHERE l.work_id = $1::text
  FOR KEY SHARE
), clock AS MATERIALIZED (
  SELECT clock_timestamp() AS now, count(*) AS locked FROM locked
)${bounded ? whole : ""}
SELECT
  CASE
    WHEN k.work_id IS NULL OR k.holder_id <> $2::text OR k.fencing_token <> $3::bigint THEN 'Fenced'
    WHEN k.exit IS NOT NULL OR k.expires_at <= c.now THEN 'Expired'
    ELSE 'Done'
  END AS reply,
  pg_current_xact_id()::text AS transaction${bounded ? timeouts : ""}
FROM clock c ${bounded ? "CROSS JOIN stopped w " : ""}LEFT JOIN locked k ON true`
}

/**
 * Whether a transaction has ended, and if it was surely not applied. After a
 * crash its ID may be unknown, or that of another: that it was applied, only
 * what it has stored tells.
 */
const endedSql = `SELECT CASE
  WHEN $1::text::xid8 < pg_current_xact_id() THEN pg_xact_status($1::text::xid8)
  ELSE 'aborted'
END AS status`

const sequenceSql = (names: Names): string =>
  `SELECT l.sequence FROM ${names.leases} l
WHERE l.work_id = $1::text AND l.holder_id = $2::text AND l.fencing_token = $3::bigint`

// -----------------------------------------------------------------------------
// storage
// -----------------------------------------------------------------------------

type Integer = number | bigint | string

/** Rows come in any order, one for each work ID of the batch. */
interface ItemRow {
  readonly work_id: string
}

interface AcquireRow extends ItemRow {
  /** Missing where it is plain: held by somebody, or acquired. */
  readonly reply?: "Acquired" | "Held" | "Contended" | "AttemptEnded" | "Quarantined" | "Exhausted"
  readonly held_by: string | null
  readonly remaining: Integer | null
  readonly fencing_token: Integer | null
  readonly expires_at: Integer | null
  readonly state_version: number | null
  readonly state: Uint8Array | null
  readonly terms_without_progress: number | null
  readonly prior_exit: Backend.ExitMode | "expired" | null
  readonly prior_holder_id: string | null
  readonly prior_fencing_token: Integer | null
}

interface RecordRow extends ItemRow {
  readonly state_version: number | null
  readonly state: Uint8Array | null
  readonly expires_at: Integer
  /** Negative once it is over. */
  readonly remaining: Integer
  readonly status: "held" | "expired" | Backend.ExitMode | null
  readonly holder_id: string
  readonly fencing_token: Integer
  readonly terms_without_progress: number
}

interface TermRow extends ItemRow {
  /** Missing where it is done, and plain. */
  readonly reply?: "Done" | "Fenced" | "Expired" | "Busy"
}

interface ExtendRow extends TermRow {
  readonly expires_at: Integer | null
  readonly yield_requested?: boolean | null
  readonly yield_remaining?: Integer | null
}

const layerOf = (
  names: Names,
  options: Options
): Layer.Layer<Backend.Backend | Fence, BackendError, SqlClient.SqlClient> =>
  Layer.provideMerge(storageOf(names, options), Layer.effectDiscard(migrate(names)))

const storageOf = (
  names: Names,
  options: Options
): Layer.Layer<Backend.Backend | Fence, never, SqlClient.SqlClient> =>
  Layer.effectContext(
    Effect.flatMap(SqlClient.SqlClient, (client) => makeStorage(names, client, options.wakeups !== false))
  )

const readCommitted = "BEGIN ISOLATION LEVEL READ COMMITTED"

const makeStorage = (
  names: Names,
  client: SqlClient.SqlClient,
  notifies: boolean
): Effect.Effect<Context.Context<Backend.Backend | Fence>, never, Scope.Scope> => {
  const sql = client.withoutTransforms()

  const text = {
    takeOne: takeOneSql(names),
    acquire: acquireSql(names),
    plainRenew: forOneOrMany(names, plainRenew),
    renew: renewSql(names),
    plainCheckpoint: forOneOrMany(names, plainCheckpoint),
    checkpoint: checkpointSql(names, true),
    checkpointJoined: checkpointSql(names, false),
    plainRelease: plainReleaseSql(names, notifies, plainRelease),
    plainEnd: plainReleaseSql(names, notifies, plainEnd),
    release: releaseSql(names, notifies),
    read: readSql(names),
    forget: forgetSql(names, notifies),
    register: registerSql(names),
    passOn: passOnSql(names),
    unregister: unregisterSql(names),
    requestYield: requestYieldSql(names, notifies),
    lift: liftSql(names),
    sweep: sweepSql(names),
    inspect: inspectSql(names),
    list: listSql(names),
    fence: fenceSql(names, !isEmbedded(sql)),
    ended: endedSql,
    sequence: sequenceSql(names)
  }

  // Known from the first answer. While the default is no other level, each statement runs by itself.
  let isReadCommitted: boolean | undefined

  /** Runs a statement at read committed, outside of any transaction that the caller has open. */
  const run = <Row extends object>(
    operation: string,
    text: string,
    parameters: ReadonlyArray<unknown>
  ): Effect.Effect<ReadonlyArray<Row>, BackendError> => {
    const failed = (error: SqlError.SqlError) => Effect.fail(toBackendError(operation, error))
    const alone = () =>
      Effect.catch(
        transactionOf(
          sql,
          sql.unsafe<Row>(isEmbedded(sql) ? text : text.replaceAll(isolation, boundedIdle), parameters)
        ),
        failed
      )
    return Effect.updateContext(
      Effect.suspend(() =>
        isReadCommitted === false
          ? alone()
          : Effect.matchEffect(sql.unsafe<Row & { readonly isolation?: string | null }>(text, parameters), {
            onSuccess: (rows) => {
              const isolation = rows[0]?.isolation
              // What has succeeded at a stricter level holds; only, the next may not succeed.
              if (typeof isolation === "string") isReadCommitted = false
              // Not again, once another has shown that it is not.
              else if (isolation === null) isReadCommitted ??= true
              return Effect.succeed(rows)
            },
            onFailure: (error) => {
              if (codeOf(error) !== "40001") return failed(error)
              // Impossible at read committed, and surely not applied.
              isReadCommitted = false
              return alone()
            }
          })
      ),
      quietly
    )
  }

  let callersContext: Context.Context<never> | undefined
  let ownContext: Context.Context<never>

  /**
   * The context of a statement: outside of any transaction, and without spans.
   * Mostly it is made from the same one, that of the layer's fibers, and a new
   * one would cost each statement what a fiber looks up in it.
   */
  const quietly = (context: Context.Context<never>): Context.Context<never> => {
    if (context !== callersContext) {
      callersContext = context
      ownContext = Context.add(Context.omit(sql.transactionService)(context), References.TracerEnabled, false)
    }
    return ownContext
  }

  const outside = <A, E, R>(effect: Effect.Effect<A, E, R>): Effect.Effect<A, E, R> =>
    Effect.updateContext(effect, (context: Context.Context<R>) =>
      // Mostly there is none, and a context that stays the same costs nothing.
      Option.isNone(Context.getOption(context, sql.transactionService))
        ? context
        : Context.omit(sql.transactionService)(context) as Context.Context<R>)

  const openTransaction = Effect.serviceOption(sql.transactionService)

  /** Runs a batch, whose rows come in any order. */
  const runBatch = <Row extends ItemRow>(
    operation: string,
    text: { readonly one: string; readonly many: string },
    parameters: ReadonlyArray<ReadonlyArray<unknown>>
  ): Effect.Effect<ReadonlyArray<Row>, BackendError> =>
    // Until the level is known the one for many, which tells it; and at a stricter one, for it bounds how long it holds
    // even what it only locks.
    parameters[0].length === 1 && isReadCommitted === true
      ? run(operation, text.one, parameters.map((list) => list[0]))
      : run(operation, text.many, parameters)

  /**
   * Runs a batch: one statement does what is plain, in fewer steps than one that
   * has to decide; what it has not done (locked, refused, sent again, asked to
   * leave, new) a second one decides, and does.
   */
  const runPlainFirst = <Request extends { readonly workId: string }, Row extends ItemRow, Reply>(
    operation: string,
    plain: { readonly one: string; readonly many: string },
    deciding: string,
    requests: NonEmptyReadonlyArray<Request>,
    parametersOf: (requests: ReadonlyArray<Request>) => ReadonlyArray<ReadonlyArray<unknown>>,
    replyOf: (row: Row) => Reply,
    plainParametersOf = parametersOf
  ): Effect.Effect<NonEmptyReadonlyArray<Reply | BackendError>, BackendError> =>
    Effect.flatMap(runBatch<Row>(operation, plain, plainParametersOf(requests)), (done) => {
      if (done.length === requests.length) return Effect.succeed(inOrderOf(requests, replyOf)(done))
      const doneIds = new Set(done.map((row) => row.work_id))
      const rest = requests.filter(({ workId }) => !doneIds.has(workId))
      const decide = (rest: ReadonlyArray<Request>) => run<Row>(operation, deciding, parametersOf(rest))
      if (done.length === 0) return Effect.map(decide(rest), inOrderOf(requests, replyOf))
      // What is done is done, whatever becomes of the rest. That is told apart where it is refused as a whole.
      const failures = new Map<string, BackendError>()
      const decideOrFail = (rest: ReadonlyArray<Request>): Effect.Effect<ReadonlyArray<Row>> =>
        Effect.catch(decide(rest), (error) => {
          if (rest.length > 1 && mayBeOneItem(error)) {
            return Effect.map(Effect.forEach(rest, (request) => decideOrFail([request])), (rows) => rows.flat())
          }
          for (const { workId } of rest) failures.set(workId, error)
          return Effect.succeed([])
        })
      return Effect.map(decideOrFail(rest), (decided) => inOrderOf(requests, replyOf, failures)([...done, ...decided]))
    })

  const acquire: Backend.Backend["Service"]["acquire"] = (requests) =>
    runPlainFirst(
      "acquire",
      { one: text.takeOne, many: text.acquire },
      text.acquire,
      requests,
      (requests) => [
        requests.map((_) => _.workId),
        requests.map((_) => _.holderId),
        requests.map((_) => _.attempt),
        requests.map((_) => micros(_.ttl)),
        requests.map((_) => Option.match(_.quarantineAfter, { onNone: () => neverQuarantined, onSome: BigInt }))
      ],
      (row: AcquireRow): Backend.AcquireReply | BackendError => {
        const reply = row.reply ?? (row.held_by === null ? "Acquired" : "Held")
        switch (reply) {
          case "Acquired":
            return {
              _tag: "Acquired",
              fencingToken: BigInt(row.fencing_token!),
              expiresAt: toMillis(row.expires_at!),
              prior: {
                state: storedOf(row.state_version, row.state),
                term: row.prior_exit === null ? Option.none() : Option.some({
                  exit: row.prior_exit,
                  holderId: row.prior_holder_id!,
                  fencingToken: BigInt(row.prior_fencing_token!)
                }),
                termsWithoutProgress: row.terms_without_progress!
              }
            }
          case "Held":
            return { _tag: "Held", holderId: row.held_by!, remaining: durationOf(row.remaining!) }
          case "Quarantined":
            return {
              _tag: "Quarantined",
              termsWithoutProgress: row.terms_without_progress!,
              exit: row.prior_exit!,
              holderId: row.prior_holder_id!
            }
          case "Exhausted":
            return new BackendError({ operation: "acquire", outcome: "rejected", reason: new TokenExhausted({}) })
          default:
            return { _tag: reply }
        }
      }
    )

  const renew: Backend.Backend["Service"]["renew"] = (requests) =>
    runPlainFirst(
      "renew",
      text.plainRenew,
      text.renew,
      requests,
      (requests) => [...termParameters(requests), requests.map((_) => micros(_.ttl))],
      extendReply
    )

  const checkpointParameters = (requests: ReadonlyArray<Backend.CheckpointRequest>) => [
    ...termParameters(requests),
    requests.map((_) => micros(_.ttl)),
    requests.map((_) => _.sequence),
    requests.map((_) => BigInt(_.state.version)),
    requests.map((_) => _.state.bytes)
  ]

  const checkpoint: Backend.Backend["Service"]["checkpoint"] = (requests) =>
    Effect.flatMap(openTransaction, (transaction) =>
      Option.isSome(transaction)
        ? checkpointJoined(requests)
        : runPlainFirst(
          "checkpoint",
          text.plainCheckpoint,
          text.checkpoint,
          requests,
          checkpointParameters,
          extendReply
        ))

  const checkpointJoined = (requests: NonEmptyReadonlyArray<Backend.CheckpointRequest>) =>
    Effect.uninterruptibleMask((restore) =>
      restore(sql.unsafe<ExtendRow>(text.checkpointJoined, checkpointParameters(requests))).pipe(
        Effect.mapError((error) => {
          const failed = toBackendError("checkpoint", error)
          // Nothing commits any more on a connection that has died.
          return failed.reason._tag === "Unreachable" ? backendError("checkpoint", "rejected", failed.reason) : failed
        }),
        Effect.map(inOrderOf(requests, extendReply)),
        Effect.tap((replies) =>
          replies.every((reply) => reply._tag === "Done")
            ? atFencedLevel((fenced) => {
              fenced.stored = requests[requests.length - 1]
            })
            : doom
        ),
        Effect.withTracerEnabled(false)
      )
    )

  /**
   * A transaction with a refused checkpoint must not commit, whatever the
   * user's code does with the error. An error aborts it; but one inside a
   * savepoint could be undone, so that it is rolled back before, with its
   * savepoints, and what follows meets an aborted one.
   */
  const doom: Effect.Effect<void> = Effect.andThen(
    Effect.ignoreCause(sql.unsafe("ROLLBACK AND CHAIN")),
    Effect.ignoreCause(
      sql.unsafe("DO $$ BEGIN RAISE EXCEPTION 'worklease: a checkpoint in this transaction was refused'; END $$")
    )
  )

  const endParameters = (requests: ReadonlyArray<Backend.ReleaseRequest>) => [
    ...termParameters(requests),
    requests.map((_) => _.exit)
  ]

  const releaseParameters = (requests: ReadonlyArray<Backend.ReleaseRequest>) => [
    ...endParameters(requests),
    requests.map((_) => _.interrupted),
    requests.map((_) => Option.match(_.state, { onNone: () => 0n, onSome: (_) => _.sequence })),
    requests.map((_) => Option.match(_.state, { onNone: () => 0n, onSome: (_) => BigInt(_.state.version) })),
    requests.map((_) => Option.match(_.state, { onNone: () => noBytes, onSome: (_) => _.state.bytes }))
  ]

  const release: Backend.Backend["Service"]["release"] = (requests) => {
    const [plain, plainParameters] = requests.every(isPlainEnd)
      ? [text.plainEnd, endParameters]
      : [text.plainRelease, releaseParameters]
    return runPlainFirst("release", plain, text.release, requests, releaseParameters, termReply, plainParameters)
  }

  const read: Backend.Backend["Service"]["read"] = (term) =>
    Effect.map(
      run<{ readonly state_version: number | null; readonly state: Uint8Array | null }>(
        "readCheckpoint",
        text.read,
        [term.workId, term.holderId, term.fencingToken]
      ),
      ([row]) =>
        row === undefined ? { _tag: "Fenced" } : { _tag: "Done", state: storedOf(row.state_version, row.state) }
    )

  const forget: Backend.Backend["Service"]["forget"] = (term) =>
    Effect.map(
      run<TermRow>("forget", text.forget, [term.workId, term.holderId, term.fencingToken]),
      ([row]) => termReply(row)
    )

  const requestYield: Backend.Backend["Service"]["requestYield"] = ({ deadline, workId }) =>
    Effect.map(
      run("requestYield", text.requestYield, [workId, Option.getOrNull(Option.map(deadline, micros))]),
      (rows) => rows.length > 0
    )

  const lift: Backend.Backend["Service"]["lift"] = (workId) =>
    Effect.map(run("lift", text.lift, [workId]), (rows) => rows.length > 0)

  const sweep: Backend.Backend["Service"]["sweep"] = ({ limit, retention }) =>
    Effect.map(
      run<{ readonly swept: Integer }>("sweep", text.sweep, [micros(retention), BigInt(limit)]),
      ([row]) => Number(row.swept)
    )

  const inspect: Backend.Backend["Service"]["inspect"] = ({ states, workIds }) =>
    workIds.length === 0
      ? Effect.succeed([])
      : Effect.map(run<RecordRow>("inspect", text.inspect, [workIds, states]), (rows) => rows.map(recordOf))

  const list: Backend.Backend["Service"]["list"] = ({ after, limit, prefix }) =>
    Effect.map(
      run<RecordRow>("list", text.list, [prefix, Option.getOrNull(after), BigInt(limit)]),
      (rows) => rows.map(recordOf)
    )

  const exclusive = isExclusive(sql)

  const listen = notifies ? listenOf(client) : undefined
  const subscriber = SecureRandom.uuidV4Unsafe()

  /** The one session of PGlite is busy as long as a transaction is open; it never hangs. */
  const inTime = <A, R>(
    operation: string,
    effect: Effect.Effect<A, BackendError, R>
  ): Effect.Effect<A, BackendError, R> => exclusive ? effect : Wakeups.inTime(operation, effect)

  const wakeups = listen === undefined ? undefined : Wakeups.makeUnsafe({
    listen: inTime("listen", Effect.withTracerEnabled(listen(`${channelPrefix}${subscriber}`), false)),
    register: (workIds) =>
      inTime("register", run("register", text.register, [workIds, subscriber, micros(Wakeups.registrationTtl)])),
    passOn: (workIds) => inTime("passOn", run("passOn", text.passOn, [workIds, subscriber])),
    unregister: (workIds, ping) => inTime("unregister", run("unregister", text.unregister, [workIds, subscriber, ping]))
  })

  const CurrentFencedLevel = Context.Reference<FencedLevel | undefined>(
    `worklease/layers/Postgres/FencedLevel/${fencedLevels++}`,
    { defaultValue: () => undefined }
  )

  /** Notes what a fence must know about its transaction, unless a savepoint in between may still undo it. */
  const atFencedLevel = (f: (fenced: FencedLevel) => void): Effect.Effect<void> =>
    Effect.map(Effect.all([openTransaction, CurrentFencedLevel]), ([level, fenced]) => {
      if (Option.isNone(level)) return
      while (fenced !== undefined && fenced.level !== level.value) fenced = fenced.parent
      if (fenced !== undefined) f(fenced)
    })

  /** Also after a COMMIT that only a fence knows of. */
  const afterCommit = (effect: Effect.Effect<void>): Effect.Effect<void> =>
    Effect.suspend(() => {
      let done = false
      const once = Effect.suspend(() => {
        if (done) return Effect.void
        done = true
        return effect
      })
      return Effect.andThen(atFencedLevel((fenced) => fenced.callbacks.push(once)), sql.afterCommit(once))
    })

  const backend = Backend.Backend.of({
    acquire,
    renew,
    checkpoint,
    release,
    read,
    forget,
    requestYield,
    lift,
    sweep,
    inspect,
    list,
    ...Wakeups.portOf(wakeups),
    transaction: Option.some({
      isOpen: Effect.map(openTransaction, Option.isSome),
      afterCommit,
      outside,
      exclusive
    })
  })

  // ---------------------------------------------------------------------------
  // fence
  // ---------------------------------------------------------------------------

  /** COMMIT was not answered: whether it took effect, what it has stored tells, once it has ended. */
  const settleCommit = (options: {
    readonly workId: string
    readonly stored: Backend.CheckpointRequest | undefined
    readonly transactionId: string | undefined
    readonly remaining: () => number
    readonly operationTimeout: Duration.Duration
  }) =>
    Effect.flatMap(Clock.Clock, (clock) => {
      const { operationTimeout, stored } = options
      const ask = <Row extends object>(text: string, parameters: ReadonlyArray<unknown>) =>
        Effect.timeoutOrElse(run<Row>("settle", text, parameters), {
          duration: operationTimeout,
          orElse: () => Effect.fail(backendError("settle", "unknown", new TimedOut({})))
        })
      const settle = Effect.gen(function*() {
        const [{ status }] = yield* ask<{ readonly status: string | null }>(text.ended, [options.transactionId])
        if (status === "in progress") return { _tag: "Busy" as const }
        const [row] = stored === undefined ? [] : yield* ask<{ readonly sequence: Integer }>(text.sequence, [
          stored.workId,
          stored.holderId,
          stored.fencingToken
        ])
        if (row !== undefined && BigInt(row.sequence) === stored!.sequence) return { _tag: "Applied" as const }
        const isLess = row !== undefined && BigInt(row.sequence) < stored!.sequence
        // A later checkpoint of the term, or a successor, may have taken its place.
        return isLess || status === "aborted" ? { _tag: "NotApplied" as const } : { _tag: "Unknown" as const }
      })
      const since = Window.now(clock)
      const left = Math.max(options.remaining(), 2 * Duration.toMillis(operationTimeout))
      return resend("settle", settle, {
        workId: options.workId,
        persistent: true,
        remaining: () => left - Window.elapsedMillis(clock, since)
      })
    })

  const transaction: Fence["Service"]["transaction"] = <A, EX, R>(
    self: Effect.Effect<A, EX, R>,
    { operationTimeout, remaining, term }: Parameters<Fence["Service"]["transaction"]>[1]
  ): Effect.Effect<A, EX | BackendError | Fenced | LeaseExpired, R> =>
    Effect.uninterruptibleMask(Effect.fnUntraced(function*(restore) {
      const { workId } = term
      const begin = yield* SqlClient.BeginTransaction
      const enclosing = Option.getOrUndefined(yield* openTransaction)
      const fenced = new FencedLevel(yield* CurrentFencedLevel)
      let refused: BackendError | Fenced | LeaseExpired | undefined
      let transactionId: string | undefined
      let started = false
      let body: Exit.Exit<A, EX> | undefined

      const failed = (outcome: BackendError["outcome"], reason: BackendErrorReason) =>
        new BackendError({ operation: "transaction", workId, outcome, reason })

      const refuse = (error: BackendError | Fenced | LeaseExpired) => {
        refused = error
        return Effect.fail(error)
      }

      const pin = Effect.suspend(() =>
        sql.unsafe<{ readonly reply: "Done" | "Fenced" | "Expired"; readonly transaction: string }>(text.fence, [
          workId,
          term.holderId,
          term.fencingToken,
          ...(isEmbedded(sql) ? [] : [BigInt(Math.min(Math.max(Math.ceil(remaining()), 1), maxTimeout))])
        ])
      ).pipe(
        Effect.withTracerEnabled(false),
        // Whoever has the row locked keeps it for the moment of a takeover, or does not belong to the library.
        Effect.timeoutOrElse({
          duration: operationTimeout,
          orElse: () => refuse(failed("rejected", new TimedOut({})))
        }),
        Effect.flatMap(([row]) => {
          if (row.reply !== "Done") return refuse(row.reply === "Fenced" ? new Fenced(term) : new LeaseExpired(term))
          transactionId = row.transaction
          return openTransaction
        }),
        Effect.tap((level) =>
          Effect.sync(() => {
            fenced.level = Option.getOrUndefined(level)
          })
        )
      )

      // Whatever the transaction comes to: a rollback that fails makes defects of the failures it meets.
      const over = Deferred.makeUnsafe<void>()
      const recorded = Effect.suspend(() => {
        started = true
        return self
      }).pipe(
        Effect.provideService(SqlClient.BeginTransaction, begin),
        Effect.provideService(CurrentFencedLevel, fenced),
        Effect.onExit((exit) =>
          Effect.sync(() => {
            body = exit
            Deferred.doneUnsafe(over, Effect.void)
          })
        )
      )

      // In a fiber of its own, which is left behind when its connection hangs.
      const fiber = yield* sql.withTransaction(Effect.andThen(pin, recorded)).pipe(
        Effect.provideService(SqlClient.BeginTransaction, readCommitted),
        restore,
        Effect.forkDetach({ startImmediately: true, uninterruptible: "inherit" })
      )
      fiber.addObserver(() => Deferred.doneUnsafe(over, Effect.void))
      if (Exit.isFailure(yield* Effect.exit(restore(Deferred.await(over))))) {
        fiber.interruptUnsafe()
        if (started) yield* Deferred.await(over)
      }
      // This fiber cannot be interrupted, so that a timeout of its own would wait for what it has to give up.
      const exit = fiber.pollUnsafe() ?? Option.getOrUndefined(
        yield* Fiber.join(yield* Effect.forkDetach(Effect.timeoutOption(Fiber.await(fiber), operationTimeout)))
      )
      if (exit === undefined) {
        yield* Effect.logWarning(
          `The connection of a fenced transaction of ${JSON.stringify(workId)} does not answer and is left behind`
        )
      } else if (Exit.isSuccess(exit)) {
        // The savepoint has become part of the level around it.
        yield* atFencedLevel((around) => {
          around.stored = fenced.stored ?? around.stored
          around.callbacks.push(...fenced.callbacks)
        })
        return exit.value
      }
      if (refused !== undefined) return yield* Effect.fail(refused)
      if (body !== undefined && Exit.isFailure(body)) {
        return yield* withoutDeadConnections(body.cause, (reason) => failed("rejected", reason))
      }
      if (exit === undefined && body === undefined) return yield* Effect.interrupt

      const sqlError = exit === undefined ? undefined : exit.cause.reasons
        .map((reason) =>
          Cause.isFailReason(reason) ? reason.error : Cause.isDieReason(reason) ? reason.defect : undefined
        )
        .find(SqlError.isSqlError)
      if (exit !== undefined && sqlError === undefined) return yield* Effect.failCause(exit.cause as Cause.Cause<never>)
      const { outcome, reason } = sqlError === undefined
        ? backendError("transaction", "unknown", new TimedOut({}))
        : toBackendError("transaction", sqlError)
      // Without its body it was not committed, and inside another transaction that cannot be after an error any more.
      if (outcome === "rejected" || body === undefined || (enclosing !== undefined && exit !== undefined)) {
        return yield* failed("rejected", reason)
      }
      if (enclosing !== undefined) return yield* failed("unknown", reason)

      const settled = yield* restore(
        settleCommit({ workId, stored: fenced.stored, transactionId, remaining, operationTimeout })
      )
        .pipe(Effect.mapError(() => failed("unknown", reason)))
      if (settled._tag !== "Applied") {
        return yield* failed(settled._tag === "NotApplied" ? "rejected" : "unknown", reason)
      }
      yield* Effect.forEach(fenced.callbacks, (callback) => callback, { discard: true })
      return body.value
    }))

  const context = Context.make(Backend.Backend, backend).pipe(Context.add(Fence, Fence.of({ transaction })))
  return wakeups === undefined
    ? Effect.succeed(context)
    : Effect.as(Effect.forkScoped(outside(wakeups.keep)), context)
}

/** The largest timeout that PostgreSQL takes, in milliseconds. */
const maxTimeout = 2_147_483_647

/** The level of a transaction that a fence runs at, and what has been done at it. */
class FencedLevel {
  readonly parent: FencedLevel | undefined
  /** As the client knows it: the outermost transaction, or a savepoint. */
  level: SqlClient.TransactionConnection.Service | undefined
  /** The last checkpoint. */
  stored: Backend.CheckpointRequest | undefined
  /** What waits for the commit. */
  readonly callbacks: Array<Effect.Effect<void>> = []

  constructor(parent: FencedLevel | undefined) {
    this.parent = parent
  }
}

let fencedLevels = 0

/** What the body of a transaction failed with; a dead connection is no defect, and hides nothing. */
const withoutDeadConnections = <E>(
  cause: Cause.Cause<E>,
  failed: (reason: BackendErrorReason) => BackendError
): Effect.Effect<never, E | BackendError> => {
  let dead: BackendErrorReason | undefined
  const reasons = cause.reasons.filter((reason) => {
    if (!Cause.isDieReason(reason) || !SqlError.isSqlError(reason.defect)) return true
    const error = toBackendError("transaction", reason.defect)
    const code = codeOf(reason.defect)
    // 25P03 and 25P04: the timeouts of a fence.
    if (error.reason._tag !== "Unreachable" && code !== "25P03" && code !== "25P04") return true
    dead = error.reason
    return false
  })
  return dead !== undefined && reasons.length === 0
    ? Effect.fail(failed(dead))
    : Effect.failCause(Cause.fromReasons(reasons))
}

/**
 * Whether the database is part of this process, and freezes and dies with it.
 * It must not end a session by a timeout: PGlite has but one, and turns in a
 * circle for ever when that ends.
 */
const isEmbedded = (sql: SqlClient.SqlClient): boolean => sql.driver === "pglite"

/** Whether an open transaction takes the only connection that the client has. */
const isExclusive = (sql: SqlClient.SqlClient): boolean =>
  isEmbedded(sql) ||
  (Predicate.hasProperty(sql, "config") && Predicate.hasProperty(sql.config, "maxConnections") &&
    sql.config.maxConnections === 1)

/**
 * How the client listens, if it can. One with fewer than three connections must
 * not: besides the one that listens, one may be in a transaction, for whose end
 * renewals do not wait then.
 */
const listenOf = (client: SqlClient.SqlClient) => {
  if (!Predicate.hasProperty(client, "listen") || !Predicate.isFunction(client.listen)) return undefined
  const { listen } = client as unknown as {
    readonly listen: (
      channel: string
    ) => Effect.Effect<Queue.Dequeue<{ readonly payload: string }, SqlError.SqlError>, SqlError.SqlError, Scope.Scope>
  }
  if (!isEmbedded(client)) {
    const maxConnections = Predicate.hasProperty(client, "config") &&
        Predicate.hasProperty(client.config, "maxConnections")
      ? client.config.maxConnections
      : undefined
    if (Predicate.isNumber(maxConnections) && maxConnections < 3) return undefined
  }
  return (channel: string) => Effect.mapError(listen(channel), (error) => toBackendError("listen", error))
}

const transactionOf = <A, E, R>(
  sql: SqlClient.SqlClient,
  effect: Effect.Effect<A, E, R>
): Effect.Effect<A, E | SqlError.SqlError, R> =>
  sql.withTransaction(effect).pipe(
    Effect.provideService(SqlClient.BeginTransaction, readCommitted),
    // A rollback on a connection that has died is a defect of the client's; the error is the connection's.
    Effect.catchCause((cause): Effect.Effect<never, E | SqlError.SqlError> => {
      for (const reason of cause.reasons) {
        if (Cause.isDieReason(reason) && SqlError.isSqlError(reason.defect)) return Effect.fail(reason.defect)
      }
      return Effect.failCause(cause)
    })
  )

const noBytes = new Uint8Array(0)

/** Turns the rows of a batch, which come in any order, into its replies, which do not. */
const inOrderOf = <Row extends ItemRow, Reply>(
  requests: NonEmptyReadonlyArray<{ readonly workId: string }>,
  replyOf: (row: Row) => Reply,
  failures?: ReadonlyMap<string, BackendError>
) =>
(rows: ReadonlyArray<Row>): NonEmptyReadonlyArray<Reply | BackendError> => {
  const byWorkId = new Map(rows.map((row) => [row.work_id, row]))
  return requests.map(({ workId }) => {
    const row = byWorkId.get(workId)
    return row === undefined ? failures?.get(workId) : replyOf(row)
  }) as unknown as NonEmptyReadonlyArray<Reply | BackendError>
}

const termParameters = (terms: ReadonlyArray<Backend.Term>) => [
  terms.map((_) => _.workId),
  terms.map((_) => _.holderId),
  terms.map((_) => _.fencingToken)
]

/** It may be over by now. */
const durationOf = (micros: Integer): Duration.Duration => Duration.micros(BigInt(Math.max(0, Number(micros))))

const storedOf = (version: number | null, state: Uint8Array | null): Option.Option<Backend.Stored> =>
  version === null || state === null
    ? Option.none()
    // A client may hand out a view of a larger buffer, which the copy lets go.
    : Option.some({ version, bytes: state.slice() })

const recordOf = (row: RecordRow): Backend.LeaseRecord => ({
  workId: row.work_id,
  term: row.status === null ? Option.none() : Option.some({
    holderId: row.holder_id,
    fencingToken: BigInt(row.fencing_token),
    status: row.status,
    expiresAt: toMillis(row.expires_at),
    ...timesOf(row.status === "held", row.remaining)
  }),
  state: storedOf(row.state_version, row.state),
  termsWithoutProgress: row.terms_without_progress
})

const termReply = (row: TermRow): Backend.TermReply => ({ _tag: row.reply ?? "Done" })

const extendReply = (row: ExtendRow): Backend.ExtendReply =>
  row.reply !== undefined && row.reply !== "Done" ? { _tag: row.reply } : {
    _tag: "Done",
    expiresAt: toMillis(row.expires_at!),
    yieldRequest: row.yield_requested !== true ? Option.none() : Option.some({
      remaining: row.yield_remaining === null || row.yield_remaining === undefined
        ? Option.none()
        : Option.some(durationOf(row.yield_remaining))
    })
  }

// -----------------------------------------------------------------------------
// errors
// -----------------------------------------------------------------------------

const codeOf = (error: SqlError.SqlError): string | undefined => {
  const cause = error.reason.cause
  // Not EPIPE, say, which is the operating system's.
  return Predicate.hasProperty(cause, "code") && typeof cause.code === "string" && /^(?!E)[0-9A-Z]{5}$/.test(cause.code)
    ? cause.code
    : undefined
}

/** PostgreSQL's error, without what may quote the row or the parameters: they hold checkpoints. */
const withoutRow = (cause: unknown): unknown => {
  if (!(cause instanceof Error && ("detail" in cause || "where" in cause))) return cause
  const { detail: _, where: __, ...fields } = cause as Error & { readonly detail?: unknown; readonly where?: unknown }
  return Object.assign(new Error(cause.message), fields, { stack: cause.stack })
}

/**
 * What an error of the client means: classes 22, 23, 25, 40, 42, 53 and 54, lock and
 * statement timeouts, and whatever happens before a connection stands, leave
 * the statement unapplied. A connection that ends under it tells nothing.
 */
const toBackendError = (operation: string, error: SqlError.SqlError): BackendError => {
  const { reason } = error
  const cause = withoutRow(reason.cause)
  const code = codeOf(error)
  if (Predicate.isTagged(reason, "AuthenticationError")) {
    return backendError(operation, "rejected", new PermissionDenied({ cause }))
  }
  if (reason.operation === "connect") return backendError(operation, "rejected", new Unreachable({ cause }))
  // COMMIT of a transaction that had failed before.
  if (code === undefined && reason.operation === "commit") {
    return backendError(operation, "rejected", new Other({ cause }))
  }
  if (code === undefined) {
    return backendError(
      operation,
      "unknown",
      Predicate.isTagged(reason, "ConnectionError") ? new Unreachable({ cause }) : new Other({ cause })
    )
  }
  switch (code) {
    case "42501":
      return backendError(operation, "rejected", new PermissionDenied({ cause }))
    case "42P01":
    case "42703":
    case "3F000":
      return backendError(operation, "rejected", new SchemaOutdated({ cause, found: null, required: requiredVersion }))
    case "55P03":
    case "57014":
      return backendError(operation, "rejected", new TimedOut({ cause }))
    case "53300": // too_many_connections
    case "25006": // read_only_sql_transaction: a standby
      return backendError(operation, "rejected", new Unreachable({ cause }))
  }
  switch (code.slice(0, 2)) {
    case "28":
      return backendError(operation, "rejected", new PermissionDenied({ cause }))
    case "22":
    case "23":
    case "25":
    case "40":
    case "42":
    case "53":
    case "54":
      return backendError(operation, "rejected", new Other({ cause }))
    case "08":
    case "57":
      return backendError(operation, "unknown", new Unreachable({ cause }))
    default:
      return backendError(operation, "unknown", new Other({ cause }))
  }
}
