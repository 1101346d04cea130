import { assert, describe, it } from "@effect/vitest"
import { Cause, Context, Deferred, Effect, Exit, Fiber, Layer, Option, Stream } from "effect"
import { Reactivity } from "effect/reactivity"
import { SqlClient, SqlError } from "effect/sql"
import { Backend, Fence, Lease, LeaseError, Worker } from "worklease"
import * as PgliteClient from "worklease/layers/PgliteClient"
import * as Postgres from "worklease/layers/Postgres"
import * as EmbeddedPostgres from "../support/EmbeddedPostgres.ts"
import * as Fenced from "./support/Fenced.ts"
import { checkpointed, Import, windowOf, windowSince, write, written } from "./support/Fenced.ts"
import { eventually, pause } from "./support/Sessions.ts"
import * as Sessions from "./support/Sessions.ts"
import * as TcpProxy from "./support/TcpProxy.ts"

const policy = { ttl: "5 seconds", renewEvery: "3 seconds", operationTimeout: "300 millis" } as const
const window = 4_500

/** One process behind a network that can be broken, and a look at the database past it. */
const proxied = Effect.gen(function*() {
  const { process, sql, url } = yield* Fenced.postgres()
  const proxy = yield* TcpProxy.make(url)
  const a = yield* Layer.build(Sessions.process(proxy.url(url), { ...policy, holderId: "a" }))
  return { a, process, proxy, sql, url }
})

/** What the next COMMIT of the fenced work does on the server before it takes effect. */
const atCommit = (sql: SqlClient.SqlClient, statement: string) =>
  Effect.forEach([
    `CREATE FUNCTION at_commit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN ${statement}; RETURN NULL; END $$`,
    `CREATE CONSTRAINT TRIGGER at_commit AFTER INSERT ON written DEFERRABLE INITIALLY DEFERRED
      FOR EACH ROW EXECUTE FUNCTION at_commit()`
  ], (statement) =>
    sql.unsafe(statement), { discard: true })

/** Waits until the server executes the COMMIT, then cuts the connection under it. */
const cutAtCommit = (proxy: TcpProxy.TcpProxy, sql: SqlClient.SqlClient) =>
  eventually(
    "COMMIT is under way",
    Effect.map(
      sql.unsafe("SELECT FROM pg_stat_activity WHERE query = 'COMMIT' AND state = 'active' AND wait_event = 'PgSleep'"),
      (rows) => rows.length > 0
    )
  ).pipe(Effect.andThen(proxy.cut))

/** The COMMIT that follows never reaches the server, which sees the connection end instead. */
const loseCommit = (proxy: TcpProxy.TcpProxy) =>
  Effect.andThen(
    proxy.stall,
    Effect.forkDetach(Effect.andThen(pause(100), Effect.andThen(proxy.cut, proxy.pass)), { startImmediately: true })
  )

const backendPid = Effect.flatMap(
  SqlClient.SqlClient,
  (sql) => Effect.map(sql.unsafe<{ readonly pid: number }>("SELECT pg_backend_pid() AS pid"), ([row]) => row.pid)
)

/** Ends the connection of the transaction that this is called in, as an administrator would. */
const terminated = (sql: SqlClient.SqlClient) =>
  Effect.gen(function*() {
    const pid = yield* backendPid
    yield* sql.unsafe("SELECT pg_terminate_backend($1)", [pid])
    yield* eventually(
      "the session is over",
      Effect.map(sql.unsafe("SELECT FROM pg_stat_activity WHERE pid = $1", [pid]), (rows) => rows.length === 0)
    )
  })

const onlyFailure = (exit: Exit.Exit<unknown, unknown>): unknown => {
  const { reasons } = Option.getOrThrow(Exit.getCause(exit))
  assert.deepStrictEqual(reasons.map((reason) => reason._tag), ["Fail"], Cause.pretty(Cause.fromReasons(reasons)))
  return Option.getOrThrow(Exit.findErrorOption(exit))
}

const isRejected = (error: unknown) =>
  assert.deepInclude(error, { _tag: "BackendError", workId: "import:a", outcome: "rejected" })

