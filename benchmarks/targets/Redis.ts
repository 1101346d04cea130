/** 12. Checkpoints on Redis, against one EVALSHA each over the same connection. */
import * as NodeRedis from "@effect/platform-node/NodeRedis"
import { Duration, Effect, Layer, Option } from "effect"
import { Redis as Client } from "effect/persistence"
import { Backend, Lease, Worker } from "worklease"
import * as Redis from "worklease/layers/Redis"
import * as RedisServer from "../../support/RedisServer.ts"
import * as Bench from "../Bench.ts"
import * as Format from "../Format.ts"
import * as Measure from "../Measure.ts"
import { Import, State, stateOf } from "../State.ts"
import { ratios, spread } from "../Statistics.ts"
import * as Target from "../Target.ts"

const holders = 200
const minimum = 2
const maximum = 1.5

export const target = Target.make({
  number: 12,
  name: "Redis",
  method: `${holders} fibers hold a lease each (\`Worker.run\`) on a Redis of this run, in memory only, and call ` +
    "`work.checkpoint` in a loop, with default options over one connection. Beside it, as many fibers send one EVALSHA " +
    "for each checkpoint over the same connection: a script for one record with the same predicates and fields, and a " +
    "state that is encoded with the same schema. That row is judged. The two below it compare the same rate of ours: with " +
    "that script and a constant state of the same bytes, so that all the encoding is ours alone; and with our own script, " +
    "called for one checkpoint at a time, which is what it costs not to gather. Then one holder alone calls " +
    "`work.checkpoint`, then sends the bare EVALSHA with the constant state, one after the other.",
  sizes: {
    full: { rounds: 5, seconds: 3, warmUp: 1, blocks: 10, turns: 1000 },
    quick: { rounds: 2, seconds: 0.5, warmUp: 0.2, blocks: 3, turns: 200 },
    tiny: { rounds: 1, seconds: 0.2, warmUp: 0.05, blocks: 2, turns: 10 }
  },
  describe: ({ blocks, rounds, seconds, turns }) =>
    `${Format.plural(rounds, "round")} of ${Format.seconds(seconds)} each; ${blocks} blocks of ${Format.count(turns)}`,
  run: Effect.fnUntraced(function*({ blocks, rounds, seconds, turns, warmUp }) {
    if (RedisServer.program === undefined) {
      return {
        rows: [{
          what: "checkpoints on Redis",
          ours: "not measured: there is no redis-server here",
          target: "measured",
          verdict: "fall short" as const
        }],
        notes: [RedisServer.howToGetOne]
      }
    }
    const server = yield* RedisServer.start()
    const state = yield* encoded(1)
    return yield* Effect.gen(function*() {
      const redis = yield* Client.Redis
      for (let i = 0; i < holders; i++) yield* makeBare(redis, i)
      const bare = (record: number, state: string) =>
        Effect.flatMap(
          redis.eval(bareCheckpoint)(record, state),
          ([reply]) => reply === "Done" ? Effect.void : Effect.die("The compared script did nothing")
        )
      const single = yield* makeSingle
      const say = (side: string) => (round: number) => Bench.progress(`round ${round + 1} of ${rounds}: ${side}`)
      const rateOf = <E, R>(
        begin: Effect.Effect<void, never, Bench.Bench>,
        once: (holder: number, turn: number) => Effect.Effect<unknown, E, R>
      ) =>
        Effect.andThen(
          begin,
          Measure.rate(
            { loops: holders, seconds, warmUp },
            (meter) => each((holder) => Measure.loop(meter, (turn) => once(holder, turn)))
          )
        )
      const many = yield* Measure.interleave(rounds, {
        ours: (round) =>
          Effect.andThen(
            say("worklease")(round),
            Measure.rate({ loops: holders, seconds, warmUp }, (meter) =>
              each((holder) =>
                Worker.run(
                  Import.id(String(holder)),
                  (work) => Measure.loop(meter, (turn) => work.checkpoint(stateOf(turn)))
                )
              ))
          ),
        encoded: (round) =>
          rateOf(
            say("EVALSHA")(round),
            (holder, turn) => Effect.flatMap(encoded(turn), (state) => bare(holder, state))
          ),
        constant: (round) => rateOf(say("EVALSHA of a constant")(round), (holder) => bare(holder, state)),
        single: (round) => rateOf(say("our script for one")(round), single)
      })
      const lone = yield* Worker.run(Import.id("lone"), (work) =>
        Measure.alternate(
          { blocks, turns, warmUp: turns },
          (turn) => Measure.millisOf(Effect.suspend(() => work.checkpoint(stateOf(turn)))),
          () => Measure.millisOf(Effect.suspend(() => bare(0, state)))
        ))
      const row = (what: string, compared: string, theirs: ReadonlyArray<number>) => ({
        what,
        ours: Format.spread(Format.rate, spread(many.ours)),
        compared: `${compared} ${Format.spread(Format.rate, spread(theirs))}`,
        ratio: Format.spread(Format.ratio, spread(ratios(many.ours, theirs)))
      })
      return {
        rows: [
          {
            ...row(`${holders} holders`, "one EVALSHA each", many.encoded),
            target: `≥ ${minimum}×`,
            verdict: Target.verdict(spread(ratios(many.ours, many.encoded)).median >= minimum)
          },
          row(`${holders} holders, where they need not encode`, "one EVALSHA each", many.constant),
          row(`${holders} holders, where ours does not gather`, "our script for one", many.single),
          {
            what: "one checkpoint of a lone holder, p50",
            ours: Format.spread(Format.millis, lone.ours.p50),
            compared: `bare ${Format.spread(Format.millis, lone.theirs.p50)}`,
            ratio: Format.spread(Format.ratio, lone.ratio),
            target: `≤ ${maximum}×`,
            verdict: Target.verdict(lone.ratio.median <= maximum)
          }
        ]
      }
    }).pipe(Effect.provide(
      Lease.layer.pipe(
        Layer.provideMerge(Redis.layer),
        Layer.provideMerge(NodeRedis.layer({ url: server.url, disableOfflineQueue: true }))
      )
    ))
  })
})

