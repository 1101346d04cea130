/**
 * The contract of a backend, second part: through the leases over it, as an
 * application does.
 */

import { assert } from "@effect/vitest"
import * as Cause from "effect/Cause"
import * as Data from "effect/Data"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Schema from "effect/Schema"
import type * as Scope from "effect/Scope"
import * as TestClock from "effect/testing/TestClock"
import * as Backend from "../../Backend.ts"
import * as Checkpoint from "../../Checkpoint.ts"
import * as Lease from "../../Lease.ts"
import * as Renewal from "../../Renewal.ts"
import * as Work from "../../Work.ts"
import * as Worker from "../../Worker.ts"
import { left, told, unchanged } from "./expectations.ts"
import {
  acquire,
  answers,
  bytesOf,
  forget,
  freshId,
  type Inspected,
  record,
  release,
  take,
  textOf
} from "./operations.ts"
import { assertNear, eventually, isOver, meanwhile, pass, passRenewal, passTtls, type Rules, Store } from "./rules.ts"

const Progress = Work.make("contract", Checkpoint.make(Schema.Struct({ at: Schema.Int })))

type Progress = Work.State<typeof Progress>

class Boom extends Data.TaggedError("Boom") {}

export const acquires = ({ rule }: Rules) => {
  rule("gives a token, and the prior", function*() {
    const a = yield* processOf("a")
    const b = yield* processOf("b")
    const id = yield* freshWork
    const first = yield* a(Lease.acquire(id))
    assert.strictEqual(first.token.workId, id.value)
    assert.strictEqual(first.token.holderId, "a")
    assert.deepStrictEqual(first.prior, {
      state: Option.none(),
      exit: "none",
      holderId: Option.none(),
      fencingToken: Option.none(),
      termsWithoutProgress: 0
    })
    yield* a(Lease.release(first.token, "yielded", { at: 1 }))
    const second = yield* b(Lease.acquire(id))
    assert.isTrue(second.token.fencingToken > first.token.fencingToken)
    assert.deepStrictEqual(second.prior, {
      state: Option.some({ at: 1 }),
      exit: "yielded",
      holderId: Option.some("a"),
      fencingToken: Option.some(first.token.fencingToken),
      termsWithoutProgress: 0
    })
  })

  rule("fails with LeaseHeld while somebody holds the lease, also oneself", function*() {
    const { ttl } = yield* Store
    const a = yield* processOf("a")
    const b = yield* processOf("b")
    const id = yield* freshWork
    yield* a(Lease.acquire(id))
    for (const process of [a, b]) {
      const error = yield* Effect.flip(process(Lease.acquire(id)))
      assert.strictEqual(error._tag, "LeaseHeld")
      if (error._tag !== "LeaseHeld") return
      assert.strictEqual(error.holderId, "a")
      yield* assertNear(error.retryAfter, ttl)
    }
  })

  rule("takes a lease over when it has expired", function*() {
    const a = yield* processOf("a")
    const b = yield* processOf("b")
    const id = yield* freshWork
    const { token } = yield* a(Lease.acquire(id))
    yield* a(Lease.checkpoint(token, { at: 1 }))
    yield* passTtls(1)
    const { prior } = yield* b(Lease.acquire(id))
    assert.strictEqual(prior.exit, "expired")
    assert.deepStrictEqual(prior.state, Option.some({ at: 1 }))
  })

  // Whose acquire, while it is on its way, does not time out by the clock that the test moves.
  const patient = { wait: true, policy: Renewal.makeUnsafe({ ttl: "10 days" }) } as const

  rule("that waits gets the lease when it is released", function*() {
    const a = yield* processOf("a")
    const b = yield* processOf("b")
    const id = yield* freshWork
    const { token } = yield* a(Lease.acquire(id))
    const waiting = yield* Effect.forkScoped(b(Lease.acquire(id, patient)))
    yield* passTtls(0.5)
    assert.isFalse(isOver(waiting))
    yield* a(Lease.release(token, "yielded"))
    yield* meanwhile(waiting, TestClock.adjust("1 seconds"))
    const { prior } = yield* Fiber.join(waiting)
    assert.strictEqual(prior.exit, "yielded")
  })

  rule("that waits gets the lease when it has expired", function*() {
    const a = yield* processOf("a")
    const b = yield* processOf("b")
    const id = yield* freshWork
    yield* a(Lease.acquire(id))
    const waiting = yield* Effect.forkScoped(b(Lease.acquire(id, patient)))
    yield* passTtls(0.5)
    assert.isFalse(isOver(waiting))
    yield* passTtls(0.5)
    yield* meanwhile(waiting, TestClock.adjust("1 seconds"))
    const { prior } = yield* Fiber.join(waiting)
    assert.strictEqual(prior.exit, "expired")
  })

  rule("that waits and is interrupted leaves the lease to others", function*() {
    const a = yield* processOf("a")
    const b = yield* processOf("b")
    const id = yield* freshWork
    const { token } = yield* a(Lease.acquire(id))
    const waiting = yield* Effect.forkScoped(b(Lease.acquire(id, patient)))
    yield* passTtls(0.5)
    yield* Fiber.interrupt(waiting)
    yield* a(Lease.release(token, "finished"))
    const { prior } = yield* a(Lease.acquire(id))
    assert.deepStrictEqual(prior.fencingToken, Option.some(token.fencingToken))
  })

  rule("refuses a work ID that breaks the rules", function*() {
    const a = yield* processOf("a")
    const invalid = { Empty: "", ContainsNul: "a\0b", LoneSurrogate: "\ud800", TooLong: "é".repeat(257) }
    for (const [why, workId] of Object.entries(invalid)) {
      const error = yield* Effect.flip(a(Lease.acquire(workId)))
      assert.strictEqual(error._tag, "InvalidWorkId")
      assert.strictEqual(error._tag === "InvalidWorkId" ? error.why : undefined, why)
    }
  })
}

