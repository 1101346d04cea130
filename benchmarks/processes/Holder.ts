/**
 * A process that waits for leases, holds them and releases them, as it is told.
 */
import { Deferred, Effect, Layer, Queue, Schema } from "effect"
import { Lease, Worker } from "worklease"
import * as Counted from "../../support/CountedBackend.ts"
import * as Database from "../Database.ts"
import { monotonicMillis } from "../Measure.ts"
import * as Program from "../Program.ts"

const lane = { workId: Schema.String }

export const Holder = Program.make({
  name: "holder",
  Settings: Schema.Struct({
    url: Schema.String,
    ttl: Schema.Number,
    pollInterval: Schema.Number,
    wakeups: Schema.Boolean
  }),
  Command: Schema.Union([
    /** Take it, waiting. */
    Schema.TaggedStruct("Take", lane),
    Schema.TaggedStruct("Release", lane)
  ]),
  Event: Schema.Union([
    /** Somebody else holds it: the wait has begun. */
    Schema.TaggedStruct("Waiting", lane),
    /** The work has begun. */
    Schema.TaggedStruct("Began", { ...lane, at: Schema.Number, wallClock: Schema.Number }),
    /** The work has ended, at that time. The lease is released after it. */
    Schema.TaggedStruct("Ended", { ...lane, at: Schema.Number }),
    Schema.TaggedStruct("Lost", { ...lane, why: Schema.String })
  ]),
  run: Effect.fnUntraced(function*(settings, { commands, say }) {
    const releases = new Map<string, Deferred.Deferred<void>>()
    /** Of those that nobody knows to wait yet. */
    const asked = new Set<string>()

    const work = (workId: string) =>
      Effect.gen(function*() {
        const at = monotonicMillis()
        // To the millisecond, as the server's clock is read on the same machine.
        const wallClock = Date.now()
        const release = Deferred.makeUnsafe<void>()
        releases.set(workId, release)
        asked.delete(workId)
        yield* say({ _tag: "Began", workId, at, wallClock })
        yield* Deferred.await(release)
        return monotonicMillis()
      })

    const take = (workId: string) =>
      Worker.run(workId, () => work(workId), { wait: true }).pipe(
        Effect.flatMap((at) => say({ _tag: "Ended", workId, at })),
        Effect.catch((error) => say({ _tag: "Lost", workId, why: error.message }))
      )

    const backend = Counted.layer(Counted.make(), (operation, workId, reply) => {
      if (operation === "acquire" && reply === "Held" && asked.delete(workId)) {
        Effect.runSync(say({ _tag: "Waiting", workId }))
      }
    })
    const layer = Lease.layerWith({ ttl: settings.ttl, pollInterval: settings.pollInterval }).pipe(
      Layer.provide(backend),
      Layer.provide(Database.storage(settings.wakeups ? {} : { wakeups: false })),
      Layer.provide(Database.client(settings.url))
    )
    return yield* Effect.gen(function*() {
      while (true) {
        const command = yield* Queue.take(commands)
        if (command._tag === "Take") {
          asked.add(command.workId)
          yield* Effect.forkScoped(take(command.workId))
        } else {
          yield* Deferred.succeed(releases.get(command.workId)!, undefined)
        }
      }
    }).pipe(Effect.scoped, Effect.provide(layer))
  })
})
