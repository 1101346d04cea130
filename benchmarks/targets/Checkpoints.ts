/** 1. Checkpoints of many holders at once, against pgbench with the statement for one row. */
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import { Worker } from "worklease"
import * as Bench from "../Bench.ts"
import type { Bar } from "../Chart.ts"
import * as Database from "../Database.ts"
import * as Format from "../Format.ts"
import * as Measure from "../Measure.ts"
import * as Pgbench from "../Pgbench.ts"
import { encoded, Import, stateOf } from "../State.ts"
import { ratios, spread } from "../Statistics.ts"
import * as Target from "../Target.ts"

const minimum = 4
const judgedFrom = 200

export const target = Target.make({
  number: 1,
  name: "Checkpoints",
  method:
    "So many fibers hold a lease each (`Worker.run`) and call `work.checkpoint` in a loop, with default options over a " +
    "pool of 10 connections. Beside it, `pgbench -M prepared -c 10 -j 2` sends the equivalent UPDATE of one row: same " +
    "table, predicates and columns, a state of the same bytes, as many rows as there are holders, and no two connections " +
    "on the same row, so that none waits for a lock. The same statement is also sent by our SQL client, from 10 fibers. " +
    "Our figure includes the encoding of the state with its schema; the others send a constant one.",
  sizes: {
    full: { holders: [32, 200, 1000], rounds: 5, seconds: 3, warmUp: 1 },
    quick: { holders: [32, 200, 1000], rounds: 2, seconds: 0.4, warmUp: 0.2 },
    tiny: { holders: [20], rounds: 1, seconds: 0.2, warmUp: 0.05 }
  },
  describe: ({ holders, rounds, seconds }) =>
    `${holders.map(Format.count).join(", ")} holders; ${Format.plural(rounds, "round")} of ${
      Format.seconds(seconds)
    } each`,
  run: Effect.fnUntraced(function*({ holders, rounds, seconds, warmUp }) {
    const { pgbench } = yield* Bench.Bench
    const state = yield* encoded(1)
    const bars: Array<Bar> = []
    const rows: Array<Target.Row> = []
    const figures: Record<string, Target.Figure> = {}
    const synced = holders.map((count) => ({ count, isSynchronous: true }))
    const unsynced = holders.filter((count) => count === judgedFrom).map((count) => ({ count, isSynchronous: false }))
    for (const { count, isSynchronous } of [...synced, ...unsynced]) {
      const measured = yield* Effect.scoped(Effect.gen(function*() {
        if (!isSynchronous) yield* Bench.setting("synchronous_commit", "off")
        const url = yield* Bench.database
        return yield* Effect.gen(function*() {
          yield* Database.makeBare(count, state)
          const sql = yield* SqlClient.SqlClient
          const say = (side: string, round: number) =>
            Bench.progress(`${Format.count(count)} holders, round ${round + 1} of ${rounds}: ${side}`)
          return yield* Measure.interleave(rounds, {
            ours: (round) => Effect.andThen(say("worklease", round), checkpoints({ holders: count, seconds, warmUp })),
            pgbench: (round) =>
              pgbench === undefined
                ? Effect.succeed(NaN)
                : Effect.andThen(
                  say("pgbench", round),
                  // Of its seconds, it takes a little to connect.
                  Database.bareCheckpointsOf(
                    sql,
                    (rate) => rate * Pgbench.wholeSeconds(seconds) / 2,
                    Pgbench.rate({
                      path: pgbench,
                      url,
                      script: Database.pgbenchScript(count),
                      variables: Database.pgbenchVariables(state),
                      seconds
                    })
                  )
                ),
            client: (round) =>
              Effect.andThen(
                say("the client", round),
                Database.bareCheckpointsOf(
                  sql,
                  (rate) => rate * seconds,
                  bare(sql, { rows: count, state, seconds, warmUp })
                )
              )
          })
        }).pipe(Effect.provide(Database.leases(url)))
      }))
      const [ours, client, bench] = [measured.ours, measured.client, measured.pgbench].map(spread)
      const compared = pgbench === undefined ? client : bench
      const ratio = spread(ratios(measured.ours, pgbench === undefined ? measured.client : measured.pgbench))
      const isJudged = isSynchronous && count >= judgedFrom
      rows.push({
        what: `${Format.count(count)} holders${isSynchronous ? "" : ", synchronous_commit off"}`,
        ours: Format.spread(Format.rate, ours),
        compared: pgbench === undefined
          ? `client ${Format.spread(Format.rate, client)} (there is no pgbench)`
          : `pgbench ${Format.spread(Format.rate, compared)}\nclient ${Format.spread(Format.rate, client)}`,
        ratio: Format.spread(Format.ratio, ratio),
        ...(isJudged ? { target: `≥ ${minimum}×`, verdict: Target.verdict(ratio.median >= minimum) } : {})
      })
      if (!isSynchronous) continue
      bars.push(bar(`worklease, ${Format.count(count)} holders`, ours.median, "ours"))
      if (pgbench !== undefined) bars.push(bar("pgbench, one row each", bench.median, "compared"))
      bars.push(bar("client, one row each", client.median, "compared"))
      figures[`checkpoints-${count}`] = {
        label: `checkpoints of ${Format.count(count)} holders (target 1)`,
        text: Format.rate(ours.median)
      }
    }
    return {
      rows,
      figures,
      notes: [`A state is ${state.byteLength} bytes once it is encoded.`],
      panels: [{ title: "Checkpoints per second, over 10 connections", bars }]
    }
  })
})

const bar = (label: string, value: number, kind: Bar["kind"]): Bar => ({ label, value, text: Format.rate(value), kind })

interface Period {
  readonly seconds: number
  readonly warmUp: number
}

const checkpoints = (options: Period & { readonly holders: number }) =>
  Measure.rate({ ...options, loops: options.holders }, (meter) =>
    Effect.forEach(
      Array.from({ length: options.holders }),
      (_, holder) =>
        Worker.run(Import.id(String(holder)), (work) => Measure.loop(meter, (turn) => work.checkpoint(stateOf(turn)))),
      { concurrency: "unbounded", discard: true }
    ))

const bare = (
  sql: SqlClient.SqlClient,
  options: Period & { readonly rows: number; readonly state: Uint8Array }
) =>
  Measure.rate({ ...options, loops: Database.connections }, (meter) =>
    Effect.forEach(
      Array.from({ length: Database.connections }),
      (_, fiber) =>
        Measure.loop(meter, (turn) => {
          const own = Math.floor(options.rows / Database.connections)
          return Database.bareCheckpoint(sql, 1 + fiber + Database.connections * (turn % own), options.state)
        }),
      { concurrency: "unbounded", discard: true }
    ))