/** The semantics table, as the single operations show it. */
export const operationsOnToken = ({ rule }: Rules) => {
  type Operation = (token: Lease.Token<Progress>) => Effect.Effect<unknown, unknown, Lease.Leases>
  const [ok, expired, fenced] = ["succeeds", "LeaseExpired", "Fenced"] as const
  // Released as finished. Stale: another term has begun.
  const columns = ["held", "expired", "released", "forgotten", "stale"] as const
  const table: Record<string, readonly [Operation, ...answers: ReadonlyArray<string>]> = {
    "readCheckpoint": [Lease.readCheckpoint, ok, ok, ok, ok, fenced],
    "checkpoint": [(_) => Lease.checkpoint(_, { at: 2 }), ok, ok, expired, expired, fenced],
    "renew": [Lease.renew, ok, expired, expired, expired, fenced],
    "release as finished": [(_) => Lease.release(_, "finished"), ok, expired, ok, expired, fenced],
    "release as yielded": [(_) => Lease.release(_, "yielded"), ok, expired, expired, expired, fenced],
    "release with a state": [(_) => Lease.release(_, "finished", { at: 2 }), ok, ok, ok, expired, fenced],
    "forget": [Lease.forget, ok, ok, ok, ok, fenced]
  }
  const situations: Record<
    typeof columns[number],
    (
      token: Lease.Token<Progress>
    ) => Effect.Effect<unknown, unknown, Backend.Backend | Store | Lease.Leases | Scope.Scope>
  > = {
    held: () => Effect.void,
    expired: () => passTtls(1),
    released: (token) => Lease.release(token, "finished"),
    forgotten: Lease.forget,
    stale: (token) => Effect.andThen(passTtls(1), take(token.workId, "b"))
  }
  for (const [index, situation] of columns.entries()) {
    for (const [name, [operation, ...columnAnswers]] of Object.entries(table)) {
      const answer = columnAnswers[index]
      rule(`${name} with a token that is ${situation}: ${answer}`, function*() {
        const a = yield* processOf("a")
        const { token } = yield* a(Lease.acquire(yield* freshWork))
        yield* a(Lease.checkpoint(token, { at: 1 }))
        yield* a(situations[situation](token))
        const tried = Effect.map(Effect.exit(a(operation(token))), (exit) => assert.strictEqual(seen(exit), answer))
        yield* answer === ok ? tried : unchanged(token.workId, tried)
      })
    }
  }

  rule("a checkpoint is what readCheckpoint and the successor see", function*() {
    const a = yield* processOf("a")
    const id = yield* freshWork
    const { token } = yield* a(Lease.acquire(id))
    assert.deepStrictEqual(yield* a(Lease.readCheckpoint(token)), Option.none())
    yield* a(Lease.checkpoint(token, { at: 1 }))
    yield* a(Lease.checkpoint(token, { at: 2 }))
    assert.deepStrictEqual(yield* a(Lease.readCheckpoint(token)), Option.some({ at: 2 }))
    yield* a(Lease.release(token, "retired", { at: 3 }))
    const { prior } = yield* a(Lease.acquire(id))
    assert.strictEqual(prior.exit, "retired")
    assert.deepStrictEqual(prior.state, Option.some({ at: 3 }))
  })

  rule("checkpoints take effect in the order of their calls", function*() {
    const a = yield* processOf("a")
    const { token } = yield* a(Lease.acquire(yield* freshWork))
    yield* Effect.forEach(
      Array.from({ length: 20 }, (_, at) => at),
      (at) => a(Lease.checkpoint(token, { at })),
      { concurrency: "unbounded" }
    )
    assert.deepStrictEqual(yield* a(Lease.readCheckpoint(token)), Option.some({ at: 19 }))
  })

  rule("forget leaves nothing to the successor", function*() {
    const a = yield* processOf("a")
    const id = yield* freshWork
    const { token } = yield* a(Lease.acquire(id))
    yield* a(Lease.checkpoint(token, { at: 1 }))
    yield* a(Lease.forget(token))
    const { prior } = yield* a(Lease.acquire(id))
    assert.strictEqual(prior.exit, "none")
    assert.deepStrictEqual(prior.state, Option.none())
  })
}

