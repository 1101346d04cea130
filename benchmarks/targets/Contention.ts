/** 7. Many waiters for one lease, which is passed on as fast as it goes. */
import { Effect, Layer } from "effect"
import * as Postgres from "worklease/layers/Postgres"
import * as Bench from "../Bench.ts"
import * as Database from "../Database.ts"
import * as Format from "../Format.ts"
import { monotonicMillis } from "../Measure.ts"
import * as Processes from "../Processes.ts"
import { Contender } from "../processes/Contender.ts"
import { median, spread } from "../Statistics.ts"
import * as Target from "../Target.ts"

const minimumRate = 300
const maximumStatements = 2
/** In seconds: the default. */
const pollInterval = 1

export const target = Target.make({
  number: 7,
  name: "Contention",
  method:
    "200 fibers, in 4 processes or in one, want the same work ID: each takes it with `Worker.run` and `wait: true`, lets " +
    "other fibers run, ends, and wants it again. Handoffs a second are the terms that began after the first second. One " +
    "winner each time: the terms of all processes, put in the order in which they began on the machine's monotonic clock, " +
    "do not overlap, and their fencing tokens rise. Nothing burned by losers: the rows that the server has written, less " +
    "those of inserts that it took back because another one was first, are as many as the leases that were taken and " +
    "released. Statements are all that the clients of the processes have sent, " +
    "less one for each acquire that succeeded and each release; poll intervals " +
    "are those of all waiters, until each has had its last turn. The log of the server is searched for anything from WARNING on.",
  sizes: {
    full: { waiters: 200, seconds: 10, warmUp: 1, rounds: 3 },
    quick: { waiters: 200, seconds: 2, warmUp: 1, rounds: 1 },
    tiny: { waiters: 8, seconds: 1.5, warmUp: 0.2, rounds: 1 }
  },
  describe: ({ rounds, seconds, waiters }) =>
    `${waiters} waiters, ${Format.plural(rounds, "round")} of ${Format.seconds(seconds)} each way`,
  run: Effect.fnUntraced(function*(size) {
    const spreads = [4, 1]
    const rounds = new Map<number, Array<Effect.Success<ReturnType<typeof contend>>>>(
      spreads.map((processes) => [processes, []])
    )
    for (let round = 0; round < size.rounds; round++) {
      for (const processes of spreads) {
        yield* Bench.progress(
          `${size.waiters} waiters in ${Format.plural(processes, "process")}, round ${round + 1} of ${size.rounds}`
        )
        rounds.get(processes)!.push(yield* contend(processes, size))
      }
    }
    const rowsOf = (processes: number): ReadonlyArray<Target.Row> => {
      const measured = rounds.get(processes)!
      const rate = spread(measured.map((_) => _.rate))
      const statements = median(measured.map((_) => _.statements))
      const sum = (f: (_: typeof measured[number]) => number) => measured.reduce((sum, round) => sum + f(round), 0)
      const overlaps = sum((_) => _.overlaps)
      const burned = sum((_) => _.burned)
      const logged = measured.flatMap((_) => _.logged)
      const failures = measured.flatMap((_) => _.failures)
      return [
        {
          what: `${size.waiters} waiters in ${processes === 1 ? "one process" : `${processes} processes`}: handoffs`,
          ours: Format.spread(Format.rate, rate),
          target: `≥ ${minimumRate}/s`,
          verdict: Target.verdict(rate.median >= minimumRate)
        },
        {
          what: "terms that overlap, or whose tokens do not rise",
          ours: `${overlaps} of ${Format.count(sum((_) => _.terms))}`,
          target: "0",
          verdict: Target.verdict(overlaps === 0)
        },
        {
          what: "rows written, less those of acquires and releases",
          ours: Format.count(burned),
          target: "0",
          verdict: Target.verdict(burned === 0)
        },
        {
          what: "statements per waiter and poll interval (1 s)",
          ours: statements.toFixed(2),
          target: `≤ ${maximumStatements}`,
          verdict: Target.verdict(statements <= maximumStatements)
        },
        {
          what: "lines in the server log; failed waits",
          ours: `${logged.length}; ${failures.length}${
            [...logged, ...failures].slice(0, 1).map((line) => `: ${line.slice(0, 80)}`).join("")
          }`,
          target: "0; 0",
          verdict: Target.verdict(logged.length + failures.length === 0)
        }
      ]
    }
    return {
      rows: spreads.flatMap(rowsOf),
      notes: spreads.flatMap((processes) =>
        rounds.get(processes)!.slice(-1).map(({ counts }) =>
          `The last round in ${Format.plural(processes, "process")}: ${
            Format.plural(counts.statements, "statement")
          } ` +
          `in all, of which ${Format.count(counts.acquires)} are acquires (${
            Format.count(counts.acquired)
          } succeeded) ` +
          `and ${Format.count(counts.releases)} releases.`
        )
      )
    }
  })
})

const contend = Effect.fnUntraced(function*(
  processes: number,
  size: { readonly waiters: number; readonly seconds: number; readonly warmUp: number }
) {
  const { server } = yield* Bench.Bench
  const url = yield* Bench.database
  yield* Effect.scoped(Layer.build(Layer.provide(Postgres.layerMigrations(), Database.client(url))))
  const logBefore = (yield* server.log).length

  const contenders = yield* Effect.forEach(
    Array.from({ length: processes }),
    () => Processes.start(Contender, { url, workId: "contention", waiters: size.waiters / processes }),
    {
      concurrency: "unbounded"
    }
  )
  for (const contender of contenders) yield* contender.next("Ready")
  const start = monotonicMillis()
  for (const contender of contenders) yield* contender.send({ _tag: "Start" })
  yield* Effect.sleep((size.warmUp + size.seconds) * 1000)
  for (const contender of contenders) yield* contender.send({ _tag: "Stop" })
  const ended = yield* Effect.forEach(contenders, (contender) => contender.next("Ended"), {
    concurrency: "unbounded"
  })
  const written = yield* Database.statistics(url)

  const terms = ended.flatMap((_) => _.terms).sort((a, b) => a.from - b.from)
  const overlaps = terms.filter((term, i) =>
    i > 0 && (term.from < terms[i - 1].to || term.token <= terms[i - 1].token)
  ).length
  const measured = terms.filter(({ from }) =>
    from >= start + size.warmUp * 1000 && from < start + (size.warmUp + size.seconds) * 1000
  )
  const acquired = ended.reduce((sum, _) => sum + _.acquired, 0)
  const released = ended.reduce((sum, _) => sum + _.released, 0)
  const statements = ended.reduce((sum, _) => sum + _.statements, 0)
  const waited = ended.reduce((sum, _) => sum + _.waited, 0)
  const log = (yield* server.log).slice(logBefore)
  return {
    rate: measured.length / size.seconds,
    terms: terms.length,
    overlaps,
    // Less than none is a release that was sent twice. Of inserts that meet each other, the server has the losers take
    // their rows back, and counts those as deleted; nothing else deletes any.
    burned: Math.max(0, written.inserted - written.deleted + written.updated - acquired - released),
    statements: (statements - acquired - released) / (waited / 1000 / pollInterval),
    logged: log.split("\n").filter((line) => /\b(WARNING|ERROR|FATAL|PANIC):/.test(line)),
    failures: ended.flatMap((_) => _.failures),
    counts: {
      statements,
      acquired,
      acquires: ended.reduce((sum, _) => sum + _.acquires, 0),
      releases: ended.reduce((sum, _) => sum + _.releases, 0)
    }
  }
}, Effect.scoped)
