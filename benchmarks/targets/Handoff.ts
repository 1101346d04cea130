/** 5. The time from a release to the beginning of the waiting successor's work, between two processes. */
import { Effect, Layer, Random } from "effect"
import * as Postgres from "worklease/layers/Postgres"
import * as Bench from "../Bench.ts"
import * as Database from "../Database.ts"
import * as Format from "../Format.ts"
import * as Processes from "../Processes.ts"
import { Holder } from "../processes/Holder.ts"
import { percentile, spread } from "../Statistics.ts"
import * as Target from "../Target.ts"

const maximum = { p50: 5, p99: 25 }
/** In milliseconds, as all here. */
const pollInterval = 200
/** What a wait may add, so that not all waiters come at once. */
const jitter = 25

interface Turns {
  readonly lanes: number
  readonly handoffs: number
}

export const target = Target.make<{ readonly wakeups: Turns; readonly polling: Turns }>({
  number: 5,
  name: "Handoff",
  method:
    "Two processes take turns on a work ID with `Worker.run` and `wait: true`. From the moment at which the work of the one " +
    "has ended, before its release is sent, to the first line of the other's work, on the monotonic clock that processes of " +
    "one machine share. The successor is known to wait before. With wake-ups the poll interval is the default of 1 s; " +
    `without, it is ${pollInterval} ms, several work IDs wait at a time, and the release comes at a random moment of it.`,
  sizes: {
    full: { wakeups: { lanes: 1, handoffs: 500 }, polling: { lanes: 10, handoffs: 40 } },
    quick: { wakeups: { lanes: 1, handoffs: 100 }, polling: { lanes: 10, handoffs: 10 } },
    tiny: { wakeups: { lanes: 1, handoffs: 4 }, polling: { lanes: 2, handoffs: 2 } }
  },
  describe: ({ polling, wakeups }) =>
    `${Format.count(wakeups.lanes * wakeups.handoffs)} with wake-ups, ` +
    `${Format.count(polling.lanes * polling.handoffs)} without`,
  run: Effect.fnUntraced(function*({ polling, wakeups }) {
    const woken = yield* handoffs(wakeups, true)
    const polled = yield* handoffs(polling, false)
    const [p50, p99] = [percentile(woken, 50), percentile(woken, 99)]
    const polledP99 = percentile(polled, 99)
    const limit = pollInterval + jitter
    return {
      rows: [
        {
          what: "with wake-ups: p50",
          ours: Format.millis(p50),
          target: `≤ ${maximum.p50} ms`,
          verdict: Target.verdict(p50 <= maximum.p50)
        },
        {
          what: "p99 (max)",
          ours: `${Format.millis(p99)} (${Format.millis(spread(woken).max)})`,
          target: `≤ ${maximum.p99} ms`,
          verdict: Target.verdict(p99 <= maximum.p99)
        },
        { what: `without, polling every ${pollInterval} ms: p50`, ours: Format.millis(percentile(polled, 50)) },
        {
          what: "p99 (max)",
          ours: `${Format.millis(polledP99)} (${Format.millis(spread(polled).max)})`,
          target: `≤ ${limit} ms`,
          verdict: Target.verdict(polledP99 <= limit)
        }
      ],
      figures: { handoff: { label: "handoff, p50 (target 5)", text: Format.millis(p50) } },
      notes: [`Without wake-ups, the target is the poll interval and ${jitter} ms of jitter.`]
    }
  })
})

/** The times of all handoffs, in milliseconds. */
const handoffs = Effect.fnUntraced(function*(turns: Turns, wakeups: boolean) {
  const url = yield* Bench.database
  yield* Effect.scoped(Layer.build(Layer.provide(Postgres.layerMigrations(), Database.client(url))))
  const settings = { url, ttl: 30_000, pollInterval: wakeups ? 1000 : pollInterval, wakeups }
  const processes = yield* Effect.all([Processes.start(Holder, settings), Processes.start(Holder, settings)], {
    concurrency: 2
  })
  const times: Array<number> = []
  let done = 0
  const lane = Effect.fnUntraced(function*(number: number) {
    const workId = `handoff:${number}`
    const mine = { where: (event: { readonly workId: string }) => event.workId === workId }
    let [holder, waiter] = processes
    yield* holder.send({ _tag: "Take", workId })
    yield* holder.next("Began", mine)
    // The first handoffs are not counted: the processes' code has not run yet.
    const uncounted = Math.min(10, turns.handoffs)
    for (let turn = -uncounted; turn < turns.handoffs; turn++) {
      yield* waiter.send({ _tag: "Take", workId })
      yield* waiter.next("Waiting", mine)
      yield* Effect.sleep(yield* Random.nextBetween(5, wakeups ? 15 : pollInterval))
      yield* holder.send({ _tag: "Release", workId })
      const began = yield* waiter.next("Began", mine)
      const ended = yield* holder.next("Ended", mine)
      if (turn >= 0) times.push(began.at - ended.at)
      done++
      yield* Bench.progress(
        `${wakeups ? "with" : "without"} wake-ups, ${done} of ${turns.lanes * (turns.handoffs + uncounted)} handoffs`
      )
      ;[holder, waiter] = [waiter, holder]
    }
  })
  yield* Effect.forEach(Array.from({ length: turns.lanes }), (_, number) => lane(number), {
    concurrency: "unbounded",
    discard: true
  })
  return times
}, Effect.scoped)
