/**
 * A rolling deploy: three processes are replaced one after the other while
 * they work. Each new one has the identity of the one that it replaces, as the
 * pods of a StatefulSet do, and goes on with what that one had. Nothing else
 * moves, and no attempt is burnt.
 *
 * Runs on the memory backend.
 *
 *     node examples/rolling-deploy.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Equal, Exit, Layer, Option, References, Schema, Scope, Stream } from "effect"
import assert from "node:assert/strict"
import { Checkpoint, Lease, Pool, Work } from "worklease"
import * as Memory from "worklease/layers/Memory"

const Account = Work.make("account", Checkpoint.make(Schema.Struct({ synced: Schema.Int })))

const accounts = Array.from({ length: 9 }, (_, index) => `customer-${index}`)

/** What began where, and what it was told of the term before. */
const begun: Array<{
  readonly account: string
  readonly pod: string
  readonly version: number
  readonly prior: Lease.Prior<{ readonly synced: number }>
}> = []

const startPod = Effect.fnUntraced(function*(pod: string, version: number) {
  const scope = yield* Scope.fork(yield* Effect.scope)
  const leases = yield* Layer.buildWithScope(
    Lease.layerWith({ ttl: "5 seconds", pollInterval: "50 millis" }),
    scope
  )
  const pool = yield* Pool.make({
    work: Account,
    keys: accounts,
    memberId: pod,
    interval: "100 millis",
    run: Effect.fnUntraced(function*(work, account) {
      begun.push({ account, pod, version, prior: work.prior })
      let synced = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.synced })
      while (true) {
        yield* Effect.sleep("20 millis")
        yield* work.checkpoint({ synced: ++synced })
      }
    })
  }).pipe(Effect.provideContext(leases), Scope.provide(scope))
  // What SIGTERM does, where the pool is part of a layer: it closes the scope.
  return { pool, stop: Scope.close(scope, Exit.void) }
})

/** Waits until all accounts are at work, and each pod has three of them. */
const awaitBalance = (pool: Pool.Pool) =>
  pool.status.pipe(
    Stream.filter((all) =>
      all.length > 0 &&
      all.every((one) =>
        one.state === "running" && all.filter((_) => Equal.equals(_.holderId, one.holderId)).length === 3
      )
    ),
    Stream.runHead,
    Effect.timeout("20 seconds")
  )

/** Who has which accounts, as of what began last. */
const placement = () => Object.fromEntries(begun.map(({ account, pod }) => [account, pod]))

const program = Effect.gen(function*() {
  const names = ["pod-0", "pod-1", "pod-2"]
  const pods = yield* Effect.forEach(names, (name) => startPod(name, 1), { concurrency: "unbounded" })
  for (const { pool } of pods) yield* awaitBalance(pool)
  const before = placement()
  const shares = names.map((name) => `${name}: ${accounts.filter((account) => before[account] === name).length}`)
  yield* Console.log(`Version 1 runs:  ${shares.join("  ")}`)
  const beforeDeploy = begun.length

  for (const [index, name] of names.entries()) {
    yield* pods[index].stop
    const { pool } = yield* startPod(name, 2)
    yield* awaitBalance(pool)
    const taken = begun.filter((_) => _.pod === name && _.version === 2)
    yield* Console.log(`${name} was replaced, and goes on with ${taken.map(({ account }) => account).join(", ")}`)
  }

  const deployed = begun.slice(beforeDeploy)
  assert.deepEqual(placement(), before)
  assert.equal(deployed.length, accounts.length)
  for (const { prior, version } of deployed) {
    assert.equal(version, 2)
    assert.equal(prior.exit, "yielded")
    assert.equal(prior.termsWithoutProgress, 0)
    assert(Option.getOrThrow(prior.state).synced > 0)
  }
  yield* Console.log(`Version 2 runs. Each of ${deployed.length} accounts was handed over once, and is where it was.`)
})

NodeRuntime.runMain(program.pipe(
  Effect.scoped,
  Effect.provide(Memory.layer),
  // A pool logs that it shuts down.
  Effect.provideService(References.MinimumLogLevel, "Warn")
))