describe("Fence over a network that breaks", () => {
  describe("a COMMIT whose reply is lost", () => {
    for (const as of ["cut", "silence"] as const) {
      for (const joined of [true, false]) {
        it.live(`is settled ${joined ? "as committed" : "as unknown without a checkpoint"} (${as})`, () =>
          Effect.gen(function*() {
            const { a, proxy, sql } = yield* proxied
            yield* Worker.run(Import.id("a"), (work) =>
              Effect.gen(function*() {
                yield* pause(500)
                let sentAt = 0
                const exit = yield* Effect.gen(function*() {
                  yield* write(1)
                  sentAt = performance.now()
                  if (joined) yield* work.checkpoint({ line: 1 })
                  yield* pause(100)
                  yield* proxy.loseReply({ of: "COMMIT", as })
                  return "done"
                }).pipe(Fence.transaction(work), Effect.exit)
                assert.strictEqual(yield* proxy.lostReplies, 1)
                const left = yield* windowOf(work)
                if (joined) {
                  assert.deepStrictEqual(exit, Exit.succeed("done"))
                  assert.isAbove(left, windowSince(window, sentAt))
                  assert.isAtMost(left, window - 100)
                } else {
                  assert.deepInclude(onlyFailure(exit), {
                    _tag: "BackendError",
                    workId: "import:a",
                    outcome: "unknown"
                  })
                  assert.isAtMost(left, window - 600)
                }
              })).pipe(Effect.provide(a))
            assert.deepStrictEqual(yield* written(sql), [1])
            assert.strictEqual(yield* checkpointed(sql), joined ? 1 : undefined)
            // A client does not close before its connections have an end.
            yield* proxy.cut
          }))
      }
    }

    it.live("is settled with a token too", () =>
      Effect.gen(function*() {
        const { a, proxy, sql } = yield* proxied
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          yield* Effect.gen(function*() {
            yield* write(1)
            yield* Lease.checkpoint(token, { line: 1 })
            yield* proxy.loseReply({ of: "COMMIT" })
          }).pipe(Fence.transaction(token))
        }).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [1])
      }))

    it.live("is settled once it has ended, if it is still under way", () =>
      Effect.gen(function*() {
        const { a, proxy, sql } = yield* proxied
        yield* atCommit(sql, "PERFORM pg_sleep(1)")
        let isCut = false
        yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            yield* write(1)
            yield* work.checkpoint({ line: 1 })
            yield* cutAtCommit(proxy, sql).pipe(
              Effect.andThen(Effect.sync(() => isCut = true)),
              Effect.forkDetach({ startImmediately: true })
            )
          }).pipe(
            Fence.transaction(work),
            Effect.andThen(Effect.map(written(sql), (lines) => assert.deepStrictEqual(lines, [1])))
          )).pipe(Effect.provide(a))
        assert.isTrue(isCut)
        assert.strictEqual(yield* checkpointed(sql), 1)
      }))

    for (const joined of [true, false]) {
      it.live(`is rejected if it never arrived, ${joined ? "with" : "without"} a checkpoint, and can be tried again`, () =>
        Effect.gen(function*() {
          const { a, proxy, sql } = yield* proxied
          yield* Worker.run(Import.id("a"), (work) =>
            Effect.gen(function*() {
              yield* pause(300)
              const once = (lose: Effect.Effect<unknown>) =>
                Effect.gen(function*() {
                  yield* write(1)
                  if (joined) yield* work.checkpoint({ line: 1 })
                  yield* lose
                }).pipe(Fence.transaction(work))
              isRejected(onlyFailure(yield* Effect.exit(once(loseCommit(proxy)))))
              assert.isAtMost(yield* windowOf(work), window - 300)
              assert.deepStrictEqual(yield* written(sql), [])
              assert.isUndefined(yield* checkpointed(sql))
              yield* once(Effect.void)
            })).pipe(Effect.provide(a))
          assert.deepStrictEqual(yield* written(sql), [1])
        }))
    }

    it.live("is rejected if the server's process ends before it takes effect", () =>
      Effect.gen(function*() {
        const { a, sql } = yield* proxied
        yield* atCommit(sql, "PERFORM pg_terminate_backend(pg_backend_pid())")
        const exit = yield* Worker.run(Import.id("a"), (work) =>
          Effect.andThen(write(1), work.checkpoint({ line: 1 })).pipe(Fence.transaction(work))).pipe(
            Effect.provide(a),
            Effect.exit
          )
        isRejected(onlyFailure(exit))
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("is rejected if the database refuses it", () =>
      Effect.gen(function*() {
        const { a, sql } = yield* proxied
        yield* atCommit(sql, "RAISE EXCEPTION 'not today'")
        const exit = yield* Worker.run(Import.id("a"), (work) =>
          Effect.andThen(write(1), work.checkpoint({ line: 1 })).pipe(Fence.transaction(work))).pipe(
            Effect.provide(a),
            Effect.exit
          )
        isRejected(onlyFailure(exit))
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("is not taken for lost because a savepoint with a checkpoint was rolled back", () =>
      Effect.gen(function*() {
        const { a, proxy, sql } = yield* proxied
        yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            const client = yield* SqlClient.SqlClient
            yield* pause(300)
            let sentAt = 0
            yield* Effect.gen(function*() {
              yield* write(1)
              sentAt = performance.now()
              yield* work.checkpoint({ line: 1 })
              yield* pause(200)
              yield* Effect.ignore(
                client.withTransaction(Effect.andThen(work.checkpoint({ line: 2 }), Effect.fail("own")))
              )
              yield* Effect.ignore(
                Fence.transaction(Effect.andThen(work.checkpoint({ line: 3 }), Effect.fail("own")), work)
              )
              yield* proxy.loseReply({ of: "COMMIT" })
            }).pipe(Fence.transaction(work))
            // What was rolled back does not count.
            const left = yield* windowOf(work)
            assert.isAtMost(left, window - 200)
            assert.isAbove(left, windowSince(window, sentAt))
          })).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [1])
        assert.strictEqual(yield* checkpointed(sql), 1)
      }))

    it.live("is not taken for applied because a later checkpoint was", () =>
      Effect.gen(function*() {
        const { a, proxy, process, sql } = yield* proxied
        // The checkpoints of a term that two of them see: the later one goes past the broken network.
        const direct = yield* process({ ...policy, holderId: "b" })
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          const later = yield* Deferred.make<void>()
          const fenced = yield* Effect.gen(function*() {
            yield* write(1)
            yield* Lease.checkpoint(token, { line: 1 })
            yield* Effect.forkDetach(
              Effect.andThen(
                Effect.provide(Lease.checkpoint(token, { line: 2 }), direct),
                Deferred.succeed(later, undefined)
              ),
              { startImmediately: true }
            )
            yield* pause(100)
            // Nobody can be asked before it is stored.
            yield* proxy.stall
            yield* Effect.forkDetach(
              pause(100).pipe(
                Effect.andThen(proxy.refuse),
                Effect.andThen(Deferred.await(later)),
                Effect.andThen(proxy.pass)
              ),
              { startImmediately: true }
            )
          }).pipe(Fence.transaction(token), Effect.exit)
          isRejected(onlyFailure(fenced))
        }).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [])
        assert.strictEqual(yield* checkpointed(sql), 2)
      }))

    it.live("still lets a requested yield, and what leaveAs said, take effect", () =>
      Effect.gen(function*() {
        const { a, proxy, sql } = yield* proxied
        const leave = yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            yield* write(1)
            yield* work.checkpoint({ line: 0 })
            yield* work.leaveAs("retired", { line: 1 })
            yield* proxy.loseReply({ of: "COMMIT" })
          }).pipe(Fence.transaction(work))).pipe(
            Effect.andThen(Worker.run(Import.id("a"), (work) => Effect.succeed(work.prior))),
            Effect.provide(a)
          )
        assert.deepInclude(leave, { exit: "retired", state: Option.some({ line: 1 }) })

        const error = yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            yield* Lease.requestYield(Import.id("a"))
            yield* Effect.gen(function*() {
              yield* write(2)
              yield* Fence.transaction(work.checkpoint({ line: 2 }), work)
              yield* proxy.loseReply({ of: "COMMIT" })
            }).pipe(Fence.transaction(work))
          })).pipe(Effect.provide(a), Effect.flip)
        assert.instanceOf(error, LeaseError.Yielded)
        assert.deepStrictEqual(yield* written(sql), [1, 2])
        assert.strictEqual(yield* checkpointed(sql), 2)
      }))

    it.live("is unknown if nobody can be asked: typed with a token, lost under a lease, both in time", () =>
      Effect.gen(function*() {
        const { a, proxy, sql } = yield* proxied
        // It is refused before anybody takes the silence for a loss.
        const lose = Effect.flatMap(proxy.lostReplies, (before) =>
          Effect.andThen(
            proxy.loseReply({ of: "COMMIT", as: "silence" }),
            Effect.forkDetach(
              eventually("it was lost", Effect.map(proxy.lostReplies, (lost) => lost > before)).pipe(
                Effect.andThen(proxy.refuse)
              ),
              { startImmediately: true }
            )
          ))
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          const start = performance.now()
          const error = yield* Effect.flip(
            write(1).pipe(
              Effect.andThen(Lease.checkpoint(token, { line: 1 })),
              Effect.andThen(lose),
              Fence.transaction(token)
            )
          )
          assert.deepInclude(error, { _tag: "BackendError", workId: "import:a", outcome: "unknown" })
          assert.isBelow(performance.now() - start, 7_000)
          yield* proxy.pass
          const lost = yield* Worker.run(Import.id("b"), (work) =>
            write(2).pipe(
              Effect.andThen(work.checkpoint({ line: 2 })),
              Effect.andThen(lose),
              Fence.transaction(work)
            )).pipe(Effect.flip)
          assert.instanceOf(lost, LeaseError.LeaseLost)
          assert.isBelow(performance.now() - start, 15_000)
        }).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [1, 2])
      }))

    it.live("is unknown, in time, where the only connection is the one that hangs", () =>
      Effect.gen(function*() {
        const { sql, url } = yield* Fenced.postgres()
        const proxy = yield* TcpProxy.make(url)
        const a = yield* Layer.build(
          Sessions.process(proxy.url(url), { ...policy, ttl: "3 seconds", renewEvery: "2 seconds", maxConnections: 1 })
        )
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          const start = performance.now()
          const error = yield* write(1).pipe(
            Effect.andThen(Lease.checkpoint(token, { line: 1 })),
            Effect.andThen(proxy.loseReply({ of: "COMMIT", as: "silence" })),
            Fence.transaction(token),
            Effect.flip
          )
          assert.deepInclude(error, { _tag: "BackendError", workId: "import:a", outcome: "unknown" })
          assert.isBelow(performance.now() - start, 5_000)
        }).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [1])
        yield* proxy.cut
      }))

    it.live("is not taken for applied because another transaction has got its ID after a crash", () =>
      Effect.gen(function*() {
        const server = yield* EmbeddedPostgres.start()
        yield* server.execute("CREATE TABLE written (number integer NOT NULL, line integer NOT NULL)")
        const a = yield* Layer.build(Sessions.process(server.url, { holderId: "a" }))
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          for (const joined of [true, false]) {
            const exit = yield* Effect.gen(function*() {
              const sql = yield* SqlClient.SqlClient
              yield* write(1)
              if (joined) yield* Lease.checkpoint(token, { line: 1 })
              const [{ id }] = yield* sql.unsafe<{ readonly id: bigint }>(
                "SELECT pg_current_xact_id()::text::bigint AS id"
              )
              // What it has done so far is in no log yet.
              yield* server.kill
              yield* server.restart
              while (true) {
                const [other] = yield* server.execute("SELECT pg_current_xact_id()::text::bigint AS id")
                if (other.id === id) break
                assert.isBelow(Number(other.id), Number(id))
              }
            }).pipe(Fence.transaction(token), Effect.exit)
            assert.deepInclude(onlyFailure(exit), {
              _tag: "BackendError",
              outcome: joined ? "rejected" : "unknown"
            })
          }
        }).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* server.execute("SELECT line FROM written"), [])
      }))
  })

  describe("a connection that dies", () => {
    it.live("under a statement of the user's own is the user's own error", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a" })
        const exit = yield* Worker.run(Import.id("a"), (work) =>
          Effect.andThen(terminated(sql), write(1)).pipe(Fence.transaction(work))).pipe(Effect.provide(a), Effect.exit)
        assert.isTrue(SqlError.isSqlError(onlyFailure(exit)))
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("before the COMMIT is a typed error, and nothing was committed", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a" })
        const exit = yield* Worker.run(Import.id("a"), (work) =>
          write(1).pipe(
            Effect.andThen(work.checkpoint({ line: 1 })),
            Effect.andThen(terminated(sql)),
            Fence.transaction(work)
          )).pipe(Effect.provide(a), Effect.exit)
        isRejected(onlyFailure(exit))
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("under a checkpoint is a typed error of it, which was surely not applied", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a" })
        const exit = yield* Worker.run(Import.id("a"), (work) =>
          Effect.andThen(terminated(sql), work.checkpoint({ line: 1 })).pipe(Fence.transaction(work))).pipe(
            Effect.provide(a),
            Effect.exit
          )
        const error = onlyFailure(exit)
        isRejected(error)
        assert.deepInclude(error, { operation: "checkpoint" })
      }))

    it.live("is one that has died, whatever the operating system calls that", () =>
      Effect.gen(function*() {
        for (const code of ["EPIPE", "ECONNRESET", "E2BIG", undefined]) {
          const failure = Effect.fail(
            new SqlError.SqlError({
              reason: new SqlError.ConnectionError({
                cause: Object.assign(new Error("broken"), { code }),
                message: "broken",
                operation: "query"
              })
            })
          )
          const broken = SqlClient.make({
            acquirer: Effect.succeed({
              execute: () => failure,
              executeUnprepared: () => failure,
              executeRaw: () => failure,
              executeValues: () => failure,
              executeValuesUnprepared: () => failure,
              executeStream: () => Stream.fromEffect(failure)
            }),
            compiler: PgliteClient.makeCompiler(),
            driver: "broken",
            spanAttributes: []
          })
          const error = yield* Effect.flatMap(Backend.Backend, (backend) =>
            backend.forget({ workId: "import:a", holderId: "a", fencingToken: 1n })).pipe(
              Effect.provide(Postgres.layerStorage({})),
              Effect.provideServiceEffect(SqlClient.SqlClient, broken),
              Effect.provide(Reactivity.layer),
              Effect.flip
            )
          assert.deepInclude(error, { _tag: "BackendError", outcome: "unknown" }, code)
          assert.strictEqual((error as LeaseError.BackendError).reason._tag, "Unreachable", code)
        }
      }))

    it.live("while the body fails, dies or is interrupted hides none of that, and adds no defect", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a" })
        const run = (end: Effect.Effect<never, string>) =>
          Worker.run(Import.id("a"), (work) => Effect.andThen(terminated(sql), end).pipe(Fence.transaction(work))).pipe(
            Effect.provide(a)
          )
        assert.strictEqual(onlyFailure(yield* Effect.exit(run(Effect.fail("own")))), "own")
        const died = Option.getOrThrow(Exit.getCause(yield* Effect.exit(run(Effect.die("defect")))))
        assert.deepStrictEqual(died.reasons.map((reason) => Cause.isDieReason(reason) && reason.defect), ["defect"])
        const ready = yield* Deferred.make<void>()
        const fiber = yield* Effect.forkChild(run(Effect.andThen(Deferred.succeed(ready, undefined), Effect.never)))
        yield* Deferred.await(ready)
        yield* Fiber.interrupt(fiber)
        const exit = yield* Fiber.await(fiber)
        assert.isTrue(Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause))
        // Of the three, the interruption by the caller counts as no attempt.
        const prior = yield* Worker.run(Import.id("a"), (work) => Effect.succeed(work.prior)).pipe(Effect.provide(a))
        assert.strictEqual(prior.termsWithoutProgress, 2)
      }))

    it.live("while it is interrupted before its body began is an interruption, and no defect", () =>
      Effect.gen(function*() {
        const { a, proxy, sql, url } = yield* proxied
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          yield* Sessions.lockRow(url, "import:a")
          const fiber = yield* Effect.forkChild(Fence.transaction(write(1), token), { startImmediately: true })
          yield* eventually(
            "it waits for the row",
            Effect.map(
              sql.unsafe(
                "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
              ),
              (rows) => rows.length > 0
            )
          )
          // As if it were cut in the moment of the interruption.
          yield* proxy.stall
          fiber.interruptUnsafe()
          yield* proxy.cut
          const exit = yield* Fiber.await(fiber)
          assert.isTrue(Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause))
          yield* proxy.pass
        }).pipe(Effect.scoped, Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("inside a savepoint of the user's own is a typed error", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a" })
        const exit = yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            const client = yield* SqlClient.SqlClient
            yield* client.withTransaction(Effect.andThen(write(1), terminated(sql)))
          }).pipe(Fence.transaction(work))).pipe(Effect.provide(a), Effect.exit)
        isRejected(onlyFailure(exit))
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("inside a fence inside another is a typed error of each", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a" })
        let inner: Exit.Exit<unknown, unknown> | undefined
        const exit = yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            inner = yield* Effect.exit(Fence.transaction(Effect.andThen(write(1), terminated(sql)), work))
          }).pipe(Fence.transaction(work))).pipe(Effect.provide(a), Effect.exit)
        isRejected(onlyFailure(inner!))
        isRejected(onlyFailure(exit))
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("together with its server is a typed error, before, inside and at the end", () =>
      Effect.gen(function*() {
        const server = yield* EmbeddedPostgres.start()
        yield* server.execute("CREATE TABLE written (number integer NOT NULL, line integer NOT NULL)")
        const a = yield* Layer.build(Sessions.process(server.url, { holderId: "a", operationTimeout: "500 millis" }))
        const sql = Context.get(a, SqlClient.SqlClient)
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          const checkpoint = Lease.checkpoint(token, { line: 1 })
          const inside = yield* Effect.exit(
            Fence.transaction(Effect.andThen(write(1), Effect.andThen(server.kill, checkpoint)), token)
          )
          isRejected(onlyFailure(inside))
          isRejected(onlyFailure(yield* Effect.exit(Fence.transaction(write(2), token))))
          yield* server.restart
          const end = yield* Effect.exit(
            Fence.transaction(
              Effect.andThen(write(3), Effect.andThen(checkpoint, Effect.andThen(server.kill, server.restart))),
              token
            )
          )
          isRejected(onlyFailure(end))
          yield* Fence.transaction(Effect.andThen(write(4), checkpoint), token)
        }).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [4])
      }))

    it.live("is one thing, an error of which the user's code has made a defect another: that stays one", () =>
      Effect.gen(function*() {
        const { process } = yield* Fenced.postgres()
        const a = yield* process({ holderId: "a" })
        const exit = yield* Worker.run(
          Import.id("a"),
          (work) =>
            Effect.orDie(Effect.flatMap(SqlClient.SqlClient, (sql) => sql`SELECT 1 / 0`)).pipe(Fence.transaction(work))
        )
          .pipe(Effect.provide(a), Effect.exit)
        const { reasons } = Option.getOrThrow(Exit.getCause(exit))
        assert.deepStrictEqual(reasons.map((reason) => reason._tag), ["Die"])
      }))

    it.live("cannot be had: the body does not begin", () =>
      Effect.gen(function*() {
        const { a, proxy } = yield* proxied
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          yield* proxy.refuse
          let began = false
          const exit = yield* Effect.exit(Fence.transaction(Effect.sync(() => began = true), token))
          const error = onlyFailure(exit)
          isRejected(error)
          assert.strictEqual((error as LeaseError.BackendError).reason._tag, "Unreachable")
          assert.isFalse(began)
        }).pipe(Effect.provide(a))
      }))
  })

  describe("a connection that hangs", () => {
    it.live("under the rollback is left behind: the body's error comes in time", () =>
      Effect.gen(function*() {
        const { a, proxy, sql } = yield* proxied
        yield* Effect.gen(function*() {
          const { token } = yield* Lease.acquire(Import.id("a"))
          const start = performance.now()
          const exit = yield* Effect.exit(
            Fence.transaction(Effect.andThen(write(1), Effect.andThen(proxy.stall, Effect.fail("own"))), token)
          )
          assert.strictEqual(onlyFailure(exit), "own")
          assert.isBelow(performance.now() - start, 1_500)
          yield* proxy.cut
          yield* proxy.pass
          yield* Fence.transaction(write(2), token)
        }).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [2])
      }))

    it.live("under the COMMIT does not keep the work from being lost in time", () =>
      Effect.gen(function*() {
        const { a, proxy, process, sql } = yield* proxied
        const b = yield* process({ ...policy, holderId: "b", pollInterval: "50 millis" })
        const start = performance.now()
        const error = yield* Worker.run(Import.id("a"), (work) =>
          Effect.andThen(write(1), Effect.andThen(work.checkpoint({ line: 1 }), proxy.stall)).pipe(
            Fence.transaction(work)
          )).pipe(Effect.provide(a), Effect.flip)
        assert.instanceOf(error, LeaseError.LeaseLost)
        assert.isBelow(performance.now() - start, 8_000)
        // The server has ended the transaction by itself.
        yield* Effect.provide(Lease.acquire(Import.id("a"), { wait: true }), b)
        assert.isBelow(performance.now() - start, 2 * 5_000 + 2_000)
        assert.deepStrictEqual(yield* written(sql), [])
        yield* proxy.cut
      }))
  })
})
