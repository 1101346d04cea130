/** 6. The time from the expiry of a killed holder's lease to the beginning of its successor's work. */
import { Effect, Layer, Random } from "effect"
import * as Postgres from "worklease/layers/Postgres"
import * as EmbeddedPostgres from "../../support/EmbeddedPostgres.ts"
import * as Bench from "../Bench.ts"
import * as Database from "../Database.ts"
import * as Format from "../Format.ts"
import * as Processes from "../Processes.ts"
import { Holder } from "../processes/Holder.ts"
import { percentile, spread } from "../Statistics.ts"
import * as Target from "../Target.ts"

const maximum = 50
const ttl = 1000

export const target = Target.make({
  number: 6,
  name: "Takeover after SIGKILL",
  method:
    `Processes with a lease of ${
      ttl / 1000
    } s each are killed with SIGKILL, one after the other, while another process waits ` +
    "for all of their leases with `wait: true` and the default poll interval of 1 s. A trigger notes the expiry that the " +
    "killed holder's row had when it was taken. The successor's work begins at the time that its first line reads from the " +
    "machine's clock, which is the server's too, to the millisecond.",
  sizes: {
    full: { waves: 10, kills: 10 },
    quick: { waves: 2, kills: 6 },
    tiny: { waves: 1, kills: 1 }
  },
  describe: ({ kills, waves }) => Format.plural(kills * waves, "kill"),
  run: Effect.fnUntraced(function*({ kills, waves }) {
    const url = yield* Bench.database
    yield* Effect.scoped(Layer.build(Layer.provide(Postgres.layerMigrations(), Database.client(url))))
    for (const statement of recordTakeovers) yield* EmbeddedPostgres.execute(url, statement)
    const settings = { url, ttl, pollInterval: 1000, wakeups: true }
    const waiter = yield* Processes.start(Holder, settings)

    /** When the successor's work began, in milliseconds since the epoch. */
    const began = new Map<string, number>()
    let killed = 0
    let lostBefore = 0

    const wave = Effect.fnUntraced(function*(number: number) {
      yield* Bench.progress(`${killed} of ${kills * waves} kills; starting ${kills} processes`)
      const victims = yield* Effect.forEach(Array.from({ length: kills }), (_, i) =>
        Effect.gen(function*() {
          const workId = `takeover:${number * kills + i}`
          const holder = yield* Processes.start(Holder, settings)
          yield* holder.send({ _tag: "Take", workId })
          yield* holder.next("Began")
          return { workId, holder }
        }), { concurrency: 4 })
      for (const { workId } of victims) yield* waiter.send({ _tag: "Take", workId })
      const waited: typeof victims = []
      for (const victim of victims) {
        const event = yield* waiter.next(["Waiting", "Began"], of(victim))
        if (event._tag === "Waiting") waited.push(victim)
        // It got no time to renew its lease.
        else lostBefore++
      }
      for (const { holder } of waited) {
        yield* Effect.sleep(yield* Random.nextBetween(0, ttl / 3))
        yield* holder.kill
      }
      for (const victim of waited) {
        const { wallClock } = yield* waiter.next("Began", of(victim))
        began.set(victim.workId, wallClock)
        killed++
      }
      for (const { workId } of victims) yield* waiter.send({ _tag: "Release", workId })
    }, Effect.scoped)
    for (let number = 0; number < waves; number++) yield* wave(number)

    const rows = yield* EmbeddedPostgres.execute(
      url,
      "SELECT work_id, (extract(epoch FROM expired_at) * 1000)::double precision AS expired_at FROM takeover"
    )
    const delays = rows.flatMap(({ expired_at, work_id }) => {
      const at = began.get(String(work_id))
      return at === undefined ? [] : [at - Number(expired_at)]
    })
    const p99 = percentile(delays, 99)
    return {
      rows: [
        {
          what: `${Format.plural(delays.length, "takeover")}: p50 after the expiry`,
          ours: Format.millis(percentile(delays, 50))
        },
        {
          what: "p99 (max)",
          ours: `${Format.millis(p99)} (${Format.millis(spread(delays).max)})`,
          target: `≤ ${maximum} ms`,
          verdict: Target.verdict(p99 <= maximum && delays.length === kills * waves)
        }
      ],
      ...(lostBefore === 0 ? {} : { notes: [`${lostBefore} of them lost their lease before they were killed.`] })
    }
  })
})

const of = ({ workId }: { readonly workId: string }) => ({
  where: (event: { readonly workId: string }) => event.workId === workId,
  seconds: 20
})

/** For each takeover, when the lease that was taken had expired. */
const recordTakeovers = [
  "CREATE TABLE takeover (work_id text NOT NULL, expired_at timestamptz NOT NULL)",
  `CREATE FUNCTION record_takeover() RETURNS trigger LANGUAGE plpgsql AS $$
  BEGIN
    INSERT INTO takeover (work_id, expired_at) VALUES (OLD.work_id, OLD.expires_at);
    RETURN NULL;
  END $$`,
  `CREATE TRIGGER takeover AFTER UPDATE ON worklease FOR EACH ROW
  WHEN (NEW.fencing_token <> OLD.fencing_token AND OLD.exit IS NULL) EXECUTE FUNCTION record_takeover()`
]
