/**
 * Leases on Redis, a fenced write of the user's own, and how a deployment
 * moves to another backend: from Redis to PostgreSQL.
 *
 * Starts a Redis (or uses the one that REDIS_URL names) and a PostgreSQL.
 *
 *     node examples/redis.ts
 */
import { NodeRedis, NodeRuntime } from "@effect/platform-node"
import { PgClient } from "@effect/sql-pg"
import { Array as Arr, Console, Context, Duration, Effect, Layer, Option, Redacted, Schema } from "effect"
import { Redis as Client } from "effect/persistence"
import assert from "node:assert/strict"
import { randomUUID } from "node:crypto"
import { Backend, Checkpoint, Lease, Work, Worker } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import * as Redis from "worklease/layers/Redis"
import * as EmbeddedPostgres from "../support/EmbeddedPostgres.ts"
import * as RedisServer from "../support/RedisServer.ts"

// ---- a worker

const Ledger = Work.make("ledger", Checkpoint.make(Schema.Struct({ next: Schema.Int })))

const entries = ["first", "second", "third", "fourth"]

/** Appends an entry only at its own place, so that a step that is repeated changes nothing. */
const append = "if redis.call('LLEN', KEYS[1]) == tonumber(ARGV[1]) then redis.call('RPUSH', KEYS[1], ARGV[2]) end"

const keyOf = (account: string) => `entries:${Redis.hashTag(Ledger.id(account).value)}`

const book = (account: string, upTo: number) =>
  Worker.run(
    Ledger.id(account),
    Effect.fnUntraced(function*(work) {
      const writes = yield* Redis.FencedWrites
      let next = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.next })
      while (next < upTo) {
        yield* writes.eval(work.token, { lua: append, keys: [keyOf(account)], args: [String(next), entries[next]] })
        next++
        yield* work.checkpoint({ next })
      }
    })
  )

// ---- moving

/** Copies the states of work that nobody holds. The exit of the last term becomes `yielded`: its state is consistent. */
const move = Effect.fnUntraced(function*(from: Backend.Backend["Service"], to: Backend.Backend["Service"]) {
  let after = Option.none<string>()
  let moved = 0
  while (true) {
    const records = yield* from.list({ prefix: "", after, limit: 100 })
    if (!Arr.isReadonlyArrayNonEmpty(records)) return moved
    for (const { state, term, workId } of records) {
      if (Option.isSome(term) && term.value.status === "held") {
        return yield* Effect.die(new Error(`${workId} is held: stop its worker first`))
      }
      if (Option.isNone(state)) continue
      const holderId = "the move"
      const [acquired] = yield* to.acquire([{
        workId,
        holderId,
        attempt: randomUUID(),
        ttl: Duration.seconds(30),
        quarantineAfter: Option.none()
      }])
      if (acquired._tag !== "Acquired") return yield* Effect.die(new Error(`${workId} is in use there already`))
      yield* to.release([{
        workId,
        holderId,
        fencingToken: acquired.fencingToken,
        exit: "yielded",
        interrupted: false,
        state: Option.some({ sequence: 1n, state: state.value })
      }])
      moved++
    }
    after = Option.some(Arr.lastNonEmpty(records).workId)
  }
})

// ---- the story

const story = Effect.gen(function*() {
  const redis = yield* Layer.build(
    Redis.layerWith({ prefix: `example-${randomUUID()}` }).pipe(
      Layer.provideMerge(NodeRedis.layer({ url: yield* RedisServer.url, disableOfflineQueue: true }))
    )
  )
  const onRedis = Layer.provideMerge(Lease.layerWith({ holderId: "on Redis" }), Layer.succeedContext(redis))
  yield* Console.log("A worker books two entries on Redis, each in a fenced write:")
  yield* Effect.provide(book("acme", 2), onRedis)
  const booked = Effect.flatMap(Client.Redis, (client) => client.send("LRANGE", keyOf("acme"), "0", "-1")).pipe(
    Effect.provide(redis)
  )
  assert.deepEqual(yield* booked, ["first", "second"])

  yield* Console.log("A holder that has lost its lease writes nothing more:")
  const refused = yield* Effect.gen(function*() {
    const { token } = yield* Lease.acquire(Ledger.id("acme"))
    yield* Lease.release(token, "yielded")
    const writes = yield* Redis.FencedWrites
    return yield* Effect.flip(writes.set(token, keyOf("acme"), "gone"))
  }).pipe(Effect.provide(onRedis))
  assert.equal(refused._tag, "LeaseExpired")
  assert.deepEqual(yield* booked, ["first", "second"])
  yield* Console.log(`   ${refused.message}`)

  yield* Console.log("The deployment moves to PostgreSQL: the workers have stopped, and their states are copied:")
  const { url } = yield* EmbeddedPostgres.start()
  const postgres = yield* Layer.build(
    Layer.provide(Postgres.layer, PgClient.layer({ url: Redacted.make(url) }))
  )
  const moved = yield* move(Context.get(redis, Backend.Backend), Context.get(postgres, Backend.Backend))
  assert.equal(moved, 1)

  const prior = yield* Worker.run(Ledger.id("acme"), (work) => Effect.succeed(work.prior)).pipe(
    Effect.provide(Layer.provide(Lease.layerWith({ holderId: "on PostgreSQL" }), Layer.succeedContext(postgres)))
  )
  assert.deepEqual(prior.state, Option.some({ next: 2 }))
  assert.equal(prior.exit, "yielded")
  yield* Console.log("   there, the next worker continues at the third entry")
})

NodeRuntime.runMain(
  RedisServer.isAvailable || process.env.CI !== undefined
    ? Effect.scoped(story)
    : Console.log(`This example was not run: there is no Redis here. ${RedisServer.howToGetOne}`)
)
