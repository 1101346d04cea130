import { assert, describe, it } from "@effect/vitest"
import { Effect } from "effect"
import { SqlClient } from "effect/sql"
import { Fence, Lease, LeaseError, Worker } from "worklease"
import * as Fenced from "./support/Fenced.ts"
import { checkpointed, Import, write, written } from "./support/Fenced.ts"
import { pause } from "./support/Sessions.ts"

const oneSecond = {
  ttl: "1 second",
  renewEvery: "300 millis",
  safetyMargin: "100 millis",
  operationTimeout: "200 millis",
  maxConnections: 1
} as const

for (const [name, world] of [["a pool of one", Fenced.postgres()], ["PGlite", Fenced.pglite]] as const) {
  describe(`Fence on ${name}`, () => {
    it.live("renewals wait for the transaction, and nothing is lost when it ends within the window", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* world
        const a = yield* process({ ...oneSecond, holderId: "a" })
        yield* Worker.run(Import.id("a"), (work) =>
          Effect.gen(function*() {
            for (let line = 1; line <= 3; line++) {
              yield* Effect.gen(function*() {
                yield* write(line)
                yield* pause(500)
                yield* work.checkpoint({ line })
              }).pipe(Fence.transaction(work))
            }
            yield* pause(1_200)
            yield* Effect.andThen(write(4), pause(500)).pipe(Fence.transaction(work))
            yield* pause(1_200)
          })).pipe(Effect.provide(a))
        assert.deepStrictEqual(yield* written(sql), [1, 2, 3, 4])
        assert.strictEqual(yield* checkpointed(sql), 3)
      }))

    it.live("one that does not is lost, and rolled back", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* world
        const a = yield* process({ ...oneSecond, holderId: "a" })
        const start = performance.now()
        const error = yield* Worker.run(Import.id("a"), (work) =>
          Effect.andThen(write(1), pause(60_000)).pipe(Fence.transaction(work))).pipe(Effect.provide(a), Effect.flip)
        assert.instanceOf(error, LeaseError.LeaseLost)
        assert.isBelow(performance.now() - start, 3_000)
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("one that goes on for longer because it cannot be interrupted is lost, and rolled back", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* world
        const a = yield* process({ ...oneSecond, holderId: "a" })
        const error = yield* Worker.run(Import.id("a"), (work) =>
          write(1).pipe(
            Effect.andThen(Effect.uninterruptible(pause(1_300))),
            Effect.andThen(write(2)),
            Fence.transaction(work)
          )).pipe(Effect.provide(a), Effect.flip)
        assert.instanceOf(error, LeaseError.LeaseLost)
        assert.deepStrictEqual(yield* written(sql), [])
      }))

    it.live("what never joins a transaction is refused inside one, at once and typed", () =>
      Effect.gen(function*() {
        const { process, sql } = yield* world
        const a = yield* process({ holderId: "a", maxConnections: 1 })
        yield* Effect.gen(function*() {
          const client = yield* SqlClient.SqlClient
          const { token } = yield* Lease.acquire(Import.id("a"))
          const operations: Record<string, Effect.Effect<unknown, unknown, Lease.Leases>> = {
            acquire: Lease.acquire("b"),
            "waiting acquire": Lease.acquire("b", { wait: true }),
            hold: Effect.scoped(Lease.hold("b")),
            withLease: Lease.withLease(Effect.void, "b"),
            run: Worker.run("b", () => Effect.void),
            renew: Lease.renew(token),
            readCheckpoint: Lease.readCheckpoint(token),
            release: Lease.release(token, "finished"),
            forget: Lease.forget(token),
            requestYield: Lease.requestYield("a"),
            lift: Lease.lift("a")
          }
          for (const kind of ["fenced", "own"] as const) {
            const transaction = <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, unknown, R | Fence.Fence> =>
              kind === "fenced" ? Fence.transaction(self, token) : client.withTransaction(self)
            for (const [name, operation] of Object.entries(operations)) {
              const start = performance.now()
              const result = yield* Effect.andThen(write(1), Effect.flip(operation)).pipe(transaction)
              // Not by its time running out, which is 5 seconds.
              assert.isBelow(performance.now() - start, 3000, `${kind}: ${name}`)
              assert.deepInclude(result, { _tag: "BackendError", outcome: "rejected" }, `${kind}: ${name}`)
              assert.include((result as LeaseError.BackendError).message, "outside of the transaction")
            }
          }
          // The transactions were none the worse for it, and outside all is well.
          assert.lengthOf(yield* written(sql), 22)
          yield* Lease.renew(token)
          yield* Lease.release(token, "finished")
        }).pipe(Effect.provide(a))
      }))
  })
}