const each = <E, R>(f: (holder: number) => Effect.Effect<unknown, E, R>) =>
  Effect.forEach(Array.from({ length: holders }, (_, holder) => holder), f, {
    concurrency: "unbounded",
    discard: true
  })

const encoded = (step: number) =>
  Effect.map(State.encode("import:0", stateOf(step)), ({ bytes }) => new TextDecoder().decode(bytes))

/** Our own script for one checkpoint, without what gathers. */
const makeSingle = Effect.gen(function*() {
  const backend = yield* Backend.Backend
  const ttl = Duration.hours(1)
  const terms = yield* Effect.forEach(
    Array.from({ length: holders }, (_, holder) => `single:${holder}`),
    (workId) =>
      Effect.flatMap(
        backend.acquire([{ workId, holderId: "bench", attempt: workId, ttl, quarantineAfter: Option.none() }]),
        ([reply]) =>
          "fencingToken" in reply
            ? Effect.succeed({ workId, holderId: "bench", fencingToken: reply.fencingToken, ttl, sequence: 0n })
            : Effect.die("The lease was not free")
      )
  )
  return (holder: number, turn: number) =>
    Effect.flatMap(State.encode("import:0", stateOf(turn)), (state) => {
      const term = terms[holder]
      term.sequence++
      return Effect.flatMap(
        backend.checkpoint([{ ...term, state }]),
        ([reply]) => "expiresAt" in reply ? Effect.void : Effect.die("The checkpoint was not stored")
      )
    })
})

const keyOf = (record: number) => `bare:{${record}}`

const makeBare = (redis: Client.Redis["Service"], record: number) =>
  redis.send("HSET", keyOf(record), "holder", "bench", "token", "1", "exit", "", "expires", "0", "sequence", "0")

const bareCheckpoint = Client.script(
  (record: number, state: string) => [keyOf(record), "bench", "1", "30000000", "1", state],
  {
    numberOfKeys: 1,
    lua: `local values = redis.call('HMGET', KEYS[1], 'holder', 'token', 'exit', 'sequence')
if values[1] ~= ARGV[1] or values[2] ~= ARGV[2] then return {'Fenced'} end
if values[3] ~= '' then return {'Expired'} end
local time = redis.call('TIME')
local expires = string.format('%.0f', time[1] * 1000000 + time[2] + ARGV[3])
redis.call('HSET', KEYS[1], 'expires', expires, 'sequence', values[4] + 1, 'version', ARGV[4], 'state', ARGV[5])
return {'Done', expires}`
  }
).withReturnType<readonly [string, string]>()
