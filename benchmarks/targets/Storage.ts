/** 8. What a million renewals leave behind. */
import { PgClient } from "@effect/sql-pg"
import { Deferred, Effect, Fiber, Layer } from "effect"
import { Lease } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import * as Bench from "../Bench.ts"
import * as Database from "../Database.ts"
import * as Format from "../Format.ts"
import { millisOf } from "../Measure.ts"
import { encoded, Import, stateOf } from "../State.ts"
import * as Target from "../Target.ts"

const minimumShare = 99
const maximumBytes = 1_000_000

export const target = Target.make({
  number: 8,
  name: "Storage",
  method:
    "Leases with a stored state are renewed by `Lease.renew`, each in a fiber of its own, again and again. Then the share " +
    "of heap-only updates among those of the renewals, and the size of the table and its indexes together. Beside it, the same " +
    "with another transaction that holds a snapshot all the while (REPEATABLE READ), which keeps the server from " +
    "cleaning up: with fewer renewals, for they become slower and slower.",
  sizes: {
    full: { leases: 1000, renewals: 1000, besideTransaction: 200 },
    quick: { leases: 1000, renewals: 50, besideTransaction: 20 },
    tiny: { leases: 20, renewals: 10, besideTransaction: 5 }
  },
  describe: ({ besideTransaction, leases, renewals }) =>
    `${Format.count(leases)} leases, ${Format.count(leases * renewals)} renewals; ${
      Format.count(leases * besideTransaction)
    } beside an open transaction`,
  run: Effect.fnUntraced(function*({ besideTransaction, leases, renewals }) {
    const state = yield* encoded(1)
    yield* Bench.progress(`${Format.count(leases * renewals)} renewals`)
    const alone = yield* renew(leases, renewals, false)
    yield* Bench.progress(`${Format.count(leases * besideTransaction)} renewals beside an open transaction`)
    const beside = yield* renew(leases, besideTransaction, true)
    return {
      rows: [
        {
          what: `${Format.count(leases * renewals)} renewals: heap-only`,
          ours: `${alone.share.toFixed(2)} %`,
          target: `≥ ${minimumShare} %`,
          verdict: Target.verdict(alone.share >= minimumShare)
        },
        {
          what: "the same: table and indexes",
          ours: `${Format.bytes(alone.bytes)} (table ${Format.bytes(alone.tableBytes)})`,
          target: `< ${Format.bytes(maximumBytes)}`,
          verdict: Target.verdict(alone.bytes < maximumBytes)
        },
        {
          what: `${Format.count(leases * besideTransaction)} beside an open transaction: heap-only`,
          ours: Format.percent(beside.share)
        },
        {
          what: "the same: table and indexes",
          ours: `${Format.bytes(beside.bytes)} (table ${Format.bytes(beside.tableBytes)})`
        }
      ],
      notes: [
        `Each lease has a state of ${state.byteLength} bytes. The renewals went at ${
          Format.rate(alone.rate)
        }, and at ` +
        `${Format.rate(beside.rate)} beside the open transaction.`
      ]
    }
  })
})

const renew = Effect.fnUntraced(function*(leases: number, renewals: number, beside: boolean) {
  const url = yield* Bench.database
  yield* Effect.scoped(Layer.build(Layer.provide(Postgres.layerMigrations(), Database.client(url))))
  // The same holder, over one pool for the setup and over another, whose statements are counted.
  const process = Database.leases(url, { holderId: crypto.randomUUID() })
  const tokens = yield* Effect.forEach(
    Array.from({ length: leases }),
    Effect.fnUntraced(function*(_, i) {
      const { token } = yield* Lease.acquire(Import.id(String(i)))
      yield* Lease.checkpoint(token, stateOf(i))
      return token
    }),
    { concurrency: "unbounded" }
  ).pipe(Effect.provide(process))
  const before = yield* Database.statistics(url)
  // As they fall due where they are held: all together, again and again.
  let left = renewals
  const run = millisOf(Effect.whileLoop({
    while: () => left > 0,
    body: () => Effect.forEach(tokens, (token) => Lease.renew(token), { concurrency: "unbounded", discard: true }),
    step: () => left--
  })).pipe(Effect.provide(process))
  const millis = yield* (beside ? besideSnapshot(url, run) : run)
  const after = yield* Database.statistics(url)
  if (after.updated - before.updated !== leases * renewals) {
    return yield* Effect.die(`${leases * renewals} renewals have updated ${after.updated - before.updated} rows`)
  }
  return {
    share: (after.heapOnly - before.heapOnly) / (leases * renewals) * 100,
    bytes: after.tableBytes + after.indexBytes,
    tableBytes: after.tableBytes,
    rate: leases * renewals / millis * 1000
  }
}, Effect.scoped)

/** Another transaction has a snapshot, from before the effect to its end. */
const besideSnapshot = Effect.fnUntraced(function*<A, E, R>(url: string, effect: Effect.Effect<A, E, R>) {
  const opened = yield* Deferred.make<void>()
  const done = yield* Deferred.make<void>()
  const transaction = Effect.gen(function*() {
    const sql = yield* PgClient.PgClient
    yield* sql.withTransaction(Effect.gen(function*() {
      yield* sql`SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`
      yield* sql`SELECT count(*) FROM pg_class`
      yield* Deferred.succeed(opened, undefined)
      yield* Deferred.await(done)
    }))
  }).pipe(Effect.provide(Database.client(url)))
  const fiber = yield* Effect.forkChild(transaction)
  yield* Effect.raceFirst(Deferred.await(opened), Fiber.join(fiber))
  const result = yield* effect
  yield* Deferred.succeed(done, undefined)
  yield* Fiber.join(fiber)
  return result
})