/** The outcome table: what is recorded of work for its successor, and what its caller sees. */
export const outcomes = ({ rule }: Rules) => {
  interface Outcome {
    readonly work: (lease: Lease.Lease<Progress>) => Effect.Effect<unknown, unknown, Lease.Leases>
    /** What the caller of `Worker.run` sees. */
    readonly sees: string
    readonly exit: Backend.ExitMode
    /** The state that the work has left. */
    readonly state?: Progress
    /** Of terms without progress. It was 1 before. */
    readonly count: number
  }
  const failing = new Boom()
  const goesOn = Effect.die("the work goes on after it has ended")
  const table: Record<string, Outcome> = {
    "succeeds": { work: () => Effect.succeed("done"), sees: "succeeds", exit: "finished", count: 0 },
    "succeeds after a checkpoint": {
      work: (lease) => lease.checkpoint({ at: 1 }),
      sees: "succeeds",
      exit: "finished",
      state: { at: 1 },
      count: 0
    },
    "succeeds and leaves as retired": {
      work: (lease) => lease.leaveAs("retired"),
      sees: "succeeds",
      exit: "retired",
      count: 0
    },
    "succeeds and leaves a state": {
      work: (lease) => Effect.andThen(lease.checkpoint({ at: 1 }), lease.leaveAs("finished", { at: 2 })),
      sees: "succeeds",
      exit: "finished",
      state: { at: 2 },
      count: 0
    },
    "succeeds and leaves as retired with a state": {
      work: (lease) => lease.leaveAs("retired", { at: 2 }),
      sees: "succeeds",
      exit: "retired",
      state: { at: 2 },
      count: 0
    },
    "fails": { work: () => Effect.fail(failing), sees: "Boom", exit: "abandoned", count: 2 },
    "fails after a checkpoint": {
      work: (lease) => Effect.andThen(lease.checkpoint({ at: 1 }), Effect.fail(failing)),
      sees: "Boom",
      exit: "abandoned",
      state: { at: 1 },
      count: 0
    },
    "fails after it has said how a success would leave": {
      work: (lease) => Effect.andThen(lease.leaveAs("retired", { at: 2 }), Effect.fail(failing)),
      sees: "Boom",
      exit: "abandoned",
      count: 2
    },
    "dies": { work: () => Effect.die("defect"), sees: "defect", exit: "abandoned", count: 2 },
    "is interrupted": { work: () => Effect.interrupt, sees: "interruption", exit: "abandoned", count: 1 },
    "is interrupted after a checkpoint": {
      work: (lease) => Effect.andThen(lease.checkpoint({ at: 1 }), Effect.interrupt),
      sees: "interruption",
      exit: "abandoned",
      state: { at: 1 },
      count: 0
    },
    "hands off": {
      work: (lease) => Effect.andThen(lease.handOff(), goesOn),
      sees: "Yielded",
      exit: "yielded",
      count: 1
    },
    "hands off with a state": {
      work: (lease) => Effect.andThen(lease.handOff({ at: 2 }), goesOn),
      sees: "Yielded",
      exit: "yielded",
      state: { at: 2 },
      count: 0
    },
    "is asked to yield and comes to a checkpoint": {
      work: (lease) =>
        Lease.requestYield(lease.workId).pipe(
          Effect.andThen(lease.checkpoint({ at: 1 })),
          Effect.andThen(goesOn)
        ),
      sees: "Yielded",
      exit: "yielded",
      state: { at: 1 },
      count: 0
    },
    "is asked to yield and succeeds before": {
      work: (lease) => Lease.requestYield(lease.workId),
      sees: "succeeds",
      exit: "finished",
      count: 0
    }
  }

  const runners: Record<
    string,
    (
      id: Work.WorkId<Progress>,
      work: (lease: Lease.Lease<Progress>) => Effect.Effect<unknown, unknown, Lease.Leases>
    ) => Effect.Effect<unknown, unknown, Lease.Leases>
  > = {
    "Worker.run": (id, work) => Worker.run(id, work),
    hold: (id, work) =>
      Effect.scoped(Effect.flatMap(Lease.hold(id), (lease) => lease.guard(Effect.suspend(() => work(lease)))))
  }

  for (const [runner, run] of Object.entries(runners)) {
    for (const [name, { count, exit, sees, state, work }] of Object.entries(table)) {
      // A scope cannot fail its owner: all it can do is interrupt what it guards.
      const expected = runner === "hold" && sees === "Yielded" ? "interruption" : sees
      rule(`work that ${name}, under ${runner}: leaves as ${exit}, and its caller sees: ${expected}`, function*() {
        const a = yield* processOf("a")
        const id = yield* freshWork
        yield* answers("Done", release(yield* take(id.value, "before"), "abandoned"))
        let term: Backend.Term | undefined
        const result = yield* Effect.exit(a(run(id, (lease) => {
          term = lease.token
          return work(lease)
        })))
        assert.strictEqual(seen(result), expected)
        const successor = yield* take(id.value, "successor")
        assert.deepStrictEqual(
          told(successor.prior),
          left(term!, exit, { count, ...(state === undefined ? {} : { state: JSON.stringify(state) }) })
        )
      })
    }
  }

  const plain: Record<string, Outcome> = {
    "succeeds": table["succeeds"],
    "fails": table["fails"],
    "dies": table["dies"],
    "is interrupted": table["is interrupted"]
  }
  for (const [name, { count, exit, sees, work }] of Object.entries(plain)) {
    rule(`an effect that ${name}, under withLease: leaves as ${exit}, and its caller sees: ${sees}`, function*() {
      const a = yield* processOf("a")
      const workId = yield* freshId
      yield* answers("Done", release(yield* take(workId, "before"), "abandoned"))
      let term: Backend.Term | undefined
      const result = yield* Effect.exit(a(
        Effect.flatMap(Lease.CurrentLease, (lease) => {
          term = lease.token
          return work(lease as Lease.Lease<Progress>)
        }).pipe(Lease.withLease(workId))
      ))
      assert.strictEqual(seen(result), sees)
      assert.deepStrictEqual(told((yield* take(workId, "successor")).prior), left(term!, exit, { count }))
    })
  }

  rule("work that its caller interrupts is abandoned, which counts as no attempt", function*() {
    const a = yield* processOf("a")
    const id = yield* freshWork
    yield* answers("Done", release(yield* take(id.value, "before"), "abandoned"))
    const started = yield* Deferred.make<Lease.Lease<Progress>>()
    const running = yield* Effect.forkScoped(
      a(Worker.run(id, (lease) => Effect.andThen(Deferred.succeed(started, lease), Effect.never)))
    )
    const { token } = yield* Deferred.await(started)
    yield* Fiber.interrupt(running)
    assert.deepStrictEqual(told((yield* take(id.value, "b")).prior), left(token, "abandoned", { count: 1 }))
  })

  rule("the lease is held until the finalizers of the work have ended", function*() {
    const a = yield* processOf("a")
    const id = yield* freshWork
    const whileFinalizing: Array<string> = []
    const finalizer = Effect.orDie(Effect.map(acquire(id.value, "b"), (reply) => whileFinalizing.push(reply._tag)))
    yield* a(Worker.run(id, () => Effect.ensuring(Effect.void, finalizer)))
    yield* Effect.exit(a(Worker.run(id, () => Effect.ensuring(Effect.fail(failing), finalizer))))
    yield* Effect.exit(a(Worker.run(id, (lease) => Effect.ensuring(lease.handOff({ at: 1 }), finalizer))))
    assert.deepStrictEqual(whileFinalizing, ["Held", "Held", "Held"])
    yield* take(id.value, "b")
  })

  rule("work starts where the last one has left", function*() {
    const a = yield* processOf("a")
    const b = yield* processOf("b")
    const id = yield* freshWork
    const step = (lease: Lease.Lease<Progress>) => {
      const at = Option.match(lease.prior.state, { onNone: () => 0, onSome: (state) => state.at + 1 })
      return Effect.as(lease.checkpoint({ at }), [lease.prior.exit, at] as const)
    }
    assert.deepStrictEqual(yield* a(Worker.run(id, step)), ["none", 0])
    assert.deepStrictEqual(yield* b(Worker.run(id, step)), ["finished", 1])
    yield* Effect.exit(a(Worker.run(id, (lease) => Effect.andThen(step(lease), Effect.fail(failing)))))
    assert.deepStrictEqual(yield* b(Worker.run(id, step)), ["abandoned", 3])
  })

  rule("nothing that a lease writes changes the prior that its work was given", function*() {
    const a = yield* processOf("a")
    const id = yield* freshWork
    yield* a(Worker.run(id, (lease) => lease.checkpoint({ at: 1 })))
    yield* a(
      Worker.run(
        id,
        (lease) =>
          Effect.map(
            lease.checkpoint({ at: 2 }),
            () => assert.deepStrictEqual(lease.prior.state, Option.some({ at: 1 }))
          )
      )
    )
  })
}

