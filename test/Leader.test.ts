import { assert, describe, it } from "@effect/vitest"
import {
  Clock,
  Context,
  Deferred,
  Duration,
  Effect,
  Exit,
  Fiber,
  Layer,
  Logger,
  Option,
  Random,
  References,
  Schedule,
  Scope,
  Stream
} from "effect"
import { TestClock } from "effect/testing"
import { Backend, Leader, Lease, LeaseError } from "worklease"
import * as Memory from "worklease/layers/Memory"
import { TestBackend } from "worklease/testing"
import * as Intercepted from "./support/Intercepted.ts"

const process = (holderId: string) => Lease.layerWith({ holderId })
const processA = Effect.provide(process("a"))
const processB = Effect.provide(process("b"))

const onTestBackend = Effect.provide(TestBackend.layer)
const intercepted = Effect.provide(Layer.provideMerge(process("a"), Intercepted.layer))

/** What happened, in order. */
const journal = () => {
  const entries: Array<string> = []
  return {
    entries,
    of: (by: string) => entries.filter((entry) => entry.startsWith(by)),
    note: (entry: string) => Effect.sync(() => void entries.push(entry)),
    onEvent: (by: string) => (event: Leader.Event) =>
      Effect.sync(() => {
        const detail = event._tag === "Lost"
          ? ` ${event.reason._tag}`
          : event._tag === "Relinquished"
          ? ` ${event.why}`
          : ""
        entries.push(`${by}: ${event._tag}${detail}`)
      })
  }
}

/** A duty that leaves its marks, and never ends by itself. */
const duty = (by: string, { note }: { readonly note: (entry: string) => Effect.Effect<void> }) =>
  Effect.acquireUseRelease(note(`${by} begins`), () => Effect.never, () => note(`${by} ends`))

/** One process leads, and another one waits. Answers the fiber of the latter. */
const bothStand = Effect.fnUntraced(function*(log: ReturnType<typeof journal>) {
  yield* duty("a", log).pipe(Leader.forever("job"), processA, Effect.forkChild)
  yield* TestClock.adjust("1 millis")
  const b = yield* duty("b", log).pipe(Leader.forever("job"), processB, Effect.forkChild)
  yield* TestClock.adjust("1 second")
  return b
})

const unreachable: Effect.Effect<void, never, Intercepted.Intercepted> = Effect.flatMap(
  Intercepted.Intercepted,
  ({ intercept }) => intercept((_, { operation }) => Effect.fail(Intercepted.unreachable(operation, "rejected")))
)

class Reads extends Context.Service<Reads, { isOut: boolean; delay: Duration.Input }>()("test/Reads") {}

/** The memory backend, from which nobody can read who holds what as long as they are out. */
const severableReads = Layer.effectContext(
  Effect.map(Backend.Backend, (backend) => {
    const reads: Reads["Service"] = { isOut: false, delay: 0 }
    return Context.make(
      Backend.Backend,
      Backend.Backend.of({
        ...backend,
        inspect: (options) =>
          Effect.suspend(() =>
            reads.isOut
              ? Effect.fail(Intercepted.unreachable("inspect", "rejected"))
              : Effect.tap(backend.inspect(options), () => Effect.sleep(reads.delay))
          )
      })
    ).pipe(Context.add(Reads, reads))
  })
).pipe(Layer.provide(Memory.layer))

