import { assert, describe, it } from "@effect/vitest"
import { Deferred, Effect, Fiber, Layer, Logger, Option, References, Schema, Stream, SubscriptionRef } from "effect"
import { TestClock } from "effect/testing"
import { Backend, Checkpoint, Lease, type LeaseError, Pool, Renewal, Work } from "worklease"
import * as Memory from "worklease/layers/Memory"
import { TestBackend } from "worklease/testing"
import * as Intercepted from "./support/Intercepted.ts"
import {
  counted,
  counting,
  keysOf,
  Partition,
  type Process,
  type Run,
  start,
  untilAsked
} from "./support/PoolProcess.ts"

const onMemory = Effect.provide(Memory.layer)
const onTestBackend = Effect.provide(TestBackend.layer)

const loads = (...processes: ReadonlyArray<Process>) => processes.map(({ working }) => working.size)

const statesOf = (process: Process) =>
  Effect.map(process.status, (all) => Object.fromEntries(all.map(({ key, state }) => [key, state])))

/** Messages that are logged meanwhile, without their causes. */
const logged = <A, E, R>(self: (messages: Array<string>) => Effect.Effect<A, E, R>): Effect.Effect<A, E, R> => {
  const messages: Array<string> = []
  const logger = Logger.make(({ message }) => void messages.push(`${Array.isArray(message) ? message[0] : message}`))
  return Effect.provide(self(messages), Logger.layer([logger]))
}

const silently = Effect.provideService(References.MinimumLogLevel, "None")

const recordOf = (key: string) =>
  Effect.gen(function*() {
    const backend = yield* Backend.Backend
    const [record] = yield* backend.inspect({ workIds: [Partition.id(key).value], states: true })
    const state = Option.getOrUndefined(record?.state ?? Option.none())
    return {
      term: Option.getOrUndefined(record?.term ?? Option.none()),
      offset: state && JSON.parse(new TextDecoder().decode(state.bytes)).offset as number,
      termsWithoutProgress: record?.termsWithoutProgress
    }
  })

/** A backend that may answer something else, or nothing, when it is asked how work IDs stand. */
const inspecting = (
  backend: Backend.Backend["Service"],
  instead: () => Effect.Effect<never, LeaseError.BackendError> | undefined
) =>
  Layer.succeed(
    Backend.Backend,
    Backend.Backend.of({ ...backend, inspect: (options) => instead() ?? backend.inspect(options) })
  )

/** The same work, of newer code. */
const Newer = Work.make("partition", Checkpoint.make(Schema.Struct({ offset: Schema.Int }), { version: 2 }))

