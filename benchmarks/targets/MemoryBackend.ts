/** 10. Checkpoints in memory, against the encoding of the same states alone. */
import { Effect, Layer } from "effect"
import { Lease, Worker } from "worklease"
import * as Memory from "worklease/layers/Memory"
import * as Bench from "../Bench.ts"
import * as Format from "../Format.ts"
import * as Measure from "../Measure.ts"
import { Import, State, stateOf } from "../State.ts"
import { ratios, spread } from "../Statistics.ts"
import * as Target from "../Target.ts"

const minimum = 0.5

export const target = Target.make({
  number: 10,
  name: "Memory backend",
  method:
    "100 holders call `work.checkpoint` in a loop over the memory backend. In turn, one fiber only encodes the same states " +
    "as the library does. That the backend is deterministic is for the test suite to show.",
  sizes: {
    full: { holders: 100, rounds: 7, seconds: 2, warmUp: 1 },
    quick: { holders: 100, rounds: 3, seconds: 0.5, warmUp: 0.2 },
    tiny: { holders: 10, rounds: 1, seconds: 0.1, warmUp: 0.05 }
  },
  describe: ({ holders, rounds, seconds }) =>
    `${holders} holders; ${Format.plural(rounds, "round")} of ${Format.seconds(seconds)} each`,
  run: Effect.fnUntraced(function*({ holders, rounds, seconds, warmUp }) {
    const checkpoints = Measure.rate({ loops: holders, seconds, warmUp }, (meter) =>
      Effect.forEach(
        Array.from({ length: holders }),
        (_, holder) =>
          Worker.run(
            Import.id(String(holder)),
            (work) => Measure.loop(meter, (turn) => work.checkpoint(stateOf(turn)))
          ),
        { concurrency: "unbounded", discard: true }
      )).pipe(Effect.provide(Lease.layer.pipe(Layer.provide(Memory.layer))))
    const encoding = Measure.rate(
      { loops: 1, seconds, warmUp },
      (meter) => Measure.loop(meter, (turn) => State.encode("import:0", stateOf(turn)))
    )
    const measured = yield* Measure.interleave(rounds, {
      ours: (round) => Effect.andThen(Bench.progress(`round ${round + 1} of ${rounds}: checkpoints`), checkpoints),
      encoding: (round) => Effect.andThen(Bench.progress(`round ${round + 1} of ${rounds}: encoding alone`), encoding)
    })
    const ratio = spread(ratios(measured.ours, measured.encoding))
    return {
      rows: [{
        what: `checkpoints of ${holders} holders`,
        ours: Format.spread(Format.rate, spread(measured.ours)),
        compared: `encoding alone ${Format.spread(Format.rate, spread(measured.encoding))}`,
        ratio: Format.spread(Format.ratio, ratio),
        target: `≥ ${minimum}×`,
        verdict: Target.verdict(ratio.median >= minimum)
      }]
    }
  })
})