export const losses = ({ rule }: Rules) => {
  rule("it is not, by work of five times its ttl: the renewals keep it", function*() {
    const { ttl } = yield* Store
    const a = yield* processOf("a")
    const id = yield* freshWork
    const started = yield* Deferred.make<Lease.Lease<Progress>>()
    const running = yield* Effect.forkScoped(
      a(Worker.run(id, (lease) => Effect.andThen(Deferred.succeed(started, lease), Effect.never)))
    )
    const lease = yield* Deferred.await(started)
    for (let i = 0; i < 15; i++) {
      yield* passRenewal
      yield* eventually(
        "the renewal is confirmed",
        Effect.map(lease.window, (window) => Duration.toMillis(window) > 0.8 * Duration.toMillis(ttl))
      )
      const refused = yield* answers("Held", acquire(id.value, "b"))
      // By a store on Effect's Clock, it was renewed some milliseconds ago.
      assert.isAtMost(Duration.toMillis(refused.remaining), Duration.toMillis(ttl))
      assert.isAbove(Duration.toMillis(refused.remaining), 0.75 * Duration.toMillis(ttl))
    }
    assert.isFalse(isOver(running))
    yield* Fiber.interrupt(running)
    yield* take(id.value, "b")
  })

  const takers: Record<
    string,
    readonly [reason: string, (term: Backend.Term) => Effect.Effect<unknown, unknown, Backend.Backend | Store>]
  > = {
    "a successor has begun": ["Fenced", (term) => Effect.andThen(forget(term), take(term.workId, "b"))],
    "somebody has ended its term": ["LeaseExpired", (term) => answers("Done", release(term, "yielded"))]
  }
  for (const [name, [reason, takeAway]] of Object.entries(takers)) {
    rule(`when ${name}, a renewal notices: the work is interrupted, and its caller sees LeaseLost`, function*() {
      const a = yield* processOf("a")
      const id = yield* freshWork
      const started = yield* Deferred.make<Lease.Lease<Progress>>()
      let finalized = false
      const work = (lease: Lease.Lease<Progress>) =>
        Deferred.succeed(started, lease).pipe(
          Effect.andThen(Effect.never),
          Effect.onInterrupt(() => Effect.sync(() => finalized = true))
        )
      const running = yield* Effect.forkScoped(a(Effect.exit(Worker.run(id, work))))
      const { token } = yield* Deferred.await(started)
      yield* takeAway(token)
      const before = yield* record(id.value)
      yield* passRenewal
      yield* eventually("the work has ended", Effect.sync(() => isOver(running)))
      const exit = yield* Fiber.join(running)
      assert.strictEqual(seen(exit), "LeaseLost")
      assert.strictEqual(reasonOf(exit), reason)
      assert.isTrue(finalized)
      assert.deepStrictEqual(withoutExpiry(yield* record(id.value)), withoutExpiry(before))
    })

    rule(`when ${name}, a checkpoint notices: it does not return, and nothing is written`, function*() {
      const a = yield* processOf("a")
      const id = yield* freshWork
      let before: Inspected | undefined
      const exit = yield* Effect.exit(a(Worker.run(id, (lease) =>
        Effect.gen(function*() {
          yield* takeAway(lease.token)
          before = yield* record(id.value)
          yield* Effect.ignore(lease.checkpoint({ at: 1 }))
          return yield* Effect.die("the work goes on after its lease is lost")
        }))))
      assert.strictEqual(seen(exit), "LeaseLost")
      assert.strictEqual(reasonOf(exit), reason)
      assert.deepStrictEqual(yield* record(id.value), before)
    })

    rule(`when ${name}, the end of the work notices: its value is not returned, and nothing is written`, function*() {
      const a = yield* processOf("a")
      const id = yield* freshWork
      let before: Inspected | undefined
      const exit = yield* Effect.exit(a(Worker.run(id, (lease) =>
        Effect.gen(function*() {
          yield* lease.leaveAs("finished", { at: 1 })
          yield* takeAway(lease.token)
          before = yield* record(id.value)
          return "done"
        }))))
      assert.strictEqual(seen(exit), "LeaseLost")
      assert.strictEqual(reasonOf(exit), reason)
      assert.deepStrictEqual(yield* record(id.value), before)
    })

    rule(`when ${name}, an effect under withLease is interrupted, and its caller sees LeaseLost`, function*() {
      const a = yield* processOf("a")
      const workId = yield* freshId
      const started = yield* Deferred.make<Lease.Any>()
      const running = yield* Lease.CurrentLease.use((lease) => Deferred.succeed(started, lease)).pipe(
        Effect.andThen(Effect.never),
        Lease.withLease(workId),
        Effect.exit,
        a,
        Effect.forkScoped
      )
      yield* takeAway((yield* Deferred.await(started)).token)
      yield* passRenewal
      yield* eventually("the effect has ended", Effect.sync(() => isOver(running)))
      assert.strictEqual(seen(yield* Fiber.join(running)), "LeaseLost")
    })
  }
}

