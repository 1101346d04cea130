/** 4. Acquire and release, against the client with one statement for each. */
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import { Lease } from "worklease"
import * as Bench from "../Bench.ts"
import * as Database from "../Database.ts"
import * as Format from "../Format.ts"
import * as Measure from "../Measure.ts"
import { encoded } from "../State.ts"
import { ratios, spread } from "../Statistics.ts"
import * as Target from "../Target.ts"

const maximumAlone = 2.5
const minimumTogether = 2.5

export const target = Target.make({
  number: 4,
  name: "Cycles",
  method:
    "`Lease.acquire` and `Lease.release` of work IDs that nobody else wants. Alone: one cycle and one bare statement (the " +
    "UPDATE that takes a row) in turns. Together: 200 fibers with work IDs of their own, against the client doing two " +
    "statements a cycle from 200 fibers over the same pool of 10 connections. Judged for work IDs that exist already; for " +
    "new ones, the client's first statement is an INSERT … ON CONFLICT.",
  sizes: {
    full: {
      blocks: 10,
      turns: 500,
      warmUp: 500,
      fibers: 200,
      fewer: [10, 32],
      rounds: 5,
      seconds: 3,
      warmUpSeconds: 1
    },
    quick: {
      blocks: 4,
      turns: 250,
      warmUp: 250,
      fibers: 200,
      fewer: [10, 32],
      rounds: 2,
      seconds: 0.5,
      warmUpSeconds: 0.2
    },
    tiny: { blocks: 2, turns: 5, warmUp: 5, fibers: 10, fewer: [3], rounds: 1, seconds: 0.1, warmUpSeconds: 0.05 }
  },
  describe: ({ blocks, fibers, rounds, seconds, turns }) =>
    `alone ${blocks} blocks of ${Format.count(turns)}; ${fibers} fibers, ${Format.plural(rounds, "round")} of ${
      Format.seconds(seconds)
    } each`,
  run: Effect.fnUntraced(function*(size) {
    const url = yield* Bench.database
    const state = yield* encoded(1)
    /** What each fiber takes in turn, where work IDs are taken again. */
    const own = 5
    const existing = size.fibers * own
    return yield* Effect.gen(function*() {
      const sql = yield* SqlClient.SqlClient
      yield* Database.makeBare(existing, state)
      yield* Database.bareRelease(sql)
      yield* Effect.forEach(Array.from({ length: existing }), (_, i) => cycle(`existing:${i + 1}`), {
        concurrency: "unbounded",
        discard: true
      })

      let fresh = existing
      const alone = (isNew: boolean) =>
        Effect.andThen(
          Bench.progress(`alone, work IDs that ${isNew ? "are new" : "exist"}`),
          Measure.alternate(
            size,
            (turn) => Measure.millisOf(cycle(isNew ? `alone:${++fresh}` : `existing:${1 + turn % existing}`)),
            // Each row is taken once, and then all of them are released.
            (turn) =>
              Effect.andThen(
                turn % existing === 0 ? Effect.asVoid(Database.bareRelease(sql)) : Effect.void,
                Measure.millisOf(Effect.suspend(() => Database.bareTake(sql, 1 + turn % existing)))
              )
          )
        )
      const together = (fibers: number, isNew: boolean, rounds = size.rounds) => {
        const idOf = (fiber: number, turn: number) => isNew ? ++fresh : 1 + fiber * own + turn % own
        const ours = (fiber: number, turn: number) =>
          Effect.suspend(() => cycle(`${isNew ? "new" : "existing"}:${idOf(fiber, turn)}`))
        const client = (fiber: number, turn: number) =>
          Effect.suspend(() => Database.bareCycle(sql, idOf(fiber, turn), isNew))
        const measure = <E, R>(
          side: string,
          once: (fiber: number, turn: number) => Effect.Effect<unknown, E, R>
        ) =>
        (round: number) =>
          Effect.andThen(
            Bench.progress(
              `${fibers} fibers, work IDs that ${isNew ? "are new" : "exist"}, round ${round + 1} of ${rounds}: ${side}`
            ),
            Measure.rate(
              { loops: fibers, seconds: size.seconds, warmUp: size.warmUpSeconds },
              (meter) =>
                Effect.forEach(
                  Array.from({ length: fibers }),
                  (_, fiber) => Measure.loop(meter, (turn) => once(fiber, turn)),
                  { concurrency: "unbounded", discard: true }
                )
            )
          )
        return Measure.interleave(rounds, {
          ours: measure("worklease", ours),
          client: measure("the client", client)
        })
      }

      const rowAlone = (what: string, measured: Effect.Success<ReturnType<typeof alone>>): Target.Row => ({
        what,
        ours: Format.spread(Format.millis, measured.ours.p50),
        compared: `bare ${Format.spread(Format.millis, measured.theirs.p50)}`,
        ratio: Format.spread(Format.ratio, measured.ratio)
      })
      const rowTogether = (what: string, measured: Effect.Success<ReturnType<typeof together>>): Target.Row => ({
        what,
        ours: Format.spread(Format.rate, spread(measured.ours)),
        compared: `client ${Format.spread(Format.rate, spread(measured.client))}`,
        ratio: Format.spread(Format.ratio, spread(ratios(measured.ours, measured.client)))
      })

      const aloneExisting = yield* alone(false)
      const aloneNew = yield* alone(true)
      yield* Database.bareRelease(sql)
      const togetherExisting = yield* together(size.fibers, false)
      const togetherNew = yield* together(size.fibers, true)
      const fewer: Array<readonly [fibers: number, measured: typeof togetherExisting]> = []
      for (const fibers of size.fewer) fewer.push([fibers, yield* together(fibers, false, Math.ceil(size.rounds / 2))])
      const ratio = spread(ratios(togetherExisting.ours, togetherExisting.client)).median
      const ours = spread(togetherExisting.ours).median
      const client = spread(togetherExisting.client).median
      return {
        rows: [
          {
            ...rowAlone("one cycle alone, p50", aloneExisting),
            target: `≤ ${maximumAlone}×`,
            verdict: Target.verdict(aloneExisting.ratio.median <= maximumAlone)
          },
          rowAlone("the same, new work IDs", aloneNew),
          {
            ...rowTogether(`${size.fibers} fibers`, togetherExisting),
            target: `≥ ${minimumTogether}×`,
            verdict: Target.verdict(ratio >= minimumTogether)
          },
          rowTogether("the same, new work IDs", togetherNew),
          ...fewer.map(([fibers, measured]) => rowTogether(`${fibers} fibers`, measured))
        ],
        figures: {
          "cycles-alone": {
            label: "acquire + release alone (target 4)",
            text: Format.rate(1000 / aloneExisting.ours.p50.median)
          },
          [`cycles-${size.fibers}`]: {
            label: `acquire + release, ${size.fibers} fibers (target 4)`,
            text: Format.rate(ours)
          },
          ...Object.fromEntries(fewer.map(([fibers, measured]) => [`cycles-${fibers}`, {
            label: `acquire + release, ${fibers} fibers (target 4)`,
            text: Format.rate(spread(measured.ours).median)
          }]))
        },
        panels: [{
          title: `Acquire + release per second, ${size.fibers} fibers over 10 connections`,
          bars: [
            { label: "worklease", value: ours, text: Format.rate(ours), kind: "ours" as const },
            { label: "client, two statements", value: client, text: Format.rate(client), kind: "compared" as const }
          ]
        }]
      }
    }).pipe(Effect.provide(Database.leases(url)))
  })
})

const cycle = (workId: string) => Effect.flatMap(Lease.acquire(workId), ({ token }) => Lease.release(token, "finished"))