describe("Pool", () => {
  describe("balance", () => {
    it.effect("one process runs all; a second one gets half of it, and what it leaves goes back", () =>
      Effect.gen(function*() {
        const a = yield* start("a")
        yield* TestClock.adjust("1 second")
        assert.deepStrictEqual([...a.working].sort(), [...keysOf(10)])
        const b = yield* start("b")
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(loads(a, b), [5, 5])
        assert.strictEqual(b.begun.length, 5)
        assert.strictEqual(a.begun.length, 10)
        yield* b.close
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(loads(a, b), [10, 0])
        assert.strictEqual(a.begun.length, 15)
      }).pipe(onMemory))

    it.effect("a member with twice the capacity has twice the share, and what exceeds all capacities waits", () =>
      logged((messages) =>
        Effect.gen(function*() {
          const about = (what: string) => messages.filter((_) => _.includes(what)).length
          const a = yield* start("a", { capacity: 2, keys: keysOf(6) })
          yield* TestClock.adjust("10 seconds")
          assert.deepStrictEqual(loads(a), [2])
          assert.strictEqual(Object.values(yield* statesOf(a)).filter((_) => _ === "waiting").length, 4)
          assert.strictEqual(about("no member has room for 4 work IDs"), 1)
          const b = yield* start("b", { capacity: 4, keys: keysOf(6) })
          yield* TestClock.adjust("10 seconds")
          assert.deepStrictEqual(loads(a, b), [2, 4])
          assert.strictEqual(a.begun.length, 2)
          assert.strictEqual(about("no member has room"), 1)
          assert.strictEqual(about("room for all work IDs again"), 1)
        })
      ).pipe(onMemory))

    it.effect("no process has more at once than its capacity, also while what it had is still leaving", () =>
      Effect.gen(function*() {
        let keys = keysOf(2)
        let most = 0
        const slow: Run = (work) =>
          Effect.andThen(
            work.awaitYieldRequest,
            Effect.andThen(Effect.sleep("10 seconds"), work.handOff({ offset: 1 }))
          )
        const a = yield* start("a", { capacity: 2, keys: Effect.sync(() => keys), run: slow })
        const passing = Effect.gen(function*() {
          for (let i = 0; i < 60; i++) {
            yield* TestClock.adjust("500 millis")
            most = Math.max(most, a.working.size)
          }
        })
        yield* passing
        keys = keysOf(2, 2)
        yield* passing
        assert.strictEqual(most, 2)
        assert.deepStrictEqual([...a.working].sort(), [...keysOf(2, 2)])
      }).pipe(onMemory))

    it.effect("the share of a process that crashes is taken when its leases have expired", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const a = yield* start("a")
        const b = yield* start("b")
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(loads(a, b), [5, 5])
        yield* backend.sever("a")
        yield* TestClock.adjust("19 seconds")
        assert.strictEqual(b.working.size, 5)
        // One ttl, and two rounds.
        yield* TestClock.adjust("17600 millis")
        assert.deepStrictEqual(loads(a, b), [0, 10])
      }).pipe(silently, onTestBackend))

    it.effect("what somebody outside of the pool holds is left alone", () =>
      Effect.gen(function*() {
        const operator = yield* Layer.build(Lease.layerWith({ holderId: "operator" }))
        yield* Lease.hold(Partition.id("00003")).pipe(Effect.provideContext(operator))
        const a = yield* start("a")
        yield* TestClock.adjust("5 seconds")
        assert.deepStrictEqual([...a.working].sort(), keysOf(10).filter((key) => key !== "00003"))
      }).pipe(Effect.scoped, onMemory))

    it.effect("many that start at once share at once, without taking anything from each other", () =>
      Effect.gen(function*() {
        const all = yield* Effect.forEach(keysOf(20), (name) => start(name, { keys: keysOf(100), run: untilAsked }), {
          concurrency: "unbounded"
        })
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(loads(...all), all.map(() => 5))
        assert.strictEqual(all.reduce((sum, { begun }) => sum + begun.length, 0), 100)
      }).pipe(onMemory))
  })

  describe("handoff", () => {
    it.effect("work leaves at its next checkpoint, the receiver goes on from there, and no attempt is burnt", () =>
      Effect.gen(function*() {
        const priors: Array<Lease.Prior<{ readonly offset: number }>> = []
        const a = yield* start("a", { keys: ["x", "y"] })
        yield* TestClock.adjust("10 seconds")
        yield* start("b", {
          keys: ["x", "y"],
          run: (work) => Effect.andThen(Effect.sync(() => priors.push(work.prior)), counting(work, ""))
        })
        yield* TestClock.adjust("5 seconds")
        assert.deepStrictEqual([...a.working], ["x"])
        const [prior] = priors
        assert.strictEqual(prior.exit, "yielded")
        assert.strictEqual(prior.termsWithoutProgress, 0)
        assert.isAtLeast(Option.getOrThrow(prior.state).offset, 95)
        assert.deepStrictEqual(prior.holderId, Option.some("a"))
      }).pipe(onMemory))

    it.effect("work that waits for the request leaves at once, and the receiver begins at once", () =>
      Effect.gen(function*() {
        const a = yield* start("a", { run: untilAsked })
        yield* TestClock.adjust("10 seconds")
        const b = yield* start("b", { run: untilAsked })
        // It waits for the others' next round, not for a renewal or another round.
        yield* TestClock.adjust("3600 millis")
        assert.deepStrictEqual(loads(a, b), [5, 5])
      }).pipe(onMemory))

    it.effect("work that does not leave is interrupted after the handoff's timeout, and then taken", () =>
      logged((messages) =>
        Effect.gen(function*() {
          const never = { run: () => Effect.never, keys: ["x", "y"], handoffTimeout: "20 seconds" } as const
          const a = yield* start("a", never)
          yield* TestClock.adjust("10 seconds")
          const b = yield* start("b", never)
          yield* TestClock.adjust("5 seconds")
          assert.deepStrictEqual(yield* statesOf(a), { x: "running", y: "yielding" })
          assert.deepStrictEqual(loads(a, b), [2, 0])
          yield* TestClock.adjust("10 seconds")
          assert.deepStrictEqual(loads(a, b), [2, 0])
          yield* TestClock.adjust("10 seconds")
          assert.deepStrictEqual(loads(a, b), [1, 1])
          assert.strictEqual((yield* recordOf("y")).termsWithoutProgress, 0)
          assert.isTrue(messages.some((_) => _.includes("\"partition:y\" did not hand over in time")))
        })
      ).pipe(onMemory))

    it.effect("a receiver that goes before the work has left does not keep it from going on elsewhere", () =>
      Effect.gen(function*() {
        const slow: Run = (work) =>
          Effect.andThen(
            work.awaitYieldRequest,
            Effect.andThen(Effect.sleep("10 seconds"), work.handOff({ offset: 1 }))
          )
        const a = yield* start("a", { run: slow })
        yield* TestClock.adjust("10 seconds")
        const b = yield* start("b", { run: slow })
        yield* TestClock.adjust("5 seconds")
        assert.deepStrictEqual(loads(a, b), [10, 0])
        yield* b.close
        yield* TestClock.adjust("20 seconds")
        assert.deepStrictEqual(loads(a), [10])
      }).pipe(onMemory))
  })

  describe("identity", () => {
    const ran = ({ begun }: Process) => [...new Set(begun)].sort()

    it.effect("one that comes back within a ttl gets what it had, and nothing else has moved", () =>
      Effect.gen(function*() {
        const a = yield* start("a", { memberId: "pod-0" })
        const b = yield* start("b-1", { memberId: "pod-1" })
        yield* TestClock.adjust("10 seconds")
        const had = ran(b)
        yield* b.close
        yield* TestClock.adjust("15 seconds")
        assert.deepStrictEqual(loads(a, b), [5, 0])
        const again = yield* start("b-2", { memberId: "pod-1" })
        yield* TestClock.adjust("5 seconds")
        assert.deepStrictEqual(ran(again), had)
        assert.strictEqual(a.begun.length, 5)
      }).pipe(onMemory))

    it.effect("who comes meanwhile does not take the place of one that may come back", () =>
      Effect.gen(function*() {
        yield* start("a", { memberId: "pod-0", keys: keysOf(12) })
        const b = yield* start("b-1", { memberId: "pod-1", keys: keysOf(12) })
        yield* TestClock.adjust("10 seconds")
        const had = ran(b)
        yield* b.close
        yield* TestClock.adjust("5 seconds")
        yield* start("c", { keys: keysOf(12) })
        yield* TestClock.adjust("10 seconds")
        const again = yield* start("b-2", { memberId: "pod-1", keys: keysOf(12) })
        yield* TestClock.adjust("10 seconds")
        assert.strictEqual(again.working.size, 4)
        assert.isTrue([...again.working].every((key) => had.includes(key)))
      }).pipe(onMemory))

    it.effect("one that has taken its place again, and has not yet said who it is, gets what it had all the same", () =>
      Effect.gen(function*() {
        const a = yield* start("a", { memberId: "pod-0" })
        const b = yield* start("b-1", { memberId: "pod-1" })
        const c = yield* start("c", { memberId: "pod-2" })
        yield* TestClock.adjust("10 seconds")
        const had = [...b.working].sort()
        yield* b.close
        yield* TestClock.adjust("5 seconds")
        // Its checkpoints take long: so does the one that says who it is.
        const slow = Layer.effect(
          Backend.Backend,
          Effect.map(Backend.Backend, (backend) =>
            Backend.Backend.of({
              ...backend,
              checkpoint: (requests) => Effect.delay(backend.checkpoint(requests), "4 seconds")
            }))
        )
        const again = yield* Effect.provide(
          start("b-2", { memberId: "pod-1", lease: { operationTimeout: "9 seconds" } }),
          slow
        )
        yield* TestClock.adjust("20 seconds")
        assert.deepStrictEqual([...again.working].sort(), had)
        assert.deepStrictEqual([a.begun.length, c.begun.length].sort(), [3, 4])
      }).pipe(onMemory))

    it.effect("what one had that does not come back is shared after a ttl", () =>
      Effect.gen(function*() {
        const a = yield* start("a", { memberId: "pod-0" })
        const b = yield* start("b", { memberId: "pod-1" })
        yield* TestClock.adjust("10 seconds")
        yield* b.close
        yield* TestClock.adjust("29 seconds")
        assert.deepStrictEqual(loads(a, b), [5, 0])
        yield* TestClock.adjust("7 seconds")
        assert.deepStrictEqual(loads(a, b), [10, 0])
      }).pipe(onMemory))

    it.effect("one that has crashed comes back to its own place, and says what it waits for", () =>
      logged((messages) =>
        Effect.gen(function*() {
          const backend = yield* TestBackend.TestBackend
          const a = yield* start("a", { memberId: "pod-0" })
          yield* start("b-1", { memberId: "pod-1" })
          yield* TestClock.adjust("10 seconds")
          yield* backend.sever("b-1")
          const again = yield* start("b-2", { memberId: "pod-1" })
          yield* TestClock.adjust("5 seconds")
          assert.isTrue(messages.some((_) => _.includes("member \"pod-1\" waits for its place \"partition/member:1\"")))
          assert.deepStrictEqual(loads(a, again), [5, 0])
          yield* TestClock.adjust("35 seconds")
          assert.deepStrictEqual(loads(a, again), [5, 5])
          const slots = yield* (yield* Backend.Backend).inspect({
            workIds: [0, 1, 2].map((slot) => `partition/member:${slot}`),
            states: false
          })
          assert.deepStrictEqual(slots.map(({ term }) => Option.getOrThrow(term).holderId), ["a", "b-2"])
        })
      ).pipe(onTestBackend))

    it.effect("a rolling restart of all moves only what each of them had", () =>
      Effect.gen(function*() {
        const names = ["0", "1", "2", "3"]
        const starting = (name: string, generation: number) =>
          start(`${name}-${generation}`, { memberId: `pod-${name}`, keys: keysOf(40) })
        const before = yield* Effect.forEach(names, (name) => starting(name, 1), { concurrency: "unbounded" })
        yield* TestClock.adjust("10 seconds")
        const after: Array<Process> = []
        for (const [index, name] of names.entries()) {
          yield* before[index].close
          yield* TestClock.adjust("5 seconds")
          after.push(yield* starting(name, 2))
          yield* TestClock.adjust("5 seconds")
        }
        assert.deepStrictEqual(after.map(ran), before.map(ran))
        assert.deepStrictEqual(after.map(({ begun }) => begun.length), [10, 10, 10, 10])
      }).pipe(onMemory))

    it.effect("who has a place but has not said who it is yet is no member, whoever had the place before", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        const a = yield* start("a")
        yield* TestClock.adjust("5 seconds")
        yield* start("before")
        yield* TestClock.adjust("5 seconds")
        yield* intercept((call, { items, operation }) =>
          items[0].holderId === "before"
            ? Effect.fail(Intercepted.unreachable(operation, "rejected"))
            : items[0].holderId === "b" && operation === "checkpoint"
            ? Effect.never
            : call
        )
        yield* TestClock.adjust("1 minute")
        const b = yield* start("b")
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(loads(a, b), [10, 0])
        assert.strictEqual(a.begun.length, 15)
        yield* intercept((call, { items, operation }) =>
          items[0].holderId === "before" ? Effect.fail(Intercepted.unreachable(operation, "rejected")) : call
        )
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(loads(a, b), [5, 5])
      }).pipe(silently, Effect.provide(Intercepted.layer)))

    it.effect("who stays in a high place when many have left is still seen by those who come", () =>
      Effect.gen(function*() {
        const options = { keys: keysOf(60), run: untilAsked }
        const all = yield* Effect.forEach(keysOf(40), (name) => start(name, options), { concurrency: "unbounded" })
        yield* TestClock.adjust("10 seconds")
        const backend = yield* Backend.Backend
        const slots = yield* backend.inspect({
          workIds: Array.from({ length: 40 }, (_, slot) => `partition/member:${slot}`),
          states: false
        })
        const high = new Set(slots.slice(-2).map(({ term }) => Option.getOrThrow(term).holderId))
        const staying = all.filter(({ holderId }) => high.has(holderId))
        for (const process of all) if (!staying.includes(process)) yield* process.close
        yield* TestClock.adjust("1 second")
        const late = yield* start("late", options)
        yield* TestClock.adjust("20 seconds")
        assert.deepStrictEqual(loads(...staying, late), [20, 20, 20])
      }).pipe(onMemory))

    it.effect("a place is found also while all low ones are kept for those who have crashed", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const options = { keys: keysOf(32), run: untilAsked }
        const crashed = keysOf(16)
        for (const name of crashed) yield* start(name, { ...options, memberId: name })
        yield* TestClock.adjust("10 seconds")
        for (const name of crashed) yield* backend.sever(name)
        yield* TestClock.adjust("35 seconds")
        const a = yield* start("a", options)
        const b = yield* start("b", options)
        yield* TestClock.adjust("15 seconds")
        assert.deepStrictEqual(loads(a, b), [16, 16])
      }).pipe(silently, onTestBackend))

    it.effect("who is in a high place stays there while those below are kept for who may come back", () => {
      const counts = new Map<string, number>()
      return Effect.gen(function*() {
        const all: Array<Process> = []
        for (const name of keysOf(17)) {
          all.push(yield* start(name, { keys: keysOf(17), run: untilAsked, memberId: name }))
          yield* TestClock.adjust("1 second")
        }
        yield* TestClock.adjust("10 seconds")
        for (const process of all.slice(1, 16)) yield* process.close
        counts.clear()
        yield* TestClock.adjust("10 seconds")
        assert.isUndefined(counts.get("acquire"))
        yield* TestClock.adjust("1 minute")
        assert.isAtLeast(all[0].working.size, 8)
        assert.strictEqual(all[0].working.size + all[16].working.size, 17)
      }).pipe(silently, Effect.provide(Layer.provide(counted(counts), Memory.layer)))
    })

    it.effect("a place with a state that cannot be read is left alone", () =>
      Effect.gen(function*() {
        const newer = yield* Layer.build(Lease.layerWith({ holderId: "newer" }))
        const Slot = Work.make(
          "partition/member",
          Checkpoint.make(Schema.Struct({ is: Schema.String }), { version: 9 })
        )
        yield* Lease.hold(Slot.id("0")).pipe(
          Effect.flatMap((lease) => lease.checkpoint({ is: "newer" })),
          Effect.scoped,
          Effect.provideContext(newer)
        )
        const a = yield* start("a")
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(loads(a), [10])
      }).pipe(Effect.scoped, onMemory))

    it.effect("who has lost its place takes another one, and its work goes on meanwhile", () =>
      Effect.gen(function*() {
        const backend = yield* Backend.Backend
        const a = yield* start("a")
        yield* TestClock.adjust("10 seconds")
        const [slot] = yield* backend.inspect({ workIds: ["partition/member:0"], states: false })
        yield* backend.release([{
          workId: slot.workId,
          ...Option.getOrThrow(slot.term),
          exit: "abandoned",
          interrupted: false,
          state: Option.none()
        }])
        yield* TestClock.adjust("30 seconds")
        const b = yield* start("b")
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(loads(a, b), [5, 5])
        assert.strictEqual(a.begun.length, 10)
      }).pipe(silently, onMemory))
  })

  describe("keys", () => {
    it.effect("are read again: what is new is run, what is gone is asked to yield", () =>
      Effect.gen(function*() {
        let keys = keysOf(4)
        const a = yield* start("a", { keys: Effect.sync(() => keys) })
        const b = yield* start("b", { keys: Effect.sync(() => keys) })
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(loads(a, b), [2, 2])
        keys = keysOf(4, 2)
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual([...a.working, ...b.working].sort(), [...keysOf(4, 2)])
        assert.deepStrictEqual(loads(a, b), [2, 2])
        assert.strictEqual((yield* recordOf("00000")).term?.status, "yielded")
      }).pipe(onMemory))

    it.effect("that are gone are not begun by who still waited for them", () =>
      Effect.gen(function*() {
        let keys = ["x", "y"]
        const slow: Run = (work) =>
          Effect.andThen(
            work.awaitYieldRequest,
            Effect.andThen(Effect.sleep("20 seconds"), work.handOff({ offset: 1 }))
          )
        const a = yield* start("a", { keys: Effect.sync(() => keys), run: slow })
        yield* TestClock.adjust("5 seconds")
        const b = yield* start("b", { keys: Effect.sync(() => keys), run: slow })
        yield* TestClock.adjust("5 seconds")
        keys = ["x"]
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual([[...a.working], b.begun], [["x"], []])
      }).pipe(onMemory))

    it.effect("come from a stream, too", () =>
      Effect.gen(function*() {
        const keys = yield* SubscriptionRef.make<ReadonlyArray<string>>(["x"])
        const a = yield* start("a", { keys: SubscriptionRef.changes(keys) })
        yield* TestClock.adjust("5 seconds")
        assert.deepStrictEqual([...a.working], ["x"])
        yield* SubscriptionRef.set(keys, ["y", "z"])
        yield* TestClock.adjust("5 seconds")
        assert.deepStrictEqual([...a.working].sort(), ["y", "z"])
      }).pipe(onMemory))

    it.effect("that are not known yet give a process no share", () =>
      Effect.gen(function*() {
        const a = yield* start("a", { keys: keysOf(4) })
        yield* TestClock.adjust("5 seconds")
        const b = yield* start("b", { keys: Stream.concat(Stream.never, Stream.succeed([])) })
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(loads(a, b), [4, 0])
        assert.strictEqual(a.begun.length, 4)
      }).pipe(onMemory))

    it.effect("that cannot be read stay as they were, which is logged once", () =>
      logged((messages) =>
        Effect.gen(function*() {
          let isOut = false
          const a = yield* start("a", {
            keys: Effect.suspend(() => isOut ? Effect.fail("out of reach") : Effect.succeed(["x", "y"]))
          })
          yield* TestClock.adjust("5 seconds")
          isOut = true
          yield* TestClock.adjust("1 minute")
          assert.deepStrictEqual([...a.working].sort(), ["x", "y"])
          assert.strictEqual(messages.filter((_) => _.includes("the keys could not be read")).length, 1)
        })
      ).pipe(onMemory))

    it.effect("that take long to be read do not keep a process from its rounds", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        let isOut = false
        const keys = Effect.suspend(() => isOut ? Effect.never : Effect.succeed(keysOf(10)))
        const a = yield* start("a", { keys })
        const b = yield* start("b", { keys })
        yield* TestClock.adjust("10 seconds")
        isOut = true
        yield* TestClock.adjust("10 seconds")
        yield* backend.sever("a")
        // One ttl, and two rounds, which wait for the keys as long again.
        yield* TestClock.adjust("43 seconds")
        assert.deepStrictEqual(loads(a, b), [0, 10])
      }).pipe(silently, onTestBackend))

    it.effect("from a stream that fails stay as they were, and it is run again", () =>
      Effect.gen(function*() {
        let times = 0
        const a = yield* start("a", {
          keys: Stream.suspend(() => Stream.concat(Stream.succeed([`${times++}`]), Stream.fail("over")))
        })
        yield* TestClock.adjust("10 seconds")
        assert.isAtLeast(times, 3)
        assert.strictEqual(a.working.size, 1)
        // Not ever again at the same pace, although it has keys each time.
        yield* TestClock.adjust("10 minutes")
        assert.isAtLeast(times, 10)
        assert.isAtMost(times, 20)
        assert.strictEqual(a.working.size, 1)
      }).pipe(silently, onMemory))

    it.effect("that are iterated with an error stay as they were", () =>
      logged((messages) =>
        Effect.gen(function*() {
          let isOut = false
          const keys: Iterable<string> = {
            [Symbol.iterator]: () => {
              if (isOut) throw new Error("out of reach")
              return keysOf(10)[Symbol.iterator]()
            }
          }
          const a = yield* start("a", { keys })
          const b = yield* start("b")
          yield* TestClock.adjust("10 seconds")
          isOut = true
          yield* b.close
          yield* TestClock.adjust("20 seconds")
          assert.deepStrictEqual(loads(a, b), [10, 0])
          assert.strictEqual(messages.filter((_) => _.includes("the keys could not be read")).length, 1)
        })
      ).pipe(onMemory))

    it.effect("that are no valid work IDs are left out, which is logged once for each", () =>
      logged((messages) =>
        Effect.gen(function*() {
          const a = yield* start("a", { keys: ["x", "x", "\0"] })
          yield* TestClock.adjust("1 minute")
          assert.deepStrictEqual(a.begun, ["x"])
          assert.strictEqual(messages.filter((_) => _.includes("is left out")).length, 1)
        })
      ).pipe(onMemory))

    it.effect("that only one member knows are run by that one, and nothing moves until the others know them", () =>
      Effect.gen(function*() {
        let keys = keysOf(4)
        const a = yield* start("a", { keys: Effect.sync(() => keys) })
        const b = yield* start("b", { keys: keysOf(12) })
        yield* TestClock.adjust("2 minutes")
        assert.deepStrictEqual([...a.working, ...b.working].sort(), [...keysOf(12)])
        const begun = a.begun.length + b.begun.length
        yield* TestClock.adjust("5 minutes")
        assert.strictEqual(a.begun.length + b.begun.length, begun)
        keys = keysOf(12)
        yield* TestClock.adjust("30 seconds")
        assert.deepStrictEqual(loads(a, b), [6, 6])
      }).pipe(onMemory))

    it.effect("that only one member knows are run also while others change in every round, and stay there", () =>
      Effect.gen(function*() {
        let added = 0
        yield* start("a", { keys: Effect.sync(() => [...keysOf(4), `added-${added++}`]), run: untilAsked })
        const b = yield* start("b", { keys: keysOf(12), run: untilAsked })
        yield* TestClock.adjust("2 minutes")
        assert.isTrue(keysOf(8, 4).every((key) => b.working.has(key)))
        const count = b.begun.filter((key) => key >= "00004").length
        yield* TestClock.adjust("5 minutes")
        assert.strictEqual(b.begun.filter((key) => key >= "00004").length, count)
      }).pipe(silently, onMemory))
  })

  describe("failures", () => {
    it.effect("work that fails is logged, and run again after pauses that grow; the others go on", () =>
      logged((messages) =>
        Effect.gen(function*() {
          const at: Array<number> = []
          const a = yield* start("a", {
            keys: ["bad", "good"],
            quarantineAfter: Infinity,
            run: (work, key) =>
              key === "good" ? counting(work, key) : Effect.andThen(
                Effect.clockWith((clock) => Effect.sync(() => at.push(clock.currentTimeMillisUnsafe()))),
                Effect.fail("broken")
              )
          })
          yield* TestClock.adjust("5 minutes")
          const pauses = at.slice(1).map((time, index) => Math.round((time - at[index]) / 1000))
          assert.isAtMost(pauses.length, 14)
          assert.isAtLeast(pauses.length, 5)
          assert.isAtMost(pauses[0], 5)
          assert.isAtLeast(pauses[pauses.length - 1], 48)
          assert.deepStrictEqual(a.begun.filter((_) => _ === "good").length, 1)
          assert.isTrue(messages.some((_) => _.includes("the work of \"partition:bad\" failed")))
        })
      ).pipe(onMemory))

    it.effect("after some terms without progress it is quarantined, with the reason, and nobody runs it until a lift", () =>
      logged((messages) =>
        Effect.gen(function*() {
          let isMended = false
          const run: Run = (work, key) => key === "bad" && !isMended ? Effect.die("poison") : counting(work, key)
          const a = yield* start("a", { keys: ["bad", "good"], quarantineAfter: 3, run })
          const b = yield* start("b", { keys: ["bad", "good"], quarantineAfter: 3, run })
          yield* TestClock.adjust("5 minutes")
          assert.strictEqual([...a.begun, ...b.begun].filter((_) => _ === "bad").length, 3)
          const [bad, good] = yield* a.status
          assert.strictEqual(bad.state, "quarantined")
          assert.strictEqual(bad.termsWithoutProgress, 3)
          assert.match(
            Option.getOrThrow(bad.why),
            /^3 terms in a row have ended without a new checkpoint; the last one ended as abandoned, held by "[ab]"$/
          )
          assert.strictEqual(good.state, "running")
          assert.strictEqual(messages.filter((_) => _.includes("\"partition:bad\" is quarantined")).length, 1)

          isMended = true
          yield* Lease.lift(Partition.id("bad")).pipe(Effect.provide(Lease.layerWith({ holderId: "operator" })))
          yield* TestClock.adjust("1 minute")
          assert.deepStrictEqual(loads(a, b), [1, 1])
        })
      ).pipe(onMemory))

    /** Leaves a state of a newer version than the processes know. */
    const leaveNewer = Effect.fnUntraced(function*(key: string) {
      const leases = yield* Layer.build(Lease.layerWith({ holderId: "newer" }))
      yield* Lease.hold(Newer.id(key)).pipe(
        Effect.flatMap((lease) => lease.checkpoint({ offset: 1 })),
        Effect.scoped,
        Effect.provideContext(leases)
      )
    })

    it.effect("what cannot begin is tried again after pauses that grow", () => {
      const counts = new Map<string, number>()
      return Effect.gen(function*() {
        yield* leaveNewer("00000")
        const a = yield* start("a", { keys: keysOf(1), rerunAfter: "1 second" })
        counts.clear()
        yield* TestClock.adjust("10 minutes")
        assert.deepStrictEqual(a.begun, [])
        // Of 200 rounds. One is of the member.
        assert.isAtMost(counts.get("acquire")!, 20)
        assert.isAtLeast(counts.get("acquire")!, 10)
      }).pipe(Effect.scoped, silently, Effect.provide(Layer.provide(counted(counts), Memory.layer)))
    })

    it.effect("work that one member cannot begin is taken by another one", () =>
      Effect.gen(function*() {
        yield* leaveNewer("00000")
        const a = yield* start("a", { keys: keysOf(2), rerunAfter: "1 second" })
        yield* TestClock.adjust("1 second")
        const leases = yield* Layer.build(Lease.layerWith({ holderId: "b" }))
        const newer = new Set<string>()
        yield* Pool.make({
          work: Newer,
          keys: keysOf(2),
          rerunAfter: "1 second",
          run: (work, key) => Effect.andThen(Effect.sync(() => newer.add(key)), work.awaitYieldRequest)
        }).pipe(Effect.provideContext(leases))
        yield* TestClock.adjust("1 minute")
        assert.isTrue(newer.has("00000"))
        assert.deepStrictEqual([...a.working], ["00001"])
      }).pipe(Effect.scoped, silently, onMemory))

    it.effect("what cannot begin because the backend is out of reach is told once, and begins afterwards", () =>
      logged((messages) =>
        Effect.gen(function*() {
          const { intercept, restore } = yield* Intercepted.Intercepted
          yield* intercept((call, { items, operation }) =>
            operation === "acquire" && items[0].workId !== "partition/member:0"
              ? Effect.fail(Intercepted.unreachable(operation, "rejected"))
              : call
          )
          const a = yield* start("a", { keys: keysOf(100) })
          yield* TestClock.adjust("5 seconds")
          assert.deepStrictEqual(messages, [
            "Pool \"partition\": could not begin the work of \"partition:00000\" and of 99 others"
          ])
          yield* restore
          yield* TestClock.adjust("10 seconds")
          assert.deepStrictEqual(loads(a), [100])
        })
      ).pipe(Effect.provide(Intercepted.layer)))

    it.effect("work that interrupts itself has failed", () =>
      logged((messages) =>
        Effect.gen(function*() {
          const a = yield* start("a", { keys: ["x"], quarantineAfter: 3, run: () => Effect.interrupt })
          yield* TestClock.adjust("2 minutes")
          assert.deepStrictEqual(a.begun, ["x", "x", "x"])
          assert.deepStrictEqual(yield* statesOf(a), { x: "quarantined" })
          assert.isTrue(messages.some((_) => _.includes("the work of \"partition:x\" failed")))
        })
      ).pipe(onMemory))

    it.effect("an answer is waited for as long as the pool's policy says", () =>
      Effect.gen(function*() {
        const backend = yield* Backend.Backend
        let isOut = false
        const flaky = inspecting(backend, () => isOut ? Effect.never : undefined)
        yield* Effect.gen(function*() {
          const options = { policy: yield* Renewal.make({ ttl: "10 seconds" }), lease: { ttl: "1 hour" } } as const
          const a = yield* start("a", options)
          yield* TestClock.adjust("10 seconds")
          isOut = true
          yield* TestClock.adjust("2 seconds")
          isOut = false
          yield* TestClock.adjust("5 seconds")
          const b = yield* start("b", options)
          yield* TestClock.adjust("5 seconds")
          assert.deepStrictEqual(loads(a, b), [5, 5])
        }).pipe(Effect.provide(flaky))
      }).pipe(silently, onMemory))

    it.effect("while the backend does not answer, what runs goes on, and the pool recovers", () =>
      Effect.gen(function*() {
        const backend = yield* Backend.Backend
        let isOut = false
        const flaky = inspecting(
          backend,
          () => isOut ? Effect.fail(Intercepted.unreachable("inspect", "rejected")) : undefined
        )
        yield* logged((messages) =>
          Effect.gen(function*() {
            const a = yield* start("a")
            yield* TestClock.adjust("5 seconds")
            isOut = true
            yield* TestClock.adjust("1 minute")
            assert.deepStrictEqual(loads(a), [10])
            assert.strictEqual(messages.filter((_) => _.includes("a round failed")).length, 1)
            isOut = false
            const b = yield* start("b")
            yield* TestClock.adjust("30 seconds")
            assert.deepStrictEqual(loads(a, b), [5, 5])
            assert.strictEqual(messages.filter((_) => _.includes("rounds succeed again")).length, 1)
          })
        ).pipe(Effect.provide(flaky))
      }).pipe(onMemory))
  })

  describe("the end of work", () => {
    it.effect("what has finished is not run again, carries no load, and its lease is free", () =>
      Effect.gen(function*() {
        const run: Run = (work, key) => key < "00004" ? Effect.void : counting(work, key)
        const a = yield* start("a", { keys: keysOf(8), run })
        const b = yield* start("b", { keys: keysOf(8), run })
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(loads(a, b), [2, 2])
        assert.strictEqual([...a.begun, ...b.begun].filter((_) => _ === "00000").length, 1)
        assert.strictEqual((yield* statesOf(a))["00000"], "finished")
        assert.strictEqual((yield* recordOf("00000")).term?.status, "finished")
      }).pipe(onMemory))

    it.effect("it is run again after a while, if that is wanted, and meanwhile holds no lease", () =>
      Effect.gen(function*() {
        const a = yield* start("a", {
          keys: ["x"],
          rerunAfter: "5 minutes",
          run: (work) => work.leaveAs("finished", { offset: 7 })
        })
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(a.begun, ["x"])
        assert.deepStrictEqual(yield* statesOf(a), { x: "idle" })
        assert.strictEqual((yield* recordOf("x")).term?.status, "finished")
        yield* TestClock.adjust("4 minutes")
        assert.deepStrictEqual(a.begun, ["x"])
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(a.begun, ["x", "x"])
      }).pipe(onMemory))

    it.effect("what has retired is never run again", () =>
      Effect.gen(function*() {
        const a = yield* start("a", {
          keys: ["x"],
          rerunAfter: "1 second",
          run: (work) => work.leaveAs("retired", { offset: 7 })
        })
        yield* TestClock.adjust("10 minutes")
        assert.deepStrictEqual(a.begun, ["x"])
        assert.deepStrictEqual(yield* statesOf(a), { x: "retired" })
      }).pipe(onMemory))
  })

  describe("shutdown", () => {
    it.effect("asks all work to yield, renews until the last has ended, and only then gives up its place", () =>
      Effect.gen(function*() {
        const backend = yield* Backend.Backend
        const slow: Run = (work) =>
          Effect.andThen(
            work.awaitYieldRequest,
            Effect.andThen(Effect.sleep("2 minutes"), work.handOff({ offset: 1 }))
          )
        const a = yield* start("a", { keys: ["x"], run: slow, handoffTimeout: "5 minutes" })
        yield* TestClock.adjust("5 seconds")
        const closing = yield* a.close
        yield* TestClock.adjust("110 seconds")
        assert.isUndefined(closing.pollUnsafe())
        assert.deepStrictEqual(yield* statesOf(a), { x: "yielding" })
        assert.strictEqual((yield* recordOf("x")).term?.status, "held")
        yield* TestClock.adjust("20 seconds")
        yield* Fiber.join(closing)
        assert.strictEqual((yield* recordOf("x")).term?.status, "yielded")
        const [slot] = yield* backend.inspect({ workIds: ["partition/member:0"], states: false })
        assert.strictEqual(Option.getOrThrow(slot.term).status, "retired")
      }).pipe(onMemory))

    it.effect("interrupts what does not yield in time, and waits for its finalizers", () =>
      Effect.gen(function*() {
        const cleaned = yield* Deferred.make<void>()
        const a = yield* start("a", {
          keys: ["x"],
          handoffTimeout: "2 seconds",
          run: () =>
            Effect.onInterrupt(Effect.never, () =>
              Effect.andThen(Effect.sleep("3 seconds"), Deferred.succeed(cleaned, undefined)))
        })
        yield* TestClock.adjust("5 seconds")
        const closing = yield* Effect.forkChild(a.pool.shutdown, { startImmediately: true })
        const again = yield* Effect.forkChild(a.pool.shutdown, { startImmediately: true })
        // Not with its next renewal, which is later.
        yield* TestClock.adjust("4 seconds")
        assert.isUndefined(closing.pollUnsafe())
        assert.isFalse(Deferred.isDoneUnsafe(cleaned))
        yield* TestClock.adjust("2 seconds")
        yield* Fiber.join(closing)
        yield* Fiber.join(again)
        assert.isTrue(Deferred.isDoneUnsafe(cleaned))
      }).pipe(silently, onMemory))

    it.effect("interrupts in time also what others have asked to yield without a deadline, or a later one", () =>
      Effect.gen(function*() {
        const a = yield* start("a", { keys: ["x", "y"], handoffTimeout: "20 seconds", run: () => Effect.never })
        yield* TestClock.adjust("5 seconds")
        yield* Effect.provide(
          Effect.andThen(
            Lease.requestYield(Partition.id("x")),
            Lease.requestYield(Partition.id("y"), { deadline: "1 hour" })
          ),
          Lease.layerWith({ holderId: "operator" })
        )
        yield* TestClock.adjust("5 seconds")
        const closing = yield* a.close
        yield* TestClock.adjust("25 seconds")
        assert.isDefined(closing.pollUnsafe())
      }).pipe(silently, onMemory))

    it.effect("may be asked for by the pool's own work", () =>
      Effect.gen(function*() {
        const pool = yield* Deferred.make<Pool.Pool>()
        const a = yield* start("a", {
          keys: ["x"],
          handoffTimeout: "5 seconds",
          run: () => Effect.flatMap(Deferred.await(pool), ({ shutdown }) => shutdown)
        })
        yield* Deferred.succeed(pool, a.pool)
        yield* TestClock.adjust("10 seconds")
        const again = yield* Effect.forkChild(a.pool.shutdown, { startImmediately: true })
        assert.isDefined(again.pollUnsafe())
      }).pipe(silently, onMemory))

    it.effect("takes nothing more, releases all in a few statements, and tells how far it is", () =>
      logged((messages) =>
        Effect.gen(function*() {
          const counts = new Map<string, number>()
          const slowStore = Layer.effect(
            Backend.Backend,
            Effect.map(Backend.Backend, (backend) =>
              Backend.Backend.of({
                ...backend,
                release: (requests) => Effect.andThen(Effect.sleep("10 millis"), backend.release(requests))
              }))
          )
          yield* Effect.gen(function*() {
            const untilAskedOrLater: Run = (work, key) =>
              work.awaitYieldRequest.pipe(
                Effect.andThen(key === "00000" ? Effect.sleep("12 seconds") : Effect.void),
                Effect.andThen(work.handOff({ offset: 1 }))
              )
            const a = yield* start("a", { keys: keysOf(500), run: untilAskedOrLater })
            yield* TestClock.adjust("5 seconds")
            assert.deepStrictEqual(loads(a), [500])
            counts.clear()
            const closing = yield* a.close
            yield* TestClock.adjust("20 seconds")
            yield* Fiber.join(closing)
            assert.strictEqual(a.begun.length, 500)
            assert.isAtMost(counts.get("release")!, 6)
            assert.isTrue(messages.some((_) => _.includes("500 at work are asked to hand over")))
            assert.isTrue(messages.some((_) => _.includes("1 still at work")))
            assert.isTrue(messages.some((_) => _.includes("nothing is at work any more")))
          }).pipe(Effect.provide(counted(counts).pipe(Layer.provide(slowStore))))
        })
      ).pipe(onMemory))

    it.effect("the others take what it has left without waiting for its end", () =>
      Effect.gen(function*() {
        const slow: Run = (work, key) =>
          work.awaitYieldRequest.pipe(
            Effect.andThen(key === "00000" ? Effect.sleep("1 minute") : Effect.void),
            Effect.andThen(work.handOff({ offset: 1 }))
          )
        const a = yield* start("a", { run: slow, handoffTimeout: "2 minutes" })
        const b = yield* start("b", { run: slow })
        yield* TestClock.adjust("5 seconds")
        yield* a.close
        yield* TestClock.adjust("5 seconds")
        assert.deepStrictEqual(loads(a, b), [1, 9])
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(loads(a, b), [0, 10])
      }).pipe(onMemory))
  })

  describe("cost", () => {
    for (const count of [10, 1000]) {
      it.effect(`while nothing changes, a round costs one statement, with ${count} work IDs`, () => {
        const counts = new Map<string, number>()
        return Effect.gen(function*() {
          yield* start("a", { keys: keysOf(count), run: untilAsked })
          yield* start("b", { keys: keysOf(count), run: untilAsked })
          yield* TestClock.adjust("1 minute")
          counts.clear()
          // Of 3 seconds each.
          yield* TestClock.adjust("300 seconds")
          assert.isAtMost(counts.get("inspect")!, 2 * 100 * 1.1 * 1.2)
          assert.isUndefined(counts.get("acquire"))
          assert.isAtMost(counts.get("renew")!, 2 * 30 * 3)
        }).pipe(Effect.provide(Layer.provide(counted(counts), Memory.layer)))
      })
    }

    it.effect("what the same process holds outside of the pool makes a round cost no more", () => {
      const counts = new Map<string, number>()
      return Effect.gen(function*() {
        const a = yield* start("a", { run: untilAsked })
        const same = yield* Layer.build(Lease.layerWith({ holderId: "a" }))
        yield* Lease.hold(Partition.id("00003")).pipe(Effect.provideContext(same))
        yield* TestClock.adjust("1 minute")
        counts.clear()
        yield* TestClock.adjust("300 seconds")
        assert.deepStrictEqual(loads(a), [9])
        assert.isAtMost(counts.get("inspect")!, 100 * 1.1 * 1.2)
      }).pipe(Effect.scoped, Effect.provide(Layer.provide(counted(counts), Memory.layer)))
    })
  })

  describe("status", () => {
    it.effect("tells how all stand, who holds what since when, and then every change", () =>
      Effect.gen(function*() {
        yield* TestClock.setTime(1_000_000)
        const a = yield* start("a", { keys: ["x", "y"] })
        const seen: Array<string> = []
        const told: Array<ReadonlyArray<Pool.Status>> = []
        yield* Stream.runForEach(a.pool.status, (all) =>
          Effect.sync(() => {
            told.push(all)
            seen.push(all.map(({ key, state }) => `${key} ${state}`).join())
          })).pipe(Effect.forkChild)
        yield* TestClock.adjust("5 seconds")
        const b = yield* start("b", { keys: ["x", "y"] })
        yield* TestClock.adjust("5 seconds")
        const [x, y] = yield* b.status
        assert.deepStrictEqual([x.workId, x.holderId], ["partition:x", Option.some("a")])
        assert.deepStrictEqual(y.holderId, Option.some("b"))
        assert.isAtLeast(Option.getOrThrow(x.since), 1_000_000)
        assert.isAtLeast(Option.getOrThrow(y.since), 1_005_000)
        assert.strictEqual(seen[seen.length - 1], "x running,y running")
        assert.isTrue(seen.includes("x running,y yielding"))
        // Changes, and nothing else, but not of the state alone.
        for (const [index, all] of told.entries()) assert.notDeepEqual(all, told[index - 1])
        const steps = seen.filter((step, index) => step !== seen[index - 1])
        assert.deepStrictEqual(
          steps.slice(steps.indexOf("x running,y running")),
          ["x running,y running", "x running,y yielding", "x running,y waiting", "x running,y running"]
        )
      }).pipe(onMemory))

    it.effect("ends when the pool has shut down, after it has told that", () =>
      Effect.gen(function*() {
        const a = yield* start("a", { keys: ["x"] })
        yield* TestClock.adjust("5 seconds")
        const consuming = yield* Effect.forkChild(Stream.runCollect(a.pool.status))
        yield* TestClock.adjust("1 second")
        const closing = yield* Effect.forkChild(a.pool.shutdown)
        yield* TestClock.adjust("5 seconds")
        yield* Fiber.join(closing)
        for (const all of [yield* Fiber.join(consuming), yield* Stream.runCollect(a.pool.status)]) {
          assert.deepStrictEqual(all[all.length - 1].map(({ state }) => state), ["waiting"])
        }
      }).pipe(onMemory))
  })

  describe("options", () => {
    it.effect("that are not valid are refused, naming the field", () =>
      Effect.gen(function*() {
        const refused = (options: Partial<Pool.Options<Work.Work, void, never, never, never, never>>) =>
          Pool.make({ work: Work.make("w"), keys: [], run: () => Effect.void, ...options }).pipe(
            Effect.flip,
            Effect.map((error) => error.field)
          )
        assert.strictEqual(yield* refused({ capacity: 0 }), "capacity")
        assert.strictEqual(yield* refused({ capacity: 1.5 }), "capacity")
        assert.strictEqual(yield* refused({ interval: 0 }), "interval")
        assert.strictEqual(yield* refused({ handoffTimeout: "Infinity" }), "handoffTimeout")
        assert.strictEqual(yield* refused({ quarantineAfter: 0 }), "quarantineAfter")
        assert.strictEqual(yield* refused({ rerunAfter: -1 }), "rerunAfter")
        assert.strictEqual(yield* refused({ memberId: "" }), "memberId")
        assert.strictEqual(yield* refused({ name: "n".repeat(500) }), "name")
      }).pipe(Effect.scoped, Effect.provide(Lease.layer), onMemory))

    it.effect("a process is a member of a pool once at a time", () =>
      Effect.gen(function*() {
        const pool = Pool.make({ work: Work.make("w"), keys: [], run: () => Effect.void })
        yield* Effect.scoped(pool)
        const { shutdown } = yield* pool
        assert.strictEqual((yield* Effect.flip(pool)).field, "name")
        yield* shutdown
        yield* pool
        assert.strictEqual((yield* Effect.flip(pool)).field, "name")
      }).pipe(Effect.scoped, Effect.provide(Lease.layer), onMemory))

    it.effect("the work may read its lease, and what it needs, from where the pool was made", () =>
      Effect.gen(function*() {
        const seen = yield* Deferred.make<string>()
        yield* Pool.make({
          work: Work.make("w"),
          keys: ["x"],
          run: () => Effect.flatMap(Lease.CurrentLease, (lease) => Deferred.succeed(seen, lease.workId))
        })
        yield* TestClock.adjust("5 seconds")
        assert.strictEqual(yield* Deferred.await(seen), "w:x")
      }).pipe(Effect.scoped, Effect.provide(Lease.layer), onMemory))

    it.effect("each work has a scope of its own, which closes before its lease is released", () =>
      Effect.gen(function*() {
        const log: Array<string> = []
        const backend = yield* Backend.Backend
        const noting = Layer.succeed(
          Backend.Backend,
          Backend.Backend.of({
            ...backend,
            release: (requests) => Effect.andThen(Effect.sync(() => log.push("released")), backend.release(requests))
          })
        )
        yield* Effect.gen(function*() {
          yield* Pool.make({
            work: Work.make("w"),
            keys: ["x"],
            run: () => Effect.acquireRelease(Effect.void, () => Effect.sync(() => log.push("closed")))
          })
          yield* TestClock.adjust("5 seconds")
          assert.deepStrictEqual(log, ["closed", "released"])
        }).pipe(Effect.scoped, Effect.provide(Layer.provide(Lease.layer, noting)))
      }).pipe(onMemory))

    it.effect("pools of the same name share their members, and others do not, although their work is the same", () =>
      Effect.gen(function*() {
        const a = yield* start("a", { name: "shared", keys: ["x", "y"] })
        const b = yield* start("b", { name: "other", keys: ["x", "y"] })
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(loads(a, b), [2, 0])
        const c = yield* start("c", { name: "shared", keys: ["x", "y"] })
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(loads(a, b, c), [1, 0, 1])
      }).pipe(onMemory))
  })
})
