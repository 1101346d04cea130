import { assert, describe, it } from "@effect/vitest"
import { Cause, Deferred, Duration, Effect, Exit, Fiber, Option } from "effect"
import { SqlClient } from "effect/sql"
import { Fence, Lease, LeaseError, Renewal, Worker } from "worklease"
import * as Fenced from "./support/Fenced.ts"
import { checkpointed, Import, windowOf, windowSince, write, written } from "./support/Fenced.ts"
import { pause } from "./support/Sessions.ts"

const windowMillis = (policy?: Renewal.Options) => {
  const { safetyMargin, ttl } = Renewal.makeUnsafe(policy)
  return Duration.toMillis(ttl) - Duration.toMillis(safetyMargin)
}

/** As if somebody had ended the term behind its holder's back. */
const endTerm = (sql: SqlClient.SqlClient, workId = "import:a") =>
  sql.unsafe("UPDATE worklease SET exit = 'abandoned' WHERE work_id = $1", [workId])

class Failed extends Error {
  readonly _tag = "Failed"
}

for (const [name, world] of [["PostgreSQL", Fenced.postgres()], ["PGlite", Fenced.pglite]] as const) {
  describe(`Fence on ${name}`, () => {
    describe("commits the user's writes and the checkpoint together", () => {
      it.live("when the body succeeds", () =>
        Effect.gen(function*() {
          const { process, sql } = yield* world
          const a = yield* process({ holderId: "a" })
          const value = yield* Effect.provide(
            Worker.run(Import.id("a"), (work) =>
              write(1).pipe(Effect.andThen(work.checkpoint({ line: 1 })), Effect.as("done"), Fence.transaction(work))),
            a
          )
          assert.strictEqual(value, "done")
          assert.deepStrictEqual(yield* written(sql), [1])
          const prior = yield* Effect.provide(
            Worker.run(Import.id("a"), (work) =>
              Effect.succeed(work.prior)),
            a
          )
          assert.deepStrictEqual(prior.state, Option.some({ line: 1 }))
        }))

      for (
        const [how, end, check] of [
          ["fails", () => Effect.fail(new Failed("own")), (exit) => {
            assert.deepStrictEqual(
              Exit.getCause(exit).pipe(Option.map((cause) => cause.reasons.length)),
              Option.some(1)
            )
            assert.instanceOf(Option.getOrThrow(Exit.findErrorOption(exit)), Failed)
          }],
          ["dies", () => Effect.die(new Failed("defect")), (exit) => {
            const { reasons } = Option.getOrThrow(Exit.getCause(exit))
            assert.lengthOf(reasons, 1)
            assert.isTrue(Cause.isDieReason(reasons[0]) && reasons[0].defect instanceof Failed)
          }],
          ["is interrupted", (fiber) => {
            fiber.interruptUnsafe()
            return Effect.never
          }, (exit) => assert.isTrue(Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause))]
        ] as ReadonlyArray<
          [
            string,
            (fiber: Fiber.Fiber<unknown, unknown>) => Effect.Effect<never, Failed>,
            (exit: Exit.Exit<unknown, unknown>) => void
          ]
        >
      ) {
        it.live(`and neither when it ${how}`, () =>
          Effect.gen(function*() {
            const { process, sql } = yield* world
            const a = yield* process({ holderId: "a" })
            const ready = yield* Deferred.make<Fiber.Fiber<unknown, unknown>>()
            const fiber = yield* Worker.run(Import.id("a"), (work) =>
              write(1).pipe(
                Effect.andThen(work.checkpoint({ line: 1 })),
                Effect.andThen(Effect.flatMap(Deferred.await(ready), end)),
                Fence.transaction(work)
              )).pipe(Effect.provide(a), Effect.forkChild({ startImmediately: true }))
            yield* Deferred.succeed(ready, fiber)
            check(yield* Fiber.await(fiber))
            assert.deepStrictEqual(yield* written(sql), [])
            assert.isUndefined(yield* checkpointed(sql))
            // And the connection is free again.
            yield* Effect.provide(Effect.provide(write(2), a), a)
            assert.deepStrictEqual(yield* written(sql), [2])
          }))
      }

      it.live("with a bare token", () =>
        Effect.gen(function*() {
          const { process, sql } = yield* world
          const a = yield* process({ holderId: "a" })
          yield* Effect.gen(function*() {
            const { token } = yield* Lease.acquire(Import.id("a"))
            yield* Fence.transaction(Effect.andThen(write(1), Lease.checkpoint(token, { line: 1 })), token)
            const failed = yield* Effect.flip(
              Fence.transaction(
                Effect.andThen(
                  write(2),
                  Effect.andThen(Lease.checkpoint(token, { line: 2 }), Effect.fail("own" as const))
                ),
                token
              )
            )
            assert.strictEqual(failed, "own")
            assert.deepStrictEqual(yield* Lease.readCheckpoint(token), Option.some({ line: 1 }))
          }).pipe(Effect.provide(a))
          assert.deepStrictEqual(yield* written(sql), [1])
        }))
    })

    // Each: the transaction it joins, and how.
    for (
      const [kind, transaction] of [
        ["Fence.transaction", (lease: Lease.Any) => Fence.transaction(lease)],
        [
          "the client's own transaction",
          () => <A, E, R>(self: Effect.Effect<A, E, R>) =>
            Effect.flatMap(SqlClient.SqlClient, (sql) => sql.withTransaction(self))
        ]
      ] as ReadonlyArray<
        [
          string,
          (
            lease: Lease.Any
          ) => <A, E, R>(
            self: Effect.Effect<A, E, R>
          ) => Effect.Effect<A, E | unknown, R | Fence.Fence | SqlClient.SqlClient>
        ]
      >
    ) {
      describe(`a checkpoint that joins ${kind}`, () => {
        it.live("moves the window only after the commit, counted from when the statement was sent", () =>
          Effect.gen(function*() {
            const { process } = yield* world
            const a = yield* process({ holderId: "a" })
            yield* Worker.run(Import.id("a"), (work) =>
              Effect.gen(function*() {
                yield* pause(300)
                const sentAt = performance.now()
                yield* Effect.gen(function*() {
                  yield* work.checkpoint({ line: 1 })
                  yield* pause(200)
                  assert.isAtMost(yield* windowOf(work), windowMillis() - 500)
                }).pipe(transaction(work))
                const left = yield* windowOf(work)
                assert.isAtMost(left, windowMillis() - 200)
                assert.isAbove(left, windowSince(windowMillis(), sentAt))
              })).pipe(Effect.provide(a))
          }))

        it.live("does not move it when it is rolled back", () =>
          Effect.gen(function*() {
            const { process, sql } = yield* world
            const a = yield* process({ holderId: "a" })
            yield* Worker.run(Import.id("a"), (work) =>
              Effect.gen(function*() {
                yield* pause(300)
                yield* work.checkpoint({ line: 1 }).pipe(
                  Effect.andThen(Effect.fail("own")),
                  transaction(work),
                  Effect.ignore
                )
                assert.isAtMost(yield* windowOf(work), windowMillis() - 300)
              })).pipe(Effect.provide(a))
            assert.isUndefined(yield* checkpointed(sql))
          }))

        it.live("lets a requested yield take effect only after the commit", () =>
          Effect.gen(function*() {
            const { process, sql } = yield* world
            const a = yield* process({ holderId: "a" })
            const b = yield* process({ holderId: "b" })
            const steps: Array<string> = []
            const error = yield* Worker.run(Import.id("a"), (work) =>
              Effect.gen(function*() {
                assert.isTrue(yield* Effect.provide(Lease.requestYield(Import.id("a")), b))
                yield* Effect.gen(function*() {
                  yield* write(1)
                  yield* work.checkpoint({ line: 1 })
                  assert.isFalse(yield* work.yieldRequested)
                  yield* write(2)
                  steps.push("inside")
                }).pipe(transaction(work), Effect.onInterrupt(() => Effect.sync(() => steps.push("interrupted"))))
                steps.push("after")
              })).pipe(Effect.provide(a), Effect.flip)
            assert.instanceOf(error, LeaseError.Yielded)
            assert.deepStrictEqual(steps, ["inside", "interrupted"])
            assert.deepStrictEqual(yield* written(sql), [1, 2])
            const prior = yield* Effect.provide(Worker.run(Import.id("a"), (work) => Effect.succeed(work.prior)), b)
            assert.deepInclude(prior, { exit: "yielded", state: Option.some({ line: 1 }) })
          }))

        it.live("ends the work there also without a guard, and although it looks at the exit", () =>
          Effect.gen(function*() {
            const { process, sql } = yield* world
            const a = yield* process({ holderId: "a" })
            let returned = false
            const fiber = yield* Effect.gen(function*() {
              const lease = yield* Lease.hold(Import.id("a"))
              yield* Lease.requestYield(Import.id("a"))
              yield* Effect.andThen(write(1), lease.checkpoint({ line: 1 })).pipe(transaction(lease), Effect.exit)
              // In the client's own, the commit is not ours: it ends at the next operation.
              if (kind !== "Fence.transaction") yield* Effect.exit(lease.checkpoint({ line: 2 }))
              returned = true
            }).pipe(Effect.scoped, Effect.provide(a), Effect.forkChild)
            const exit = yield* Fiber.await(fiber)
            assert.isTrue(Exit.isFailure(exit) && Cause.hasInterruptsOnly(exit.cause))
            assert.isFalse(returned)
            assert.deepStrictEqual(yield* written(sql), [1])
            assert.strictEqual(yield* checkpointed(sql), 1)
          }))

        it.live("lets no yield take effect when it is rolled back", () =>
          Effect.gen(function*() {
            const { process, sql } = yield* world
            const a = yield* process({ holderId: "a" })
            const b = yield* process({ holderId: "b" })
            yield* Worker.run(Import.id("a"), (work) =>
              Effect.gen(function*() {
                yield* Effect.provide(Lease.requestYield(Import.id("a")), b)
                const result = yield* write(1).pipe(
                  Effect.andThen(work.checkpoint({ line: 1 })),
                  Effect.andThen(Effect.fail("own")),
                  transaction(work),
                  Effect.flip
                )
                assert.strictEqual(result, "own")
                assert.isFalse(yield* work.yieldRequested)
              })).pipe(Effect.provide(a))
            assert.deepStrictEqual(yield* written(sql), [])
          }))

        it.live("leaves a yield to handOff where the work asked for that", () =>
          Effect.gen(function*() {
            const { process } = yield* world
            const a = yield* process({ holderId: "a" })
            const error = yield* Worker.run(Import.id("a"), (work) =>
              Effect.gen(function*() {
                yield* Lease.requestYield(Import.id("a"))
                yield* work.checkpoint({ line: 1 }).pipe(transaction(work))
                assert.isTrue(yield* work.yieldRequested)
                return yield* work.handOff()
              }), { yieldAt: "handOff" }).pipe(Effect.provide(a), Effect.flip)
            assert.instanceOf(error, LeaseError.Yielded)
          }))

        it.live("shares its savepoints: one that is rolled back takes it along", () =>
          Effect.gen(function*() {
            const { process, sql } = yield* world
            const a = yield* process({ holderId: "a" })
            yield* Worker.run(Import.id("a"), (work) =>
              Effect.gen(function*() {
                const client = yield* SqlClient.SqlClient
                yield* pause(300)
                yield* Effect.gen(function*() {
                  yield* write(1)
                  const error = yield* client.withTransaction(
                    Effect.andThen(Effect.andThen(write(2), work.checkpoint({ line: 2 })), Effect.fail("own"))
                  ).pipe(Effect.flip)
                  assert.strictEqual(error, "own")
                }).pipe(transaction(work))
                assert.isAtMost(yield* windowOf(work), windowMillis() - 300)
                assert.deepStrictEqual(yield* written(sql), [1])
                assert.isUndefined(yield* checkpointed(sql))

                const sentAt = performance.now()
                yield* client.withTransaction(Effect.andThen(write(3), work.checkpoint({ line: 3 }))).pipe(
                  Effect.tap(() => Effect.map(windowOf(work), (left) => assert.isAtMost(left, windowMillis() - 300))),
                  transaction(work)
                )
                assert.isAbove(yield* windowOf(work), windowSince(windowMillis(), sentAt))
                assert.deepStrictEqual(yield* written(sql), [1, 3])
                assert.strictEqual(yield* checkpointed(sql), 3)
              })).pipe(Effect.provide(a))
          }))

        it.live("counts before whatever the user does after the commit, and does that outside of the transaction", () =>
          Effect.gen(function*() {
            const { process, sql } = yield* world
            const a = yield* process({ holderId: "a" })
            const seen: Array<unknown> = []
            yield* Worker.run(Import.id("a"), (work) =>
              Effect.gen(function*() {
                const client = yield* SqlClient.SqlClient
                yield* pause(300)
                const sentAt = performance.now()
                yield* Effect.gen(function*() {
                  yield* write(1)
                  yield* work.checkpoint({ line: 1 })
                  yield* client.afterCommit(Effect.gen(function*() {
                    seen.push(
                      yield* Effect.orDie(written(sql)),
                      (yield* windowOf(work)) > windowSince(windowMillis(), sentAt)
                    )
                  }))
                  assert.deepStrictEqual(seen, [])
                }).pipe(transaction(work))
              })).pipe(Effect.provide(a))
            assert.deepStrictEqual(seen, [[1], true])
          }))

        it.live("stores what leaveAs said only if it commits", () =>
          Effect.gen(function*() {
            const { process } = yield* world
            const a = yield* process({ holderId: "a" })
            const leave = (fails: boolean) =>
              Worker.run(Import.id(String(fails)), (work) =>
                work.leaveAs("retired", { line: 1 }).pipe(
                  Effect.andThen(fails ? Effect.fail("own") : Effect.void),
                  transaction(work),
                  Effect.ignore
                )).pipe(
                  Effect.andThen(Worker.run(Import.id(String(fails)), (work) => Effect.succeed(work.prior))),
                  Effect.provide(a)
                )
            assert.deepInclude(yield* leave(true), { exit: "finished", state: Option.none() })
            assert.deepInclude(yield* leave(false), { exit: "retired", state: Option.some({ line: 1 }) })
          }))

        it.live("refuses handOff, which would roll it back", () =>
          Effect.gen(function*() {
            const { process, sql } = yield* world
            const a = yield* process({ holderId: "a" })
            const exit = yield* Worker.run(Import.id("a"), (work) =>
              Effect.andThen(write(1), work.handOff({ line: 1 })).pipe(transaction(work))).pipe(
                Effect.provide(a),
                Effect.exit
              )
            assert.include(Cause.pretty(Option.getOrThrow(Exit.getCause(exit))), "hand off after it")
            assert.deepStrictEqual(yield* written(sql), [])
          }))
      })
    }

    describe("a refused checkpoint", () => {
      // How each is caught, so that the transaction around it goes on.
      const nested =
        (depth: number) =>
        <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, unknown, R | SqlClient.SqlClient> =>
          depth === 0
            ? self
            : Effect.flatMap(SqlClient.SqlClient, (sql) => nested(depth - 1)(sql.withTransaction(self)))

      for (const depth of [0, 1, 2]) {
        const where = depth === 0 ? "" : `, ${depth} savepoints deep`

        it.live(`dooms a fenced transaction, and is typed, although it was caught${where}`, () =>
          Effect.gen(function*() {
            const { process, sql } = yield* world
            const a = yield* process({ holderId: "a" })
            yield* Effect.gen(function*() {
              const { token } = yield* Lease.acquire(Import.id("a"))
              let later: Exit.Exit<unknown, unknown> | undefined
              const error = yield* Effect.gen(function*() {
                yield* write(1)
                const client = yield* SqlClient.SqlClient
                yield* client`UPDATE worklease SET exit = 'abandoned'`
                yield* Lease.checkpoint(token, { line: 1 }).pipe(nested(depth), Effect.exit)
                later = yield* Effect.exit(write(2))
                return "went on"
              }).pipe(Fence.transaction(token), Effect.flip)
              assert.instanceOf(error, LeaseError.LeaseExpired)
              assert.isTrue(Exit.isFailure(later!))
            }).pipe(Effect.provide(a))
            assert.deepStrictEqual(yield* written(sql), [])
            yield* Effect.provide(write(3), a)
            assert.deepStrictEqual(yield* written(sql), [3])
          }))

        it.live(`dooms a transaction of the client's own, although it was caught${where}`, () =>
          Effect.gen(function*() {
            const { process, sql } = yield* world
            const a = yield* process({ holderId: "a" })
            yield* Effect.gen(function*() {
              const client = yield* SqlClient.SqlClient
              const { token } = yield* Lease.acquire(Import.id("a"))
              yield* endTerm(sql)
              let refused: Exit.Exit<unknown, unknown> | undefined
              let later: Exit.Exit<unknown, unknown> | undefined
              const exit = yield* Effect.gen(function*() {
                yield* write(1)
                refused = yield* Lease.checkpoint(token, { line: 1 }).pipe(nested(depth), Effect.exit)
                later = yield* Effect.exit(write(2))
              }).pipe(client.withTransaction, Effect.exit)
              assert.isTrue(Exit.isFailure(exit))
              assert.isTrue(Exit.isFailure(later!))
              assert.include(Cause.pretty(Option.getOrThrow(Exit.getCause(refused!))), "LeaseExpired")
            }).pipe(Effect.provide(a))
            assert.deepStrictEqual(yield* written(sql), [])
            yield* Effect.provide(write(3), a)
            assert.deepStrictEqual(yield* written(sql), [3])
          }))
      }

      it.live("cannot be undone with a savepoint of the user's own", () =>
        Effect.gen(function*() {
          const { process, sql } = yield* world
          const a = yield* process({ holderId: "a" })
          yield* Effect.gen(function*() {
            const client = yield* SqlClient.SqlClient
            const { token } = yield* Lease.acquire(Import.id("a"))
            yield* endTerm(sql)
            const exit = yield* Effect.gen(function*() {
              yield* write(1)
              yield* client`SAVEPOINT mine`
              yield* Effect.ignore(Lease.checkpoint(token, { line: 1 }))
              yield* Effect.ignore(client`ROLLBACK TO SAVEPOINT mine`)
            }).pipe(client.withTransaction, Effect.exit)
            assert.isTrue(Exit.isFailure(exit))
          }).pipe(Effect.provide(a))
          assert.deepStrictEqual(yield* written(sql), [])
        }))

      it.live("does not return under a held lease, so that nothing can be caught", () =>
        Effect.gen(function*() {
          const { process, sql } = yield* world
          const a = yield* process({ holderId: "a" })
          for (const depth of [0, 1]) {
            let returned = false
            const error = yield* Worker.run(Import.id(String(depth)), (work) =>
              Effect.gen(function*() {
                const client = yield* SqlClient.SqlClient
                yield* write(1)
                yield* client`UPDATE worklease SET exit = 'abandoned'`
                yield* Effect.exit(nested(depth)(work.checkpoint({ line: 1 })))
                returned = true
              }).pipe(Fence.transaction(work), Effect.exit, Effect.andThen(Effect.sync(() => returned = true)))).pipe(
                Effect.provide(a),
                Effect.flip
              )
            assert.instanceOf(error, LeaseError.LeaseLost)
            assert.strictEqual((error as LeaseError.LeaseLost).reason._tag, "LeaseExpired")
            assert.isFalse(returned)
            assert.deepStrictEqual(yield* written(sql), [])
          }
        }))
    })

    describe("a term that is not current", () => {
      it.live("does not begin the body: typed with a token, a loss under a held lease", () =>
        Effect.gen(function*() {
          const { process, sql } = yield* world
          const a = yield* process({ holderId: "a" })
          const b = yield* process({ holderId: "b" })
          yield* Effect.gen(function*() {
            const { token } = yield* Lease.acquire(Import.id("a"))
            yield* Lease.release(token, "abandoned")
            assert.instanceOf(yield* Effect.flip(Fence.transaction(write(1), token)), LeaseError.LeaseExpired)
            yield* Effect.provide(Lease.acquire(Import.id("a")), b)
            assert.instanceOf(yield* Effect.flip(Fence.transaction(write(1), token)), LeaseError.Fenced)

            const lost = yield* Worker.run(Import.id("b"), (work) =>
              Effect.andThen(endTerm(sql, "import:b"), Effect.exit(Fence.transaction(write(1), work)))).pipe(
                Effect.flip
              )
            assert.instanceOf(lost, LeaseError.LeaseLost)
            assert.strictEqual((lost as LeaseError.LeaseLost).reason._tag, "LeaseExpired")
          }).pipe(Effect.provide(a))
          assert.deepStrictEqual(yield* written(sql), [])
        }))

      it.live("a token whose window is over is still good while the backend says so", () =>
        Effect.gen(function*() {
          const { process, sql } = yield* world
          const a = yield* process({
            holderId: "a",
            ttl: "10 seconds",
            safetyMargin: "9 seconds",
            renewEvery: "300 millis",
            operationTimeout: "500 millis"
          })
          yield* Effect.gen(function*() {
            const { token } = yield* Lease.acquire(Import.id("a"))
            yield* pause(1100)
            yield* Fence.transaction(Effect.andThen(write(1), Lease.checkpoint(token, { line: 1 })), token)
          }).pipe(Effect.provide(a))
          assert.deepStrictEqual(yield* written(sql), [1])
        }))
    })

    describe("inside another", () => {
      it.live("of the same lease is a savepoint of it", () =>
        Effect.gen(function*() {
          const { process, sql } = yield* world
          const a = yield* process({ holderId: "a" })
          yield* Worker.run(Import.id("a"), (work) =>
            Effect.gen(function*() {
              yield* write(1)
              yield* work.checkpoint({ line: 1 })
              const failed = yield* write(2).pipe(
                Effect.andThen(work.checkpoint({ line: 2 })),
                Effect.andThen(Effect.fail("own")),
                Fence.transaction(work),
                Effect.flip
              )
              assert.strictEqual(failed, "own")
              yield* write(3).pipe(Effect.andThen(work.checkpoint({ line: 3 })), Fence.transaction(work))
            }).pipe(Fence.transaction(work))).pipe(Effect.provide(a))
          assert.deepStrictEqual(yield* written(sql), [1, 3])
          assert.strictEqual(yield* checkpointed(sql), 3)
        }))

      it.live("of another lease commits both, or neither", () =>
        Effect.gen(function*() {
          const { process, sql } = yield* world
          const a = yield* process({ holderId: "a" })
          const both = (end: Effect.Effect<void, string>) =>
            Worker.run(Import.id("a"), (one) =>
              Worker.run(Import.id("b"), (other) =>
                write(1).pipe(
                  Effect.andThen(one.checkpoint({ line: 1 })),
                  Effect.andThen(other.checkpoint({ line: 1 })),
                  Fence.transaction(other),
                  Effect.andThen(end),
                  Fence.transaction(one)
                ))).pipe(Effect.provide(a))
          assert.strictEqual(yield* Effect.flip(both(Effect.fail("own"))), "own")
          assert.deepStrictEqual(yield* written(sql), [])
          assert.deepStrictEqual([yield* checkpointed(sql, "a"), yield* checkpointed(sql, "b")], [undefined, undefined])
          yield* both(Effect.void)
          assert.deepStrictEqual(yield* written(sql), [1])
          assert.deepStrictEqual([yield* checkpointed(sql, "a"), yield* checkpointed(sql, "b")], [1, 1])
        }))

      it.live("of another lease: whichever is refused dooms both, and is typed where it belongs", () =>
        Effect.gen(function*() {
          const { process, sql } = yield* world
          const a = yield* process({ holderId: "a" })
          yield* Effect.gen(function*() {
            const { token: one } = yield* Lease.acquire(Import.id("a"))
            const { token: other } = yield* Lease.acquire(Import.id("b"))
            const client = yield* SqlClient.SqlClient
            const error = yield* write(1).pipe(
              Effect.andThen(client`UPDATE worklease SET exit = 'abandoned' WHERE work_id = 'import:a'`),
              Effect.andThen(Effect.ignore(Lease.checkpoint(one, { line: 1 }))),
              Fence.transaction(other),
              Effect.ignore,
              Fence.transaction(one),
              Effect.flip
            )
            assert.instanceOf(error, LeaseError.LeaseExpired)
            assert.strictEqual((error as LeaseError.LeaseExpired).workId, "import:a")
          }).pipe(Effect.provide(a))
          assert.deepStrictEqual(yield* written(sql), [])
        }))
    })
  })
}