describe("Leader", () => {
  describe("elect", () => {
    it.effect("leads for one term, and answers with the effect's value", () =>
      Effect.gen(function*() {
        const log = journal()
        const token = yield* Effect.map(Lease.CurrentLease, (lease) => lease.token.fencingToken).pipe(
          Leader.elect("job", { onEvent: log.onEvent("a") })
        )
        assert.isTrue(token > 0n)
        assert.deepStrictEqual(log.entries, ["a: Elected", "a: Relinquished ended"])
        const { prior } = yield* Lease.acquire("job")
        assert.strictEqual(prior.exit, "finished")
      }).pipe(intercepted))

    it.effect("one of two leads; the other fails fast, is told who leads, and of nothing else", () =>
      Effect.gen(function*() {
        const log = journal()
        yield* duty("a", log).pipe(Leader.elect("job"), processA, Effect.forkChild)
        yield* TestClock.adjust("1 second")
        const error = yield* duty("b", log).pipe(
          Leader.elect("job", { onEvent: log.onEvent("b") }),
          processB,
          Effect.flip
        )
        assert(error._tag === "LeaseHeld")
        assert.strictEqual(error.holderId, "a")
        assert.deepStrictEqual(log.entries, ["a begins"])
      }).pipe(onTestBackend))

    it.effect("waits for its turn, and begins after the leader before it has ended", () =>
      Effect.gen(function*() {
        const log = journal()
        const a = yield* duty("a", log).pipe(Leader.elect("job"), processA, Effect.forkChild)
        yield* TestClock.adjust("1 second")
        const b = yield* log.note("b begins").pipe(Leader.elect("job", { wait: true }), processB, Effect.forkChild)
        yield* TestClock.adjust("1 minute")
        assert.isUndefined(b.pollUnsafe())
        yield* Fiber.interrupt(a)
        yield* TestClock.adjust("1 second")
        yield* Fiber.join(b)
        assert.deepStrictEqual(log.entries, ["a begins", "a ends", "b begins"])
      }).pipe(onTestBackend))

    it.effect("a loss interrupts the effect, and is told once, after that", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const log = journal()
        const a = yield* duty("a", log).pipe(
          Leader.elect("job", { onEvent: log.onEvent("a") }),
          processA,
          Effect.forkChild
        )
        yield* TestClock.adjust("1 second")
        yield* backend.sever("a")
        yield* TestClock.adjust("30 seconds")
        const error = yield* Effect.flip(Fiber.join(a))
        assert.strictEqual(error._tag, "LeaseLost")
        assert.deepStrictEqual(log.entries, ["a: Elected", "a begins", "a ends", "a: Lost WindowExhausted"])
      }).pipe(onTestBackend))

    it.effect("one whose acquire comes too late was never elected, and loses nothing", () =>
      Effect.gen(function*() {
        const { intercept } = yield* Intercepted.Intercepted
        const log = journal()
        // Answered, but later than the window lasts.
        yield* intercept((call, { operation }) =>
          operation === "acquire" ? Effect.tap(call, () => Effect.sleep("28 seconds")) : call
        )
        const fiber = yield* duty("a", log).pipe(
          Leader.elect("job", { onEvent: log.onEvent("a") }),
          Effect.flip,
          Effect.forkChild
        )
        yield* TestClock.adjust("1 minute")
        yield* Fiber.join(fiber)
        assert.deepStrictEqual(log.entries, [])
      }).pipe(intercepted))

    it.effect("a request to hand over interrupts the effect, which leaves as yielded, within one renewal", () =>
      Effect.gen(function*() {
        const log = journal()
        const a = yield* duty("a", log).pipe(
          Leader.elect("job", { onEvent: log.onEvent("a") }),
          processA,
          Effect.forkChild
        )
        yield* TestClock.adjust("1 second")
        assert.isTrue(yield* processB(Lease.requestYield("job")))
        yield* TestClock.adjust("10 seconds")
        const error = yield* Effect.flip(Fiber.join(a))
        assert.strictEqual(error._tag, "Yielded")
        assert.deepStrictEqual(log.entries, ["a: Elected", "a begins", "a ends", "a: Relinquished yielded"])
        const { prior } = yield* processB(Lease.acquire("job"))
        assert.deepStrictEqual([prior.exit, prior.termsWithoutProgress], ["yielded", 0])
      }).pipe(onTestBackend))

    it.effect("tells that it was interrupted, or failed, and the effect's error is what the caller sees", () =>
      Effect.gen(function*() {
        const log = journal()
        const error = yield* Effect.fail("my own").pipe(
          Leader.elect("job", { onEvent: log.onEvent("a") }),
          Effect.flip
        )
        assert.strictEqual(error, "my own")
        const fiber = yield* Effect.never.pipe(
          Leader.elect("job", { onEvent: log.onEvent("a") }),
          Effect.forkChild
        )
        yield* TestClock.adjust("1 second")
        yield* Fiber.interrupt(fiber)
        assert.deepStrictEqual(log.entries, [
          "a: Elected",
          "a: Relinquished failed",
          "a: Elected",
          "a: Relinquished interrupted"
        ])
      }).pipe(intercepted))

    it.effect("a notification that dies changes nothing", () =>
      Effect.gen(function*() {
        const value = yield* Effect.succeed(1).pipe(Leader.elect("job", { onEvent: () => Effect.die("mine") }))
        assert.strictEqual(value, 1)
        const throwing = yield* Effect.succeed(2).pipe(Leader.elect("job", {
          onEvent: () => {
            throw new Error("mine")
          }
        }))
        assert.strictEqual(throwing, 2)
      }).pipe(intercepted))
  })

  describe("forever", () => {
    it.effect("of two, the second takes over when the first crashes: within the ttl and 25 ms", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const log = journal()
        for (const [id, process] of [["a", processA], ["b", processB]] as const) {
          yield* duty(id, log).pipe(
            Leader.forever("job", { onEvent: log.onEvent(id) }),
            process,
            Effect.forkChild
          )
          yield* TestClock.adjust("5 seconds")
        }
        yield* TestClock.adjust("10 minutes")
        assert.deepStrictEqual(log.entries, ["a: Elected", "a begins"])
        yield* backend.sever("a")
        yield* TestClock.adjust("30025 millis")
        assert.deepStrictEqual(log.entries, [
          "a: Elected",
          "a begins",
          "a ends",
          "a: Lost WindowExhausted",
          "b: Elected",
          "b begins"
        ])
        // The first comes back, and waits behind the second.
        yield* backend.heal("a")
        yield* TestClock.adjust("10 minutes")
        assert.lengthOf(log.entries, 6)
      }).pipe(onTestBackend))

    it.effect("stands again after a loss", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const log = journal()
        yield* duty("a", log).pipe(Leader.forever("job"), processA, Effect.forkChild)
        yield* TestClock.adjust("1 second")
        yield* backend.sever("a")
        yield* TestClock.adjust("1 minute")
        yield* backend.heal("a")
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(log.entries, ["a begins", "a ends", "a begins"])
      }).pipe(onTestBackend))

    it.effect("does not spin while the backend is out of reach, and stands again once it is there", () =>
      Effect.gen(function*() {
        const { log, restore } = yield* Intercepted.Intercepted
        const { entries, note } = journal()
        yield* unreachable
        yield* duty("a", { note }).pipe(Leader.forever("job"), Effect.forkChild)
        yield* TestClock.adjust("1 hour")
        // At once, then after 1, 2, 4, 8, 16 seconds, and every 30 seconds.
        assert.isAtLeast(log.length, 90)
        assert.isAtMost(log.length, 160)
        yield* restore
        yield* TestClock.adjust("36 seconds")
        assert.deepStrictEqual(entries, ["a begins"])
      }).pipe(intercepted))

    for (
      const [what, retrySchedule, attempts] of [
        ["has no pauses", Schedule.forever, 601],
        ["is over at once", Schedule.recurs(0), 3]
      ] as const
    ) {
      it.effect(`does not spin with a schedule that ${what}`, () =>
        Effect.gen(function*() {
          const { log } = yield* Intercepted.Intercepted
          yield* unreachable
          yield* Effect.never.pipe(Leader.forever("job", { retrySchedule }), Effect.forkChild)
          yield* TestClock.adjust("1 minute")
          assert.lengthOf(log, attempts)
        }).pipe(intercepted))
    }

    it.effect("does not spin while the work ID is quarantined, and leads again once that is lifted", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        const { entries, note } = journal()
        yield* Effect.andThen(note("begins"), Effect.fail("poisoned")).pipe(
          Leader.forever("job", { quarantineAfter: 2, giveUpAfter: { failures: 1 } }),
          Effect.forkChild
        )
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(entries, ["begins", "begins"])
        const before = log.length
        yield* TestClock.adjust("1 hour")
        assert.isAtLeast(log.length - before, 90)
        assert.isAtMost(log.length - before, 160)
        assert.lengthOf(entries, 2)
        const error = yield* Effect.flip(Leader.elect(Effect.void, "job", { quarantineAfter: 2 }))
        assert.strictEqual(error._tag, "Quarantined")

        assert.isTrue(yield* Lease.lift("job"))
        // Once at least, and not more often than it takes to be quarantined again.
        yield* TestClock.adjust("36 seconds")
        assert.isAtLeast(entries.length, 3)
        assert.isAtMost(entries.length, 4)
      }).pipe(intercepted))

    it.effect("does not spin with a duty that succeeds at once", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        yield* Effect.void.pipe(Leader.forever("job"), Effect.forkChild)
        yield* TestClock.adjust("1 hour")
        assert.isAtLeast(log.length, 180)
        assert.isAtMost(log.length, 320)
      }).pipe(intercepted))

    it.effect("a leader whose duty keeps failing gives up, and another one tries", () =>
      Effect.gen(function*() {
        const log = journal()
        yield* Effect.andThen(log.note("a runs"), Effect.fail("broken")).pipe(
          Leader.forever("job", { onEvent: log.onEvent("a") }),
          processA,
          Effect.forkChild
        )
        yield* TestClock.adjust("1 millis")
        yield* duty("b", log).pipe(Leader.forever("job", { onEvent: log.onEvent("b") }), processB, Effect.forkChild)
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(log.of("a"), ["a: Elected", "a runs", "a runs", "a runs", "a: Relinquished failed"])
        assert.deepStrictEqual(log.of("b"), ["b: Elected", "b begins"])
      }).pipe(onTestBackend))

    it.effect("a defect, and a duty that interrupts itself, are failures too", () =>
      Effect.gen(function*() {
        for (const failure of [Effect.die("broken"), Effect.interrupt]) {
          let runs = 0
          const fiber = yield* Effect.suspend(() => {
            runs++
            return failure
          }).pipe(
            Leader.forever("job", { giveUpAfter: { failures: 1 } }),
            Effect.forkChild
          )
          yield* TestClock.adjust("20 seconds")
          assert.isUndefined(fiber.pollUnsafe())
          assert.isAtLeast(runs, 2)
          assert.isAtMost(runs, 5)
          yield* Fiber.interrupt(fiber)
        }
      }).pipe(intercepted))

    it.effect("failures that lie apart are not in a row", () =>
      Effect.gen(function*() {
        const log = journal()
        let failures = 0
        yield* Effect.sleep("61 seconds").pipe(
          Effect.andThen(Effect.suspend(() => Effect.fail(failures++))),
          Leader.forever("job", { onEvent: log.onEvent("a") }),
          Effect.forkChild
        )
        yield* TestClock.adjust("1 hour")
        assert.deepStrictEqual(log.entries, ["a: Elected"])
        assert.isAbove(failures, 50)
      }).pipe(intercepted))

    it.effect("nor are those with progress between them", () =>
      Effect.gen(function*() {
        const log = journal()
        let failures = 0
        yield* Leader.progress.pipe(
          Effect.andThen(Effect.suspend(() => Effect.fail(failures++))),
          Leader.forever("job", { onEvent: log.onEvent("a") }),
          Effect.forkChild
        )
        yield* TestClock.adjust("10 minutes")
        assert.deepStrictEqual(log.entries, ["a: Elected"])
        assert.isAbove(failures, 10)
      }).pipe(intercepted))

    it.effect("a leader that makes no progress for the configured time gives up, and another one tries", () =>
      Effect.gen(function*() {
        const log = journal()
        const stuck = Effect.andThen(
          Effect.repeat(Effect.andThen(Effect.sleep("10 seconds"), Leader.progress), { times: 11 }),
          duty("a", log)
        )
        yield* stuck.pipe(
          Leader.forever("job", { giveUpAfter: { stalledFor: "30 seconds" }, onEvent: log.onEvent("a") }),
          processA,
          Effect.forkChild
        )
        yield* TestClock.adjust("1 millis")
        yield* duty("b", log).pipe(Leader.forever("job"), processB, Effect.forkChild)
        // Its last progress was at 2 minutes.
        yield* TestClock.adjust("149998 millis")
        assert.deepStrictEqual(log.entries, ["a: Elected", "a begins"])
        yield* TestClock.adjust("1 millis")
        assert.deepStrictEqual(log.of("a"), ["a: Elected", "a begins", "a ends", "a: Relinquished stalled"])
        assert.deepStrictEqual(log.of("b"), ["b begins"])
        assert.isBelow(log.entries.indexOf("a ends"), log.entries.indexOf("b begins"))
        const record = yield* processB(Lease.holder("job"))
        assert.strictEqual(Option.getOrThrow(record).holderId, "b")
      }).pipe(onTestBackend))

    it.effect("a leader that is asked to hand over stands aside, and stands again", () =>
      Effect.gen(function*() {
        const log = journal()
        const b = yield* bothStand(log)
        yield* processB(Lease.requestYield("job"))
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(log.entries, ["a begins", "a ends", "b begins"])
        yield* Fiber.interrupt(b)
        yield* TestClock.adjust("1 second")
        assert.deepStrictEqual(log.entries, ["a begins", "a ends", "b begins", "b ends", "a begins"])
      }).pipe(onTestBackend))

    it.effect("stands aside for five seconds, also if nobody else stands", () =>
      Effect.gen(function*() {
        const log = journal()
        yield* duty("a", log).pipe(Leader.forever("job"), Effect.forkChild)
        yield* TestClock.adjust("1 second")
        yield* Lease.requestYield("job")
        yield* TestClock.adjust("4999 millis")
        assert.deepStrictEqual(log.entries, ["a begins", "a ends"])
        yield* TestClock.adjust("1 millis")
        assert.deepStrictEqual(log.entries, ["a begins", "a ends", "a begins"])
      }).pipe(intercepted))

    it.effect("a handoff does not wedge when the leader dies before it has heard of it", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const log = journal()
        yield* bothStand(log)
        yield* processB(Lease.requestYield("job", { deadline: "5 seconds" }))
        yield* backend.sever("a")
        yield* TestClock.adjust("30025 millis")
        assert.deepStrictEqual(log.entries, ["a begins", "a ends", "b begins"])
      }).pipe(onTestBackend))

    it.effect("nor when the one that it was handed to dies as soon as it leads", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const log = journal()
        yield* bothStand(log)
        yield* processB(Lease.requestYield("job"))
        yield* TestClock.adjust("10 seconds")
        assert.deepStrictEqual(log.entries, ["a begins", "a ends", "b begins"])
        yield* backend.sever("b")
        yield* TestClock.adjust("30025 millis")
        assert.deepStrictEqual(log.entries, ["a begins", "a ends", "b begins", "b ends", "a begins"])
      }).pipe(onTestBackend))

    it.effect("what the duty logs is its own", () =>
      Effect.gen(function*() {
        const logged: Array<unknown> = []
        const logger = Logger.make<unknown, void>(({ fiber }) => {
          logged.push(fiber.getRef(References.CurrentLogAnnotations))
        })
        yield* Effect.andThen(Effect.log("mine"), Effect.never).pipe(
          Leader.forever("job"),
          Effect.provide(Logger.layer([logger])),
          Effect.forkChild
        )
        yield* TestClock.adjust("1 second")
        assert.deepStrictEqual(logged, [{}])
      }).pipe(intercepted))

    it.effect("while it cannot stand it says so once, why, and without a stack; and that it leads after all", () =>
      Effect.gen(function*() {
        const { intercept, restore } = yield* Intercepted.Intercepted
        const logged: Array<string> = []
        const logger = Logger.make<unknown, void>(({ cause, logLevel, message }) => {
          if (logLevel !== "Debug") logged.push(`${logLevel}: ${message} ${cause.reasons.length}`)
        })
        yield* intercept(() => Effect.fail(Intercepted.unreachable("acquire", "rejected")))
        const { entries, note } = journal()
        yield* Effect.andThen(note("begins"), Effect.never).pipe(
          Leader.forever("job"),
          Effect.provide(Logger.layer([logger])),
          Effect.forkChild
        )
        yield* TestClock.adjust("1 hour")
        assert.lengthOf(logged, 1)
        assert.match(logged[0], /^Warn: Could not stand for the leadership of "job", .*cannot be reached.* 0$/s)
        assert.notMatch(logged[0], /\n +at /)
        yield* restore
        yield* TestClock.adjust("36 seconds")
        assert.deepStrictEqual(entries, ["begins"])
        assert.deepStrictEqual(logged.slice(1), [`Info: Leads after all: "job" 0`])
      }).pipe(intercepted))

    it.effect("the leadership is kept until the duty's finalizers have ended, and nobody leads meanwhile", () =>
      Effect.gen(function*() {
        const log = journal()
        yield* Effect.acquireUseRelease(
          log.note("a begins"),
          () => Effect.never,
          () => Effect.andThen(Effect.sleep("5 minutes"), log.note("a ends"))
        ).pipe(Leader.forever("job"), processA, Effect.forkChild)
        yield* TestClock.adjust("1 millis")
        yield* duty("b", log).pipe(Leader.forever("job"), processB, Effect.forkChild)
        yield* TestClock.adjust("1 second")
        yield* processB(Lease.requestYield("job"))
        yield* TestClock.adjust("299 seconds")
        assert.deepStrictEqual(log.entries, ["a begins"])
        yield* TestClock.adjust("20 seconds")
        assert.deepStrictEqual(log.entries, ["a begins", "a ends", "b begins"])
      }).pipe(onTestBackend))

    it.effect("of 200 candidates one leads, and when it leaves, one other", () =>
      Effect.gen(function*() {
        const leaders: Array<string> = []
        const fibers = new Map<string, Fiber.Fiber<never, unknown>>()
        for (let i = 0; i < 200; i++) {
          const id = String(i)
          fibers.set(
            id,
            yield* Effect.acquireUseRelease(
              Effect.sync(() => leaders.push(id)),
              () => Effect.never,
              () => Effect.sync(() => void leaders.splice(leaders.indexOf(id), 1))
            ).pipe(Leader.forever("job"), Effect.provide(process(id)), Effect.forkChild)
          )
        }
        yield* TestClock.adjust("1 second")
        for (let i = 0; i < 5; i++) {
          assert.lengthOf(leaders, 1)
          const [leader] = leaders
          yield* Fiber.interrupt(fibers.get(leader)!)
          yield* TestClock.adjust("25 millis")
          assert.notStrictEqual(leaders[0], leader)
        }
        assert.lengthOf(leaders, 1)
      }).pipe(onTestBackend))

    it.effect("an invalid work ID ends it, before anything is sent; the duty's own InvalidWorkId does not", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        const error = yield* Effect.flip(Leader.forever(Effect.never, ""))
        assert.strictEqual(error._tag, "InvalidWorkId")
        assert.lengthOf(log, 0)
        const fiber = yield* Lease.acquire("").pipe(Leader.forever("job"), Effect.forkChild)
        yield* TestClock.adjust("1 minute")
        assert.isUndefined(fiber.pollUnsafe())
      }).pipe(intercepted))

    it.effect("interrupted, it has ended its duty and released the leadership", () =>
      Effect.gen(function*() {
        const log = journal()
        const fiber = yield* duty("a", log).pipe(
          Leader.forever("job", { onEvent: log.onEvent("a") }),
          Effect.forkChild
        )
        yield* TestClock.adjust("1 second")
        yield* Fiber.interrupt(fiber)
        assert.deepStrictEqual(log.entries, ["a: Elected", "a begins", "a ends", "a: Relinquished interrupted"])
        const { prior } = yield* Lease.acquire("job")
        assert.deepStrictEqual([prior.exit, prior.termsWithoutProgress], ["abandoned", 0])
      }).pipe(intercepted))

    it.effect("interrupted while it waits, it ends without a word", () =>
      Effect.gen(function*() {
        const log = journal()
        yield* Effect.never.pipe(Leader.elect("job"), processA, Effect.forkChild)
        yield* TestClock.adjust("1 second")
        const b = yield* duty("b", log).pipe(
          Leader.forever("job", { onEvent: log.onEvent("b") }),
          processB,
          Effect.forkChild
        )
        yield* TestClock.adjust("1 minute")
        yield* Fiber.interrupt(b)
        assert.deepStrictEqual(log.entries, [])
      }).pipe(onTestBackend))

    it.effect(
      "a thousand kills: somebody leads again within the ttl and 25 ms, and never two at once",
      () =>
        Effect.gen(function*() {
          const backend = yield* TestBackend.TestBackend
          const leaders: Array<string> = []
          let overlaps = 0
          const stand = (id: string) =>
            Effect.acquireUseRelease(
              Effect.sync(() => {
                if (leaders.length > 0) overlaps++
                leaders.push(id)
              }),
              () => Effect.never,
              () => Effect.sync(() => void leaders.splice(leaders.indexOf(id), 1))
            ).pipe(Leader.forever("job"), Effect.provide(process(id)), Effect.forkChild)
          const fibers = new Map<string, Fiber.Fiber<never, unknown>>()
          for (const id of ["0", "1"]) fibers.set(id, yield* stand(id))
          yield* TestClock.adjust("1 second")
          for (let kill = 0; kill < 1000; kill++) {
            const [leader] = leaders
            yield* backend.sever(leader)
            fibers.set(String(kill + 2), yield* stand(String(kill + 2)))
            yield* TestClock.adjust("30025 millis")
            assert.lengthOf(leaders, 1)
            assert.notStrictEqual(leaders[0], leader)
            // Its process is gone.
            yield* Fiber.interrupt(fibers.get(leader)!)
          }
          assert.strictEqual(overlaps, 0)
        }).pipe(Effect.scoped, onTestBackend),
      60_000
    )
  })

  describe("layer", () => {
    class Service extends Context.Service<Service, string>()("test/Service") {}

    const started = (by: string, { note }: { readonly note: (entry: string) => Effect.Effect<void> }) =>
      Layer.effect(
        Service,
        Effect.acquireRelease(Effect.as(note(`${by} is built`), by), () => note(`${by} is torn down`))
      )

    it.effect("is built when elected, torn down on loss, and built anew when elected again", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const log = journal()
        const scope = yield* Scope.make()
        yield* Layer.buildWithScope(
          started("a", log).pipe(Leader.layer("job"), Layer.provide(process("a"))),
          scope
        )
        yield* TestClock.adjust("1 second")
        assert.deepStrictEqual(log.entries, ["a is built"])
        yield* backend.sever("a")
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(log.entries, ["a is built", "a is torn down"])
        yield* backend.heal("a")
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(log.entries, ["a is built", "a is torn down", "a is built"])
        yield* Scope.close(scope, Exit.void)
        assert.deepStrictEqual(log.entries, ["a is built", "a is torn down", "a is built", "a is torn down"])
        // It has released the leadership.
        assert.isTrue(Option.isNone(yield* processB(Lease.holder("job"))))
      }).pipe(onTestBackend))

    it.effect("of two processes, one has it; it does not keep the other from starting", () =>
      Effect.gen(function*() {
        const log = journal()
        const scopes: Array<Scope.Closeable> = []
        for (const id of ["a", "b"]) {
          const scope = yield* Scope.make()
          scopes.push(scope)
          yield* Layer.buildWithScope(
            started(id, log).pipe(Leader.layer("job"), Layer.provide(process(id))),
            scope
          )
          yield* TestClock.adjust("1 second")
        }
        assert.deepStrictEqual(log.entries, ["a is built"])
        yield* Scope.close(scopes[0], Exit.void)
        yield* TestClock.adjust("1 second")
        assert.deepStrictEqual(log.entries, ["a is built", "a is torn down", "b is built"])
        yield* Scope.close(scopes[1], Exit.void)
      }).pipe(onTestBackend))

    it.effect("a layer that is built elsewhere, too, is torn down with the leadership all the same", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        const log = journal()
        const shared = started("it", log)
        yield* Layer.build(
          Layer.merge(shared, Leader.layer(shared, "job").pipe(Layer.provide(process("a"))))
        )
        yield* TestClock.adjust("1 second")
        assert.deepStrictEqual(log.entries, ["it is built", "it is built"])
        yield* backend.sever("a")
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(log.entries, ["it is built", "it is built", "it is torn down"])
      }).pipe(Effect.scoped, onTestBackend))

    it.effect("one that cannot be built is given up, and another process tries", () =>
      Effect.gen(function*() {
        const log = journal()
        yield* Layer.build(
          Layer.effectDiscard(Effect.andThen(log.note("a fails"), Effect.fail("broken"))).pipe(
            Leader.layer("job"),
            Layer.provide(process("a"))
          )
        )
        yield* TestClock.adjust("1 millis")
        yield* Layer.build(started("b", log).pipe(Leader.layer("job"), Layer.provide(process("b"))))
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(log.entries, ["a fails", "a fails", "a fails", "b is built"])
      }).pipe(Effect.scoped, onTestBackend))

    it.effect("an invalid work ID is the layer's failure", () =>
      Effect.gen(function*() {
        const error = yield* Effect.flip(Layer.build(Leader.layer(Layer.empty, "\0")))
        assert.strictEqual(error._tag, "InvalidWorkId")
      }).pipe(Effect.scoped, intercepted))

    it.effect("what it starts may tell of progress", () =>
      Effect.gen(function*() {
        const log = journal()
        yield* Layer.build(
          Layer.effectDiscard(
            Effect.forkScoped(Effect.repeat(Effect.andThen(Effect.sleep("10 seconds"), Leader.progress), { times: 5 }))
          ).pipe(Leader.layer("job", { giveUpAfter: { stalledFor: "15 seconds" }, onEvent: log.onEvent("a") }))
        )
        yield* TestClock.adjust("74 seconds")
        assert.deepStrictEqual(log.entries, ["a: Elected"])
        yield* TestClock.adjust("1 second")
        assert.deepStrictEqual(log.entries, ["a: Elected", "a: Relinquished stalled"])
      }).pipe(Effect.scoped, intercepted))
  })

  describe("observe", () => {
    /** What an observer that does not stand is told, in order. */
    const observer = Effect.gen(function*() {
      const seen: Array<string> = []
      const all: Array<Option.Option<Leader.Leader>> = []
      yield* Leader.observe("job").pipe(
        Stream.runForEach((leader) =>
          Effect.sync(() => {
            all.push(leader)
            seen.push(Option.match(leader, { onNone: () => "nobody", onSome: ({ holderId }) => holderId }))
          })
        ),
        Effect.provide(process("observer")),
        Effect.forkScoped
      )
      return { seen, all }
    })

    it.effect("tells who leads, under which token and since when, and of each change", () =>
      Effect.gen(function*() {
        const { all, seen } = yield* observer
        yield* TestClock.adjust("1 second")
        assert.deepStrictEqual(seen, ["nobody"])
        yield* TestClock.adjust("1 second")
        const token = yield* Deferred.make<bigint>()
        const a = yield* Effect.flatMap(Lease.CurrentLease, (lease) =>
          Effect.andThen(Deferred.succeed(token, lease.token.fencingToken), Effect.never)).pipe(
            Leader.elect("job"),
            processA,
            Effect.forkChild
          )
        const fencingToken = yield* Deferred.await(token)
        yield* TestClock.adjust("10 minutes")
        assert.deepStrictEqual(seen, ["nobody", "a"])
        assert.deepStrictEqual(all[1], Option.some({ holderId: "a", fencingToken, since: 2000 }))
        yield* Fiber.interrupt(a)
        yield* TestClock.adjust("1 second")
        assert.deepStrictEqual(seen, ["nobody", "a", "nobody"])
        yield* Effect.never.pipe(Leader.elect("job"), processB, Effect.forkChild)
        yield* TestClock.adjust("1 second")
        assert.deepStrictEqual(seen, ["nobody", "a", "nobody", "b"])
      }).pipe(Effect.scoped, onTestBackend))

    it.effect("takes no part: nothing is stored, and nobody is kept from leading", () =>
      Effect.gen(function*() {
        const { log } = yield* Intercepted.Intercepted
        // The only one that is stored begins with the name of the one that is observed.
        yield* Effect.never.pipe(Leader.elect("job:2"), processB, Effect.forkChild)
        yield* TestClock.adjust("1 second")
        const { seen } = yield* observer
        const acquires = () => log.filter(({ operation }) => operation === "acquire").length
        yield* TestClock.adjust("1 minute")
        assert.strictEqual(acquires(), 1)
        yield* Leader.elect(Effect.void, "job")
        yield* TestClock.adjust("1 minute")
        assert.strictEqual(acquires(), 2)
        assert.deepStrictEqual(seen, ["nobody"])
        assert.strictEqual((yield* Lease.acquire("job")).prior.exit, "finished")
      }).pipe(Effect.scoped, intercepted))

    it.effect("a leader that crashed is reported up to its expiry, and not a millisecond longer", () =>
      Effect.gen(function*() {
        const backend = yield* TestBackend.TestBackend
        yield* Effect.never.pipe(Leader.elect("job"), processA, Effect.forkChild)
        yield* TestClock.adjust("1 second")
        const { seen } = yield* observer
        yield* TestClock.adjust("2500 millis")
        yield* backend.sever("a")
        yield* TestClock.adjust("26499 millis")
        assert.deepStrictEqual(seen, ["a"])
        yield* TestClock.adjust("1 millis")
        assert.deepStrictEqual(seen, ["a", "nobody"])
      }).pipe(Effect.scoped, onTestBackend))

    it.effect("so it is when nothing can be read any more, although the leader goes on", () =>
      Effect.gen(function*() {
        const reads = yield* Reads
        yield* Effect.never.pipe(Leader.elect("job"), processA, Effect.forkChild)
        yield* TestClock.adjust("1 second")
        const { seen } = yield* observer
        // The last renewal that the observer has read of was sent at 10 s.
        yield* TestClock.adjust("18 seconds")
        reads.isOut = true
        yield* TestClock.adjust("20999 millis")
        assert.deepStrictEqual(seen, ["a"])
        yield* TestClock.adjust("1 millis")
        assert.deepStrictEqual(seen, ["a", "nobody"])
        reads.isOut = false
        yield* TestClock.adjust("30 seconds")
        assert.deepStrictEqual(seen, ["a", "nobody", "a"])
      }).pipe(Effect.scoped, Effect.provide(severableReads)))

    it.effect("an answer that takes long counts from before it was asked for", () =>
      Effect.gen(function*() {
        const reads = yield* Reads
        yield* Effect.never.pipe(Leader.elect("job"), processA, Effect.forkChild)
        yield* TestClock.adjust("1 millis")
        reads.delay = "4 seconds"
        const { seen } = yield* observer
        yield* TestClock.adjust("8 seconds")
        reads.isOut = true
        yield* TestClock.adjust("21998 millis")
        assert.deepStrictEqual(seen, ["a"])
        yield* TestClock.adjust("1 millis")
        assert.deepStrictEqual(seen, ["a", "nobody"])
      }).pipe(Effect.scoped, Effect.provide(severableReads)))

    it.effect("a backend that is out of reach at first is no end", () =>
      Effect.gen(function*() {
        const reads = yield* Reads
        reads.isOut = true
        yield* Effect.never.pipe(Leader.elect("job"), processA, Effect.forkChild)
        const { seen } = yield* observer
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual(seen, ["nobody"])
        reads.isOut = false
        yield* TestClock.adjust("30 seconds")
        assert.deepStrictEqual(seen, ["nobody", "a"])
      }).pipe(Effect.scoped, Effect.provide(severableReads)))

    it.effect("a backend that refuses to answer is its failure", () =>
      Effect.gen(function*() {
        const refusing = Layer.effect(
          Backend.Backend,
          Effect.map(Backend.Backend, (backend): Backend.Backend["Service"] => ({
            ...backend,
            inspect: () =>
              Effect.fail(
                new LeaseError.BackendError({
                  operation: "inspect",
                  outcome: "rejected",
                  reason: new LeaseError.PermissionDenied({})
                })
              )
          }))
        ).pipe(Layer.provide(Memory.layer))
        const error = yield* Stream.runDrain(Leader.observe("job")).pipe(
          Effect.provide(Layer.provide(process("observer"), refusing)),
          Effect.flip
        )
        assert(error._tag === "BackendError")
        assert.strictEqual(error.reason._tag, "PermissionDenied")
      }))

    it.effect("an invalid work ID is its failure", () =>
      Effect.gen(function*() {
        const error = yield* Effect.flip(Stream.runDrain(Leader.observe("")))
        assert.strictEqual(error._tag, "InvalidWorkId")
      }).pipe(intercepted))
  })

  describe("health", () => {
    it.effect("a process that does not lead is healthy, whatever the backend does", () =>
      Effect.gen(function*() {
        yield* unreachable
        yield* Effect.never.pipe(Leader.forever("job"), Effect.forkChild)
        yield* TestClock.adjust("1 hour")
        assert.deepStrictEqual(yield* Leader.health("job"), {
          healthy: true,
          leading: false,
          renewedAgo: Option.none()
        })
      }).pipe(intercepted))

    it.effect("a leader is healthy while its renewals get through", () =>
      Effect.gen(function*() {
        const fiber = yield* Effect.never.pipe(Leader.elect("job"), Effect.forkChild)
        for (let minute = 0; minute < 10; minute++) {
          yield* TestClock.adjust("1 minute")
          const { healthy, leading, renewedAgo } = yield* Leader.health("job", { maxAge: "11 seconds" })
          assert.deepStrictEqual([healthy, leading], [true, true])
          assert.isAtMost(Duration.toMillis(Option.getOrThrow(renewedAgo)), 10_000)
        }
        yield* Fiber.interrupt(fiber)
        assert.isFalse((yield* Leader.health("job")).leading)
      }).pipe(intercepted))

    it.effect("one whose last renewal is older than it may be is not", () =>
      Effect.gen(function*() {
        yield* Effect.never.pipe(Leader.elect("job"), Effect.forkChild)
        yield* TestClock.adjust("1 second")
        yield* unreachable
        yield* TestClock.adjust("14 seconds")
        assert.isTrue((yield* Leader.health("job", { maxAge: "16 seconds" })).healthy)
        yield* TestClock.adjust("1 second")
        assert.isFalse((yield* Leader.health("job", { maxAge: "16 seconds" })).healthy)
        assert.isTrue((yield* Leader.health("job")).healthy)
      }).pipe(intercepted))

    it.effect("a duty that does not end after its leadership was lost stays unhealthy until it does", () =>
      Effect.gen(function*() {
        const latch = yield* Deferred.make<void>()
        const fiber = yield* Effect.uninterruptible(Deferred.await(latch)).pipe(Leader.elect("job"), Effect.forkChild)
        yield* TestClock.adjust("1 second")
        yield* unreachable
        yield* TestClock.adjust("1 minute")
        assert.deepStrictEqual([(yield* Leader.health("job")).healthy, (yield* Leader.health("job")).leading], [
          false,
          true
        ])
        yield* Deferred.succeed(latch, undefined)
        yield* TestClock.adjust("1 minute")
        yield* Effect.exit(Fiber.join(fiber))
        assert.isTrue((yield* Leader.health("job")).healthy)
      }).pipe(intercepted))
  })

  for (const seed of [1, 2, 3, 4, 5]) {
    it.effect(`whatever happens, no end without an election, and nobody is seen who has expired (seed ${seed})`, () =>
      Effect.gen(function*() {
        const faults = yield* TestBackend.TestBackend
        const backend = yield* Backend.Backend
        const log = journal()
        const ids = ["a", "b", "c"]
        for (const id of ids) {
          yield* duty(id, log).pipe(
            Leader.forever("job", { onEvent: log.onEvent(id) }),
            Effect.provide(process(id)),
            Effect.forkScoped
          )
        }
        // Since when the observer cannot read.
        let outSince: number | undefined
        let seen = "nobody"
        // How often somebody was seen, and how often nobody could be.
        let [somebody, nobody] = [0, 0]
        yield* Leader.observe("job").pipe(
          Stream.runForEach((leader) =>
            Effect.sync(() => {
              seen = Option.match(leader, { onNone: () => "nobody", onSome: ({ holderId }) => holderId })
            })
          ),
          Effect.provide(Layer.provide(
            process("observer"),
            Layer.succeed(Backend.Backend, {
              ...backend,
              inspect: (options) =>
                Effect.suspend(() =>
                  outSince === undefined
                    ? backend.inspect(options)
                    : Effect.fail(Intercepted.unreachable("inspect", "rejected"))
                )
            })
          )),
          Effect.forkScoped
        )
        for (let step = 0; step < 200; step++) {
          const id = ids[yield* Random.nextBetween(0, ids.length).pipe(Effect.map(Math.floor))]
          const what = yield* Random.next
          if (what < 0.3) yield* faults.sever(id)
          else if (what < 0.7) yield* faults.heal(id)
          else if (what < 0.8) yield* Effect.provide(Lease.requestYield("job"), process("operator"))
          else if (what < 0.9) outSince = outSince === undefined ? yield* Clock.currentTimeMillis : undefined
          yield* TestClock.adjust(yield* Random.nextBetween(1, 20_000))
          const [record] = yield* backend.list({ prefix: "job", after: Option.none(), limit: 1 })
          const term = Option.getOrUndefined(record.term)
          const outFor = outSince === undefined ? 0 : (yield* Clock.currentTimeMillis) - outSince
          if (seen !== "nobody") somebody++
          if (term?.status === "expired" || outFor >= 30_000) {
            nobody++
            assert.strictEqual(seen, "nobody")
          }
        }
        assert.isAbove(somebody, 10)
        assert.isAbove(nobody, 10)
        const elections = log.entries.filter((entry) => entry.endsWith("Elected")).length
        assert.isAbove(elections, 10)
        for (const id of ids) {
          const marks = log.of(id).map((entry) => entry.replace(/^.:? /, "").split(" ")[0])
          assert.match(
            marks.join(" "),
            /^(Elected begins ends (Lost|Relinquished) ?)*(Elected begins)?$/
          )
        }
        // One ends before the next one begins.
        const duties = log.entries.filter((entry) => /begins|ends/.test(entry)).map((entry) => entry.split(" ")[1])
        assert.match(duties.join(" "), /^(begins ends ?)*(begins)?$/)
      }).pipe(Random.withSeed(seed), Effect.scoped, onTestBackend))
  }

  it.effect("progress outside of a duty does nothing", () => Leader.progress)
})
