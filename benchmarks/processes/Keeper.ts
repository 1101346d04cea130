/**
 * A process that holds many leases and does nothing else, and says what it
 * costs. For the heap to be measured, it runs with `--expose-gc`.
 */
import { Duration, Effect, Layer, Schema } from "effect"
import { Lease, Worker } from "worklease"
import * as Counted from "../../support/CountedBackend.ts"
import * as Database from "../Database.ts"
import { monotonicMillis } from "../Measure.ts"
import * as Program from "../Program.ts"

export const Keeper = Program.make({
  name: "keeper",
  Settings: Schema.Struct({
    url: Schema.String,
    leases: Schema.Int,
    ttl: Schema.Number,
    way: Schema.Literals(["hold", "run"]),
    /** Milliseconds for the renewals to settle, and then those that are measured. */
    settle: Schema.Number,
    measure: Schema.Number
  }),
  Command: Schema.Null,
  Event: Schema.Union([
    Schema.TaggedStruct("Holding", { leases: Schema.Int }),
    Schema.TaggedStruct("Measured", {
      millis: Schema.Number,
      statements: Schema.Int,
      renewals: Schema.Int,
      cpuMillis: Schema.Number,
      heapPerLease: Schema.Number,
      lost: Schema.Int
    })
  ]),
  run: Effect.fnUntraced(function*(settings, { say }) {
    const counts = Counted.make()
    const leases: Array<Lease.Any> = []

    /** After a while, in which what is on its way arrives. */
    const heap = Effect.gen(function*() {
      globalThis.gc?.()
      yield* Effect.sleep(50)
      globalThis.gc?.()
      return process.memoryUsage().heapUsed
    })

    const hold = (workId: string) => Effect.map(Lease.hold(workId), (lease) => leases.push(lease))

    const run = (workId: string) =>
      Worker.run(workId, (lease) => {
        leases.push(lease)
        return Effect.never
      })

    const keep = Effect.gen(function*() {
      // What is made once, for all leases.
      yield* Effect.forEach(Array.from({ length: 50 }), (_, i) => Effect.scoped(Lease.hold(`warm-up:${i}`)), {
        concurrency: "unbounded",
        discard: true
      })
      const before = yield* heap
      const workIds = Array.from({ length: settings.leases }, (_, i) => `kept:${i}`)
      if (settings.way === "hold") {
        yield* Effect.forEach(workIds, hold, { concurrency: 1000, discard: true })
      } else {
        for (const workId of workIds) yield* Effect.forkScoped(Effect.orDie(run(workId)))
      }
      while (leases.length < settings.leases) yield* Effect.sleep(20)
      yield* say({ _tag: "Holding", leases: leases.length })
      yield* Effect.sleep(settings.settle)

      const start = { at: monotonicMillis(), cpu: process.cpuUsage(), ...statements(counts) }
      yield* Effect.sleep(settings.measure)
      const cpu = process.cpuUsage(start.cpu)
      const end = { at: monotonicMillis(), ...statements(counts) }

      let lost = 0
      for (const lease of leases) {
        if (!Duration.isPositive(yield* lease.window)) lost++
      }
      // Not before what is timed: after a collection that was asked for, code has to be compiled again.
      const after = yield* heap
      yield* say({
        _tag: "Measured",
        millis: end.at - start.at,
        statements: end.statements - start.statements,
        renewals: end.renewals - start.renewals,
        cpuMillis: (cpu.user + cpu.system) / 1000,
        heapPerLease: (after - before) / settings.leases,
        lost
      })
      return yield* Effect.never
    })

    const layer = Lease.layerWith({ ttl: settings.ttl }).pipe(
      Layer.provide(Counted.layer(counts)),
      Layer.provide(Database.storage()),
      Layer.provide(Database.client(settings.url))
    )
    return yield* keep.pipe(Effect.scoped, Effect.provide(layer))
  })
})

const statements = (counts: Record<Counted.Operation, Counted.Counts>) => ({
  statements: Object.values(counts).reduce((sum, { statements }) => sum + statements, 0),
  renewals: counts.renew.items
})