export const handovers = ({ rule }: Rules) => {
  /** Starts work that waits, goes on when told, and then does the rest. */
  const start = Effect.fnUntraced(function*(
    id: Work.WorkId<Progress>,
    rest: (lease: Lease.Lease<Progress>) => Effect.Effect<unknown, unknown>,
    options?: Lease.HoldOptions
  ) {
    const a = yield* processOf("a")
    const started = yield* Deferred.make<Lease.Lease<Progress>>()
    const goOn = yield* Deferred.make<void>()
    const running = yield* Worker.run(
      id,
      (lease) =>
        Deferred.succeed(started, lease).pipe(
          Effect.andThen(Deferred.await(goOn)),
          Effect.andThen(rest(lease))
        ),
      options
    ).pipe(a, Effect.exit, Effect.forkScoped)
    return { lease: yield* Deferred.await(started), goOn: Deferred.succeed(goOn, void 0), running }
  })
  const goesOn = Effect.die("the work goes on after it has been handed over")

  rule("requestYield tells whether there is a holder", function*() {
    const b = yield* processOf("b")
    const id = yield* freshWork
    assert.isFalse(yield* b(Lease.requestYield(id)))
    const { goOn, running } = yield* start(id, () => Effect.void)
    assert.isTrue(yield* b(Lease.requestYield(id)))
    yield* goOn
    yield* Fiber.join(running)
    assert.isFalse(yield* b(Lease.requestYield(id)))
  })

  rule("work that is asked ends at its next checkpoint, and its successor starts from there", function*() {
    const b = yield* processOf("b")
    const id = yield* freshWork
    const { goOn, lease, running } = yield* start(id, (lease) => Effect.andThen(lease.checkpoint({ at: 7 }), goesOn))
    yield* b(Lease.requestYield(id))
    yield* goOn
    assert.strictEqual(seen(yield* Fiber.join(running)), "Yielded")
    const prior = yield* b(Worker.run(id, (next) => Effect.succeed(next.prior)))
    assert.strictEqual(prior.exit, "yielded")
    assert.deepStrictEqual(prior.state, Option.some({ at: 7 }))
    assert.deepStrictEqual(prior.fencingToken, Option.some(lease.token.fencingToken))
  })

  rule("the request reaches work that only waits, with a renewal", function*() {
    const b = yield* processOf("b")
    const id = yield* freshWork
    const { goOn, lease, running } = yield* start(
      id,
      (lease) => Effect.andThen(lease.awaitYieldRequest, lease.handOff({ at: 1 }))
    )
    yield* goOn
    yield* b(Lease.requestYield(id))
    assert.isFalse(yield* lease.yieldRequested)
    yield* passRenewal
    yield* eventually("the work has ended", Effect.sync(() => isOver(running)))
    assert.strictEqual(seen(yield* Fiber.join(running)), "Yielded")
    assert.isTrue(yield* lease.yieldRequested)
  })

  rule(
    "the request reaches it at once where the backend gives hints, and it has held the lease for a second",
    function*() {
      const { yieldRequests } = yield* Backend.Backend
      if (Option.isNone(yieldRequests)) return
      const b = yield* processOf("b")
      const id = yield* freshWork
      const { goOn, running } = yield* start(
        id,
        (lease) => Effect.andThen(lease.awaitYieldRequest, lease.handOff({ at: 1 }))
      )
      yield* goOn
      yield* pass("1 seconds")
      // What is asked before the subscription stands comes with a renewal, and none is due so soon. Some time has to pass
      // yet: a renewal that meets the row while it is asked for again waits before it comes again.
      yield* eventually(
        "the work has ended",
        Effect.map(Effect.andThen(b(Lease.requestYield(id)), pass("1 millis")), () => isOver(running))
      )
      assert.strictEqual(seen(yield* Fiber.join(running)), "Yielded")
    }
  )

  rule("work that yields at handOff only goes on at its checkpoints", function*() {
    const b = yield* processOf("b")
    const id = yield* freshWork
    const { goOn, lease, running } = yield* start(id, (lease) =>
      lease.checkpoint({ at: 1 }).pipe(
        Effect.andThen(lease.checkpoint({ at: 2 })),
        Effect.andThen(lease.yieldRequested),
        Effect.flatMap((requested) => requested ? lease.handOff() : Effect.die("nobody has asked"))
      ), { yieldAt: "handOff" })
    yield* b(Lease.requestYield(id))
    yield* goOn
    assert.strictEqual(seen(yield* Fiber.join(running)), "Yielded")
    assert.deepStrictEqual(
      told((yield* take(id.value, "b")).prior),
      left(lease.token, "yielded", { state: JSON.stringify({ at: 2 }) })
    )
  })

  rule(
    "work that overruns its deadline is interrupted: abandoned, counts as no attempt, and its caller sees Yielded",
    function*() {
      const { ttl } = yield* Store
      const b = yield* processOf("b")
      const id = yield* freshWork
      yield* answers("Done", release(yield* take(id.value, "before"), "abandoned"))
      const { goOn, lease, running } = yield* start(id, () => Effect.never)
      yield* goOn
      yield* b(Lease.requestYield(id, { deadline: Duration.times(ttl, 0.5) }))
      yield* passRenewal
      yield* eventually("the request has arrived", lease.yieldRequested)
      assert.isFalse(isOver(running))
      yield* passTtls(0.2)
      yield* eventually("the work has ended", Effect.sync(() => isOver(running)))
      assert.strictEqual(seen(yield* Fiber.join(running)), "Yielded")
      assert.deepStrictEqual(told((yield* take(id.value, "b")).prior), left(lease.token, "abandoned", { count: 1 }))
    }
  )

  rule("without a deadline the work takes the time that it needs", function*() {
    const { ttl } = yield* Store
    const b = yield* processOf("b")
    const id = yield* freshWork
    const { goOn, lease, running } = yield* start(id, (lease) => lease.handOff({ at: 1 }))
    yield* b(Lease.requestYield(id))
    for (let i = 0; i < 6; i++) {
      yield* passRenewal
      yield* eventually(
        "the renewal is confirmed",
        Effect.map(lease.window, (window) => Duration.toMillis(window) > 0.8 * Duration.toMillis(ttl))
      )
    }
    assert.isTrue(yield* lease.yieldRequested)
    assert.isFalse(isOver(running))
    yield* goOn
    assert.strictEqual(seen(yield* Fiber.join(running)), "Yielded")
  })

  rule("a request ends with the term: the successor is not asked to leave", function*() {
    const b = yield* processOf("b")
    const id = yield* freshWork
    const { goOn, running } = yield* start(id, (lease) => lease.checkpoint({ at: 1 }))
    yield* b(Lease.requestYield(id))
    yield* goOn
    assert.strictEqual(seen(yield* Fiber.join(running)), "Yielded")
    yield* b(Worker.run(id, (lease) => Effect.andThen(lease.checkpoint({ at: 2 }), lease.checkpoint({ at: 3 }))))
    assert.strictEqual((yield* record(id.value))?.status, "finished")
  })
}

