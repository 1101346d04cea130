/** 3. What it costs to hold many leases. */
import { Effect, Layer } from "effect"
import * as Postgres from "worklease/layers/Postgres"
import * as EmbeddedPostgres from "../../support/EmbeddedPostgres.ts"
import * as Bench from "../Bench.ts"
import * as Database from "../Database.ts"
import * as Format from "../Format.ts"
import * as Processes from "../Processes.ts"
import { Keeper } from "../processes/Keeper.ts"
import * as Target from "../Target.ts"

const maxStatements = 3
const maxCpu = 5
const maxHeap = 8000

interface Keeping {
  readonly leases: number
  /** In seconds, as the others. */
  readonly ttl: number
  readonly settle: number
  /** A multiple of a third of the TTL, after which each lease is renewed. */
  readonly measure: number
}

export const target = Target.make<{ readonly few: Keeping; readonly many: Keeping; readonly fibers: Keeping }>({
  number: 3,
  name: "Renewals",
  method:
    "A process of its own holds the leases with `Lease.hold` in one scope and does nothing else. Once the first round of " +
    "renewals is over, its statements (the calls of the backend) and its CPU time are counted over two rounds or more, as wholes. " +
    "The heap is what is used after a collection, less what was before the leases, for each lease. What was lost is " +
    "counted in the process (no window left) and in the database (not held any more). Shorter runs hold fewer leases " +
    "with a TTL that is shorter too: the renewals per second of 10,000 leases at 30 s are those of 2,000 at 6 s.",
  sizes: {
    full: {
      few: { leases: 10_000, ttl: 30, settle: 15, measure: 40 },
      many: { leases: 100_000, ttl: 30, settle: 15, measure: 180 },
      fibers: { leases: 10_000, ttl: 30, settle: 12, measure: 2 }
    },
    quick: {
      few: { leases: 2000, ttl: 6, settle: 2.5, measure: 4 },
      many: { leases: 10_000, ttl: 6, settle: 2.5, measure: 4 },
      fibers: { leases: 2000, ttl: 6, settle: 1, measure: 0.1 }
    },
    tiny: {
      few: { leases: 50, ttl: 1.5, settle: 0.6, measure: 1 },
      many: { leases: 100, ttl: 1.5, settle: 0.6, measure: 1 },
      fibers: { leases: 50, ttl: 1.5, settle: 0.6, measure: 0.1 }
    }
  },
  describe: ({ few, many }) => [few, many].map((_) => `${keepingOf(_)} for ${Format.seconds(_.measure)}`).join("; "),
  run: Effect.fnUntraced(function*({ few, fibers, many }) {
    const cost = yield* keep(few, "hold")
    const perSecond = cost.statements / cost.millis * 1000
    const cpu = cost.cpuMillis / cost.millis * 100
    const lasting = yield* keep(many, "hold")
    const runs = yield* keep(fibers, "run")
    return {
      rows: [
        {
          what: `${keepingOf(few)}: statements`,
          ours: Format.rate(perSecond),
          target: `≤ ${maxStatements}/s`,
          verdict: Target.verdict(perSecond <= maxStatements)
        },
        {
          what: "the same: CPU of the process",
          ours: `${Format.percent(cpu)} of a core`,
          target: `≤ ${maxCpu} %`,
          verdict: Target.verdict(cpu <= maxCpu)
        },
        {
          what: `${keepingOf(many)}, for ${Format.seconds(many.settle + many.measure)}: lost`,
          ours: Format.count(lasting.lost),
          target: "0",
          verdict: Target.verdict(lasting.lost === 0)
        },
        {
          what: "the same: heap of each lease",
          ours: Format.bytes(lasting.heapPerLease),
          target: `≤ ${Format.count(maxHeap)} B`,
          verdict: Target.verdict(lasting.heapPerLease <= maxHeap)
        },
        {
          what: `${Format.count(fibers.leases)} fibers of Worker.run: heap of each`,
          ours: Format.bytes(runs.heapPerLease)
        }
      ],
      notes: [
        `Renewals per second: ${Format.count(cost.renewals / cost.millis * 1000)} of the ` +
        `${Format.count(few.leases)} leases, in ${Format.plural(cost.statements, "statement")} over ` +
        `${Format.seconds(cost.millis / 1000)}; ${Format.count(lasting.renewals / lasting.millis * 1000)} of the ` +
        `${Format.count(many.leases)}, which took ${
          Format.rate(lasting.statements / lasting.millis * 1000)
        } statements ` +
        `and ${Format.percent(lasting.cpuMillis / lasting.millis * 100)} of a core.`
      ]
    }
  })
})

const keepingOf = ({ leases, ttl }: Keeping): string => `${Format.count(leases)} leases of ${Format.seconds(ttl)}`

const keep = Effect.fnUntraced(function*(keeping: Keeping, way: "hold" | "run") {
  const { leases, measure, settle, ttl } = keeping
  const url = yield* Bench.database
  yield* Effect.scoped(Layer.build(Layer.provide(Postgres.layerMigrations(), Database.client(url))))
  yield* Bench.progress(`${keepingOf(keeping)}: taking them`)
  const keeper = yield* Processes.start(Keeper, {
    url,
    leases,
    ttl: ttl * 1000,
    way,
    settle: settle * 1000,
    measure: measure * 1000
  }, ["--expose-gc"])
  yield* keeper.next("Holding", { seconds: 120 })
  yield* Bench.progress(`${keepingOf(keeping)}: holding them for ${Format.seconds(settle + measure)}`)
  const measured = yield* keeper.next("Measured", { seconds: settle + measure + 60 })
  const [{ held }] = yield* EmbeddedPostgres.execute(
    url,
    `SELECT count(*) AS held FROM worklease
    WHERE work_id LIKE 'kept:%' AND exit IS NULL AND expires_at > clock_timestamp()`
  )
  yield* keeper.kill
  return { ...measured, lost: Math.max(measured.lost, leases - Number(held)) }
}, Effect.scoped)
