import { assert, describe, it } from "@effect/vitest"
import { Duration, Effect, Fiber, Option, Schema } from "effect"
import { SqlClient } from "effect/sql"
import { Backend, Checkpoint, Lease, Renewal, Work, Worker } from "worklease"
import { start } from "../../support/EmbeddedPostgres.ts"
import { freshDatabase } from "../support/Postgres.ts"
import * as Sessions from "../support/Sessions.ts"
import * as TcpProxy from "../support/TcpProxy.ts"

const Count = Work.make("count", Checkpoint.make(Schema.Struct({ n: Schema.Number })))

const never: Effect.Effect<void> = Effect.never

describe("Postgres", () => {
  describe("costs", () => {
    /** What the effect sends, seen from the network. */
    const sentBy = <A, E, R>(proxy: TcpProxy.TcpProxy, effect: Effect.Effect<A, E, R>) =>
      Effect.gen(function*() {
        const before = (yield* proxy.statements).length
        yield* effect
        return (yield* proxy.statements).slice(before)
      })

    it.live("two statements for a work from acquire to release, one for each checkpoint, and one when it is new", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        yield* Effect.gen(function*() {
          // The first answer of all tells the isolation level, and later statements rely on it.
          yield* Lease.acquire("first")
          for (
            const [what, expected, effect] of [
              ["work that is new", 3, Worker.run("a", () => Effect.void)],
              ["the same work again", 2, Worker.run("a", () => Effect.void)],
              ["work that fails", 2, Effect.exit(Worker.run("a", () => Effect.fail("on purpose")))],
              ["a lease around an effect", 2, Lease.withLease(Effect.void, "a")],
              ["a lease for a scope", 2, Effect.scoped(Lease.hold("a"))],
              ["a final state", 3, Worker.run(Count.id("d"), (work) => work.leaveAs("finished", { n: 1 }))],
              ["a prior state", 2, Worker.run(Count.id("d"), (work) => Effect.succeed(work.prior.state))],
              ["a checkpoint", 3, Worker.run(Count.id("d"), (work) => work.checkpoint({ n: 2 }))],
              [
                "a checkpoint and a handoff",
                3,
                Effect.exit(
                  Worker.run(Count.id("d"), (work) => Effect.andThen(work.checkpoint({ n: 3 }), work.handOff({ n: 4 })))
                )
              ]
            ] as const
          ) {
            const statements = yield* sentBy(proxy, effect)
            assert.lengthOf(statements, expected, `${what}: ${statements.join("\n")}`)
          }
        }).pipe(Effect.provide(Sessions.process(proxy.url(url))))
      }))

    it.live("no transaction, no preparation and nothing else around them, on a pool of one too", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        yield* Effect.gen(function*() {
          const statements = yield* sentBy(proxy, Worker.run("a", () => Effect.void))
          assert.lengthOf(statements, 2)
          for (const statement of statements) assert.match(statement, /^(WITH|UPDATE) /)
        }).pipe(Effect.provide(Sessions.process(proxy.url(url), { maxConnections: 1 })))
      }))

    it.live("a few for many operations at once, also for more than fit in one", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const proxy = yield* TcpProxy.make(url)
        yield* Effect.gen(function*() {
          const workIds = Array.from({ length: 1_200 }, (_, i) => String(i))
          let tokens: ReadonlyArray<Lease.AnyToken> = []
          const acquires = yield* sentBy(
            proxy,
            Effect.map(
              Effect.forEach(workIds, (workId) => Lease.acquire(workId), { concurrency: "unbounded" }),
              (acquired) => {
                tokens = acquired.map(({ token }) => token)
              }
            )
          )
          assert.isAtMost(acquires.length, 20)
          const renewals = yield* sentBy(proxy, Effect.forEach(tokens, Lease.renew, { concurrency: "unbounded" }))
          assert.isAtMost(renewals.length, 20)
          for (const [i, token] of tokens.entries()) assert.strictEqual(token.workId, workIds[i])
        }).pipe(Effect.provide(Sessions.process(proxy.url(url))))
      }))

    // On a server of its own: what others do there would look like this test's doing.
    it.live("a refused acquire: one statement, or two where it is quarantined, which write nothing", () =>
      Effect.gen(function*() {
        const server = yield* start({
          settings: { autovacuum: "off", wal_level: "minimal", max_wal_senders: "0", full_page_writes: "on" }
        })
        const url = yield* server.createDatabase()
        const proxy = yield* TcpProxy.make(url)
        const sql = yield* Sessions.session(url)
        const traces = Effect.map(
          sql.unsafe<Record<string, unknown>>(`SELECT pg_current_wal_insert_lsn()::text AS wal,
            pg_snapshot_xmax(pg_current_snapshot())::text AS next_transaction,
            (SELECT jsonb_agg(to_jsonb(l) || jsonb_build_object('xmin', l.xmin::text, 'xmax', l.xmax::text, 'at', l.ctid::text))
              FROM worklease l)::text AS rows`),
          ([row]) => row
        )
        yield* Effect.gen(function*() {
          yield* Lease.acquire("held")
          const { token } = yield* Lease.acquire("released")
          yield* Lease.release(token, "finished")
          yield* Lease.acquire("released")
          yield* Lease.release((yield* Lease.acquire("abandoned")).token, "abandoned")
          yield* Lease.acquire("expired")
          yield* sql.unsafe("UPDATE worklease SET expires_at = now() WHERE work_id = 'expired'")
          const quarantined = ["abandoned", "expired"].map((workId) => Lease.acquire(workId, { quarantineAfter: 1 }))
          // The first look at a row sets hint bits.
          yield* Effect.flip(Lease.acquire("held"))
          yield* Effect.flip(Lease.acquire("released"))
          for (const acquire of quarantined) yield* Effect.flip(acquire)
          yield* sql.unsafe("CHECKPOINT")
          const before = yield* traces
          assert.isString(before.wal)
          assert.isString(before.rows)

          for (const workId of ["held", "released"]) {
            const statements = yield* sentBy(
              proxy,
              Effect.map(Effect.flip(Lease.acquire(workId)), (error) => assert.strictEqual(error._tag, "LeaseHeld"))
            )
            assert.lengthOf(statements, 1)
          }
          for (const acquire of quarantined) {
            const statements = yield* sentBy(
              proxy,
              Effect.map(Effect.flip(acquire), (error) => assert.strictEqual(error._tag, "Quarantined"))
            )
            assert.lengthOf(statements, 2)
          }
          const refused = [Lease.acquire("held"), ...quarantined]
          yield* Effect.forEach(Array.from({ length: 50 }, () => refused).flat(), (acquire) => Effect.flip(acquire), {
            concurrency: "unbounded"
          })
          assert.deepStrictEqual(yield* traces, before)

          // The measure is able to see one.
          yield* Lease.acquire("other")
          const after = yield* traces
          assert.notStrictEqual(after.wal, before.wal)
          assert.notStrictEqual(after.next_transaction, before.next_transaction)
        }).pipe(Effect.provide(Sessions.process(proxy.url(url))))
      }))

    it.live("at least 99 % of renewals and checkpoints are heap-only updates, and there is no second index", () =>
      Effect.gen(function*() {
        // The analyses of autovacuum are other transactions, too.
        const server = yield* start({ settings: { autovacuum: "off" } })
        const url = yield* server.createDatabase()
        const rounds = 60
        const holders = 200
        const state = "x".repeat(300)
        const Text = Work.make("text", Checkpoint.make(Schema.String))
        yield* Effect.gen(function*() {
          const tokens = yield* Effect.forEach(
            Array.from({ length: holders }, (_, i) => Text.id(String(i))),
            (work) => Effect.map(Lease.acquire(work), ({ token }) => token),
            { concurrency: "unbounded" }
          )
          for (let round = 0; round < rounds; round++) {
            yield* Effect.forEach(tokens, (token) => Lease.renew(token), { concurrency: "unbounded" })
            yield* Effect.forEach(tokens, (token) => Lease.checkpoint(token, state + round), {
              concurrency: "unbounded"
            })
          }
        }).pipe(Effect.provide(Sessions.process(url)))

        const sql = yield* Sessions.session(url)
        const updates = Effect.map(
          sql.unsafe<{ readonly all: bigint; readonly hot: bigint }>(
            `SELECT n_tup_upd AS all, n_tup_hot_upd AS hot FROM pg_stat_user_tables WHERE relname = 'worklease'`
          ),
          ([row]) => row
        )
        // A session reports what it has done when it ends.
        yield* Sessions.eventually(
          "every update is counted",
          Effect.map(updates, ({ all }) => Number(all) >= 2 * rounds * holders)
        )
        const { all, hot } = yield* updates
        assert.strictEqual(Number(all), 2 * rounds * holders)
        assert.isAtLeast(Number(hot) / Number(all), 0.99)

        assert.deepStrictEqual(
          yield* sql.unsafe(
            `SELECT indisprimary AS primary, pg_get_indexdef(indexrelid) LIKE '%(work_id)' AS by_work_id
            FROM pg_index WHERE indrelid = 'worklease'::regclass`
          ),
          [{ primary: true, by_work_id: true }]
        )
      }))
  })

  describe("clock", () => {
    /** The row, by the server's clock. */
    const rowOf = (sql: SqlClient.SqlClient, workId: string) =>
      Effect.map(
        sql.unsafe<
          { readonly expires_at: Date; readonly left: number; readonly exit: string | null; readonly token: bigint }
        >(
          `SELECT expires_at, exit, fencing_token AS token,
            extract(epoch FROM expires_at - clock_timestamp())::float8 * 1000 AS left
          FROM worklease WHERE work_id = $1`,
          [workId]
        ),
        ([row]) => row
      )

    it.live("nothing that waits for a row until after the expiry extends the lease", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        yield* Effect.gen(function*() {
          const policy = yield* Renewal.make({
            ttl: "1 second",
            operationTimeout: "500 millis",
            renewEvery: "300 millis"
          })
          const { token } = yield* Lease.acquire("a", { policy })
          const { token: other } = yield* Lease.acquire("b", { policy })
          const lockedA = yield* Sessions.lockRow(url, "a")
          const lockedB = yield* Sessions.lockRow(url, "b")
          yield* Sessions.eventually("half the lease is over", Effect.map(rowOf(sql, "a"), ({ left }) => left < 500))
          const renewal = yield* Effect.forkChild(Effect.exit(Lease.renew(token)))
          const release = yield* Effect.forkChild(Effect.exit(Lease.release(other, "finished")))
          yield* Sessions.eventually("the lease has expired", Effect.map(rowOf(sql, "a"), ({ left }) => left < -50))
          yield* lockedA.unlock
          yield* lockedB.unlock
          assert.strictEqual((yield* Effect.flip(yield* Fiber.join(renewal)))._tag, "LeaseExpired")
          assert.strictEqual((yield* Effect.flip(yield* Fiber.join(release)))._tag, "LeaseExpired")
          assert.isBelow((yield* rowOf(sql, "a")).left, 0)
          assert.isNull((yield* rowOf(sql, "b")).exit)
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    it.live("a checkpoint inside a transaction counts from when it gets the row, not from when it asked", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        const sql = yield* Sessions.session(url)
        yield* Effect.gen(function*() {
          const client = yield* SqlClient.SqlClient
          const { token } = yield* Lease.acquire(Count.id("a"), { policy: yield* Renewal.make({ ttl: "2 seconds" }) })
          const locked = yield* Sessions.lockRow(url, "count:a")
          const checkpoint = yield* Effect.forkChild(client.withTransaction(Lease.checkpoint(token, { n: 1 })))
          yield* Sessions.eventually(
            "the checkpoint waits for the row, and the lease has expired",
            Effect.map(
              sql.unsafe<{ readonly waiting: boolean }>(
                `SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted) AND
                  (SELECT expires_at < clock_timestamp() FROM worklease) AS waiting`
              ),
              ([{ waiting }]) => waiting
            )
          )
          yield* locked.unlock
          yield* Fiber.join(checkpoint)
          // now() would be the transaction's start, and the whole wait would be missing.
          assert.isAbove((yield* rowOf(sql, "count:a")).left, 1_000)
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    it.live("a takeover inside a statement's own time: expiry is decided on the row as it is then", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire("a")
          const sql = yield* SqlClient.SqlClient
          yield* sql.unsafe("UPDATE worklease SET expires_at = clock_timestamp()")
          // In the middle of the statement that has locked it for a takeover.
          yield* sql.unsafe(`CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
            PERFORM pg_sleep(0.5);
            RETURN NEW;
          END $$`)
          yield* sql.unsafe("CREATE TRIGGER slow BEFORE UPDATE ON worklease FOR EACH ROW EXECUTE FUNCTION slow()")
          const taking = yield* Effect.forkChild(Lease.acquire("a"), { startImmediately: true })
          yield* Sessions.eventually(
            "it is under way",
            Effect.map(
              sql.unsafe("SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"),
              (rows) => rows.length === 1
            )
          )
          assert.strictEqual((yield* Effect.flip(Lease.renew(token)))._tag, "Fenced")
          const { token: next } = yield* Fiber.join(taking)
          assert.isTrue(next.fencingToken > token.fencingToken)
          assert.strictEqual((yield* Effect.flip(Lease.renew(token)))._tag, "Fenced")
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    for (const [holder, contender] of [[24, -24], [-24, 24]]) {
      it.live(`the holder's clock ${holder} h and the contender's ${contender} h off changes nothing`, () =>
        Effect.gen(function*() {
          const { url } = yield* freshDatabase()
          const sql = yield* Sessions.session(url)
          const hour = 3_600_000
          const ttl = Duration.toMillis("1 second")
          const held = yield* Effect.forkChild(
            Effect.exit(Worker.run(Count.id("a"), (work) => Effect.andThen(work.checkpoint({ n: 1 }), never))).pipe(
              Effect.provide(Sessions.process(url, { holderId: "holder", ttl })),
              Sessions.skewed(() => holder * hour)
            )
          )
          yield* Sessions.eventually(
            "the holder has a checkpoint",
            Effect.match(rowOf(sql, "count:a"), { onSuccess: (row) => row !== undefined, onFailure: () => false })
          )
          yield* Effect.gen(function*() {
            const until = performance.now() + 3 * ttl
            while (performance.now() < until) {
              const error = yield* Effect.flip(Lease.acquire(Count.id("a")))
              assert.strictEqual(error._tag, "LeaseHeld")
              if (error._tag === "LeaseHeld") {
                assert.strictEqual(error.holderId, "holder")
                assert.isAtMost(Duration.toMillis(error.retryAfter), ttl)
              }
              yield* Sessions.pause(20)
            }
            // A wrong clock is no reason to lose a lease: it is still renewed, and released when it ends.
            assert.isUndefined(held.pollUnsafe())
            yield* Fiber.interrupt(held)
            const { prior } = yield* Lease.acquire(Count.id("a"))
            assert.strictEqual(prior.exit, "abandoned")
            assert.deepStrictEqual(prior.state, Option.some({ n: 1 }))
          }).pipe(
            Effect.provide(Sessions.process(url, { holderId: "contender" })),
            Sessions.skewed(() => contender * hour)
          )
        }))
    }
  })

  describe("tokens", () => {
    it.live("go on from where they were when the server's clock has stepped back, through release, forget and sweep", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const backend = yield* Backend.Backend
          const sweep = Effect.andThen(
            sql.unsafe("UPDATE worklease SET expires_at = expires_at - interval '2 hours' WHERE exit IS NOT NULL"),
            backend.sweep({ retention: Duration.zero, limit: 100 })
          )
          const first = (yield* Lease.acquire("a")).token
          // Ten years ahead of the clock, which by now is right again.
          const ahead = first.fencingToken + BigInt(10 * 365 * 86_400) * BigInt(1_000_000)
          yield* sql.unsafe("UPDATE worklease SET fencing_token = $1::bigint, expires_at = clock_timestamp()", [ahead])

          const taken = (yield* Lease.acquire("a")).token
          assert.isTrue(taken.fencingToken > ahead)
          yield* Lease.release(taken, "finished")
          const again = (yield* Lease.acquire("a")).token
          assert.isTrue(again.fencingToken > taken.fencingToken)
          yield* Lease.forget(again)
          const forgotten = (yield* Lease.acquire("a")).token
          assert.isTrue(forgotten.fencingToken > again.fencingToken)
          yield* Lease.release(forgotten, "retired")
          assert.strictEqual(yield* sweep, 1)
          const swept = (yield* Lease.acquire("a")).token
          assert.isTrue(swept.fencingToken > forgotten.fencingToken)
          yield* Lease.forget(swept)
          assert.strictEqual(yield* sweep, 1)
          assert.isTrue((yield* Lease.acquire("a")).token.fencingToken > swept.fencingToken)
          // Whoever comes first time after a sweep is above everything that was swept.
          assert.isTrue((yield* Lease.acquire("b")).token.fencingToken > swept.fencingToken)
        }).pipe(Effect.provide(Sessions.process(url)))
      }))

    it.live("exhausted tokens are refused, typed, and change nothing", () =>
      Effect.gen(function*() {
        const { url } = yield* freshDatabase()
        yield* Effect.gen(function*() {
          const sql = yield* SqlClient.SqlClient
          const largest = BigInt("9223372036854775807")
          const { token } = yield* Lease.acquire("a")
          yield* sql.unsafe("UPDATE worklease SET fencing_token = $1::bigint, exit = 'finished'", [largest])
          const error = yield* Effect.flip(Lease.acquire("a"))
          assert.strictEqual(error._tag, "BackendError")
          if (error._tag === "BackendError") {
            assert.strictEqual(error.reason._tag, "TokenExhausted")
            assert.strictEqual(error.outcome, "rejected")
            assert.strictEqual(error.workId, "a")
          }
          assert.strictEqual((yield* Effect.flip(Lease.renew(token)))._tag, "Fenced")
          yield* Lease.acquire("b")
          assert.deepStrictEqual(
            yield* sql.unsafe("SELECT fencing_token, exit FROM worklease WHERE work_id = 'a'"),
            [{ fencing_token: largest, exit: "finished" }]
          )
        }).pipe(Effect.provide(Sessions.process(url)))
      }))
  })
})