export const quarantine = ({ rule }: Rules) => {
  /** Work of which as many terms have ended in vain. */
  const poisoned = Effect.fnUntraced(function*(terms: number) {
    const a = yield* processOf("a")
    const id = yield* freshWork
    for (let i = 0; i < terms; i++) {
      assert.strictEqual(seen(yield* Effect.exit(a(Worker.run(id, () => Effect.fail(new Boom()))))), "Boom")
    }
    return id
  })

  const takers: Record<
    string,
    (id: Work.WorkId<Progress>, options: Lease.AcquireOptions) => Effect.Effect<unknown, unknown, Lease.Leases>
  > = {
    acquire: Lease.acquire,
    hold: (id, options) => Effect.scoped(Lease.hold(id, options)),
    "Worker.run": (id, options) => Worker.run(id, () => Effect.die("the work has started"), options),
    withLease: (id, options) => Lease.withLease(Effect.die("the effect has started"), id.value, options)
  }
  for (const [taker, run] of Object.entries(takers)) {
    for (const wait of [false, true]) {
      rule(`${taker}${wait ? " that waits" : ""} fails with Quarantined after as many terms in vain`, function*() {
        const b = yield* processOf("b")
        const id = yield* poisoned(3)
        const error: any = yield* Effect.flip(unchanged(id.value, b(run(id, { wait, quarantineAfter: 3 }))))
        assert.strictEqual(error._tag, "Quarantined")
        assert.strictEqual(error.workId, id.value)
        assert.strictEqual(error.termsWithoutProgress, 3)
        assert.strictEqual(error.exit, "abandoned")
        assert.strictEqual(error.holderId, "a")
        assert.strictEqual(
          error.why,
          "3 terms in a row have ended without a new checkpoint; the last one ended as abandoned, held by \"a\""
        )
        assert.include(error.message, error.why)
      })
    }
  }

  rule("is off by default", function*() {
    const a = yield* processOf("a")
    const id = yield* poisoned(20)
    assert.strictEqual((yield* a(Worker.run(id, (lease) => Effect.succeed(lease.prior)))).termsWithoutProgress, 20)
  })

  rule("keeps poisonous work from starting again, until it is lifted", function*() {
    const a = yield* processOf("a")
    const id = yield* freshWork
    let started = 0
    const run = a(Effect.exit(Worker.run(
      id,
      () =>
        Effect.suspend(() => {
          started++
          return Effect.fail(new Boom())
        }),
      { quarantineAfter: 3 }
    )))
    for (const expected of [3, 6]) {
      for (let i = 0; i < 5; i++) assert.strictEqual(seen(yield* run), i < 3 ? "Boom" : "Quarantined")
      assert.strictEqual(started, expected)
      assert.isTrue(yield* a(Lease.lift(id)))
    }
    yield* a(Worker.run(id, (lease) => {
      assert.strictEqual(lease.prior.exit, "abandoned")
      assert.strictEqual(lease.prior.termsWithoutProgress, 0)
      return Effect.void
    }, { quarantineAfter: 1 }))
  })

  rule("counts a crash", function*() {
    const b = yield* processOf("b")
    const id = yield* poisoned(1)
    yield* take(id.value, "crashed")
    yield* passTtls(1)
    const error = yield* Effect.flip(b(Lease.acquire(id, { quarantineAfter: 2 })))
    assert.strictEqual(error._tag, "Quarantined")
    assert.strictEqual(error._tag === "Quarantined" ? error.exit : undefined, "expired")
    // As little as one that was never seen by a successor.
    yield* b(Lease.lift(id))
    yield* b(Lease.acquire(id, { quarantineAfter: 1 }))
  })

  // The count before is 2.
  const innocent: Record<string, (lease: Lease.Lease<Progress>) => Effect.Effect<unknown, unknown, Lease.Leases>> = {
    "is interrupted": () => Effect.interrupt,
    "hands off": (lease) => lease.handOff(),
    "is asked to yield and hands off": (lease) => Effect.andThen(Lease.requestYield(lease.workId), lease.handOff()),
    "fails after a checkpoint": (lease) => Effect.andThen(lease.checkpoint({ at: 1 }), Effect.fail(new Boom())),
    succeeds: () => Effect.void
  }
  for (const [name, work] of Object.entries(innocent)) {
    rule(`does not come of work that ${name}, however often`, function*() {
      const a = yield* processOf("a")
      const id = yield* poisoned(2)
      for (let i = 0; i < 5; i++) {
        const exit = yield* Effect.exit(a(Worker.run(id, work, { quarantineAfter: 3 })))
        assert.notStrictEqual(seen(exit), "Quarantined")
      }
      assert.isAtMost((yield* record(id.value))!.termsWithoutProgress, 2)
    })
  }

  rule("does not come of a last state that cannot be read, however often", function*() {
    const a = yield* processOf("a")
    const id = yield* freshWork
    const stored = { version: 1, bytes: bytesOf("not JSON") }
    yield* answers("Done", release(yield* take(id.value, "before"), "yielded", { state: [1, stored] }))
    for (let i = 0; i < 5; i++) {
      const exit = yield* Effect.exit(a(Worker.run(id, () => Effect.void, { quarantineAfter: 1 })))
      assert.strictEqual(seen(exit), "CheckpointDecodeError")
    }
    assert.strictEqual((yield* record(id.value))?.termsWithoutProgress, 0)
  })

  rule("ends the waiting of an acquire for a holder that leaves in vain", function*() {
    const a = yield* processOf("a")
    const b = yield* processOf("b")
    const id = yield* poisoned(2)
    const { token } = yield* a(Lease.acquire(id))
    const waiting = yield* Effect.forkScoped(
      b(Lease.acquire(id, { wait: true, quarantineAfter: 3, policy: Renewal.makeUnsafe({ ttl: "10 days" }) }))
    )
    yield* passTtls(0.5)
    assert.isFalse(isOver(waiting))
    yield* a(Lease.release(token, "abandoned"))
    yield* meanwhile(waiting, TestClock.adjust("1 seconds"))
    assert.strictEqual(seen(yield* Fiber.await(waiting)), "Quarantined")
  })

  rule("after a number that is none is refused as a defect, before anything is sent", function*() {
    const a = yield* processOf("a")
    const id = yield* poisoned(1)
    for (const quarantineAfter of [0, -1, 1.5, NaN, Infinity]) {
      const exit = yield* unchanged(id.value, Effect.exit(a(Lease.acquire(id, { quarantineAfter }))))
      const defect: any = Exit.isFailure(exit) ? Cause.squash(exit.cause) : undefined
      assert.strictEqual(defect?._tag, "InvalidConfig")
      assert.strictEqual(defect?.field, "quarantineAfter")
    }
  })

  rule("lift tells whether the work ID is known, and refuses one that breaks the rules", function*() {
    const a = yield* processOf("a")
    assert.isFalse(yield* a(Lease.lift(yield* freshWork)))
    assert.isTrue(yield* a(Lease.lift(yield* poisoned(1))))
    assert.strictEqual((yield* Effect.flip(a(Lease.lift("a\0b"))))._tag, "InvalidWorkId")
  })
}

