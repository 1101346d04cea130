/** 2. One checkpoint of a lone holder, against the bare statement through the same client. */
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import { Worker } from "worklease"
import * as Bench from "../Bench.ts"
import * as Database from "../Database.ts"
import * as Format from "../Format.ts"
import * as Measure from "../Measure.ts"
import { encoded, Import, stateOf } from "../State.ts"
import * as Target from "../Target.ts"

const maximum = 1.5

export const target = Target.make({
  number: 2,
  name: "A lone holder",
  method:
    "One holder calls `work.checkpoint`, then sends the bare UPDATE of one row through the same client, one after the " +
    "other, again and again. The figures are the medians of the blocks' medians; the ratio is that of each block.",
  sizes: {
    full: { blocks: 10, turns: 1000, warmUp: 1000 },
    quick: { blocks: 5, turns: 400, warmUp: 400 },
    tiny: { blocks: 2, turns: 10, warmUp: 5 }
  },
  describe: ({ blocks, turns }) => `${blocks} blocks of ${Format.count(turns)} each`,
  run: Effect.fnUntraced(function*({ blocks, turns, warmUp }) {
    const state = yield* encoded(1)
    const url = yield* Bench.database
    yield* Bench.progress(`${Format.count(blocks * turns)} of each, in turns`)
    const { ours, ratio, theirs } = yield* Effect.gen(function*() {
      yield* Database.makeBare(1, state)
      const sql = yield* SqlClient.SqlClient
      return yield* Worker.run(Import.id("lone"), (work) =>
        Measure.alternate(
          { blocks, turns, warmUp },
          (turn) => Measure.millisOf(Effect.suspend(() => work.checkpoint(stateOf(turn)))),
          () => Measure.millisOf(Effect.suspend(() => Database.bareCheckpoint(sql, 1, state)))
        ))
    }).pipe(Effect.provide(Database.leases(url)))
    return {
      rows: [
        {
          what: "one checkpoint, p50",
          ours: Format.spread(Format.millis, ours.p50),
          compared: `bare ${Format.spread(Format.millis, theirs.p50)}`,
          ratio: Format.spread(Format.ratio, ratio),
          target: `≤ ${maximum}×`,
          verdict: Target.verdict(ratio.median <= maximum)
        },
        {
          what: "p90, p99",
          ours: `${Format.millis(ours.p90)}, ${Format.millis(ours.p99)}`,
          compared: `bare ${Format.millis(theirs.p90)}, ${Format.millis(theirs.p99)}`,
          ratio: `${Format.ratio(ours.p90 / theirs.p90)}, ${Format.ratio(ours.p99 / theirs.p99)}`
        }
      ],
      figures: {
        "checkpoints-alone": {
          label: "checkpoints of a lone holder (target 2)",
          text: Format.rate(1000 / ours.p50.median)
        }
      }
    }
  })
})