export const states = ({ rule }: Rules) => {
  const undecodable: Record<string, Backend.Stored> = {
    "is no JSON": { version: 1, bytes: bytesOf("not JSON") },
    "does not fit the schema": { version: 1, bytes: bytesOf(`{"at":"one"}`) },
    "was written by newer code": { version: 2, bytes: bytesOf(`{"at":1}`) }
  }
  const takers: Record<string, (id: Work.WorkId<Progress>) => Effect.Effect<unknown, unknown, Lease.Leases>> = {
    "Worker.run": (id) => Worker.run(id, () => Effect.die("the work has started")),
    hold: (id) => Effect.scoped(Lease.hold(id)),
    acquire: Lease.acquire
  }
  for (const [name, stored] of Object.entries(undecodable)) {
    for (const [taker, run] of Object.entries(takers)) {
      rule(
        `${taker} gives the lease back if the last state ${name}: CheckpointDecodeError, and the state stays`,
        function*() {
          const a = yield* processOf("a")
          const id = yield* freshWork
          const before = yield* take(id.value, "before")
          yield* answers("Done", release(before, "abandoned", { state: [1, stored] }))
          const exit = yield* Effect.exit(a(run(id)))
          assert.strictEqual(seen(exit), "CheckpointDecodeError")
          assert.strictEqual((yield* record(id.value))?.status, "abandoned")
          const successor = yield* take(id.value, "successor")
          assert.deepStrictEqual(told(successor.prior), left(before, "abandoned", { state: textOf(stored) }))
          assert.strictEqual(Option.getOrThrow(successor.prior.state).version, stored.version)
          // One for the term that was given back.
          assert.isTrue(successor.fencingToken > before.fencingToken + 1n)
        }
      )
    }
  }

  rule("newer code reads what older code has written, and older code does not read what newer code has", function*() {
    const a = yield* processOf("a")
    const version1 = Checkpoint.make(Schema.Struct({ at: Schema.Int }))
    const version2 = Checkpoint.upgrade(
      version1,
      Schema.Struct({ at: Schema.Int, failed: Schema.Array(Schema.String) }),
      (previous) => ({ ...previous, failed: [] })
    )
    const version3 = Checkpoint.upgrade(version2, Schema.Struct({ next: Schema.Int }), ({ at }) => ({ next: at + 1 }))
    const key = yield* freshId
    const Old = Work.make("contract", version1)
    const New = Work.make("contract", version3)
    yield* a(Worker.run(Old.id(key), (lease) => lease.checkpoint({ at: 4 })))
    yield* a(Worker.run(New.id(key), (lease) => {
      assert.deepStrictEqual(lease.prior.state, Option.some({ next: 5 }))
      return lease.checkpoint({ next: 9 })
    }))
    const error = yield* Effect.flip(a(Worker.run(Old.id(key), () => Effect.void)))
    assert.strictEqual(error._tag, "CheckpointDecodeError")
    assert.strictEqual(error._tag === "CheckpointDecodeError" ? error.version : undefined, 3)
    const state = yield* a(Worker.run(New.id(key), (lease) => Effect.succeed(lease.prior.state)))
    assert.deepStrictEqual(state, Option.some({ next: 9 }))
  })

  rule("a state that is too large or cannot be encoded is refused before anything is sent", function*() {
    const a = yield* processOf("a")
    const Small = Work.make(
      "contract",
      Checkpoint.make(Schema.Struct({ text: Schema.NonEmptyString }), { maxBytes: 40 })
    )
    const id = Small.id(yield* freshId)
    const refused: Record<string, { readonly text: string }> = {
      CheckpointTooLarge: { text: "x".repeat(40) },
      CheckpointEncodeError: { text: "" }
    }
    yield* a(Worker.run(id, (lease) =>
      Effect.gen(function*() {
        yield* lease.checkpoint({ text: "good" })
        const before = yield* record(id.value)
        yield* passTtls(0.1)
        for (const [tag, state] of Object.entries(refused)) {
          assert.strictEqual(seen(yield* Effect.exit(lease.checkpoint(state))), tag)
          assert.strictEqual(seen(yield* Effect.exit(lease.leaveAs("finished", state))), tag)
          assert.strictEqual(seen(yield* Effect.exit(lease.handOff(state))), tag)
          assert.strictEqual(seen(yield* Effect.exit(Lease.checkpoint(lease.token, state))), tag)
          assert.strictEqual(seen(yield* Effect.exit(Lease.release(lease.token, "finished", state))), tag)
        }
        const after = yield* record(id.value)
        assert.deepStrictEqual(withoutExpiry(after), withoutExpiry(before))
        yield* lease.checkpoint({ text: "still good" })
      })))
    assert.strictEqual((yield* record(id.value))?.text, JSON.stringify({ text: "still good" }))
  })

  rule("of raw bytes come back as they were", function*() {
    const a = yield* processOf("a")
    const Raw = Work.make("contract", Checkpoint.bytes())
    const id = Raw.id(yield* freshId)
    const bytes = Uint8Array.from({ length: 256 }, (_, i) => i)
    yield* a(Worker.run(id, (lease) => lease.checkpoint(bytes)))
    const state = yield* a(Worker.run(id, (lease) => Effect.succeed(lease.prior.state)))
    assert.deepStrictEqual(Option.map(state, (_) => Array.from(_)), Option.some(Array.from(bytes)))
  })

  rule("a holder that has no use for them leaves them as they are", function*() {
    const a = yield* processOf("a")
    const id = yield* freshWork
    yield* a(Worker.run(id, (lease) => lease.checkpoint({ at: 1 })))
    yield* a(Effect.void.pipe(Lease.withLease(id.value)))
    const state = yield* a(Worker.run(id, (lease) => Effect.succeed(lease.prior.state)))
    assert.deepStrictEqual(state, Option.some({ at: 1 }))
  })
}

// -----------------------------------------------------------------------------
// the rules' own tools
// -----------------------------------------------------------------------------

const freshWork = Effect.map(freshId, (key) => Progress.id(key))

/** A process of the application. */
const processOf = (holderId: string) =>
  Effect.map(
    Effect.flatMap(Store, ({ ttl }) => Layer.build(Lease.layerWith({ holderId, ttl }))),
    (context) => <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.provideContext(effect, context)
  )

/** The rows of a store whose clock moves by moving them have another expiry after a while. */
const withoutExpiry = (listed: Inspected | undefined) =>
  listed === undefined ? undefined : { ...listed, expiresAt: undefined }

/** What a caller sees. */
const seen = (exit: Exit.Exit<unknown, unknown>): string => {
  if (Exit.isSuccess(exit)) return "succeeds"
  const error = Option.getOrUndefined(Cause.findErrorOption(exit.cause))
  if (typeof error === "object" && error !== null && "_tag" in error) return String(error._tag)
  if (Cause.hasDies(exit.cause)) {
    const defect = Cause.squash(exit.cause)
    return defect === "defect" ? "defect" : `an unexpected defect: ${defect}`
  }
  return Cause.hasInterruptsOnly(exit.cause) ? "interruption" : Cause.pretty(exit.cause)
}

const reasonOf = (exit: Exit.Exit<unknown, unknown>): string | undefined => {
  const error: any = Exit.isFailure(exit) ? Option.getOrUndefined(Cause.findErrorOption(exit.cause)) : undefined
  return error?.reason?._tag
}
