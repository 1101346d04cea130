/**
 * The contract suite: what every backend has to do, as tests.
 *
 * Write a backend, and call `suite` in a test file of it. The suite has two
 * parts. The first goes through `Backend` itself: every invariant that shows
 * there, and every cell of the semantics table. The second goes through
 * `Lease` and `Worker` over the backend, as an application does.
 *
 * It needs `vitest` and `@effect/vitest`, which is why `worklease/testing`
 * does not export it again: import it from `worklease/testing/BackendContract`.
 *
 * **Details**
 *
 * Groups name the invariants that they are about. Tests run one after the
 * other, over one build of the layer, under
 * `TestClock`. Each uses work IDs of its own. What a test needs beyond the
 * backend itself is an option, and without that option it is left out.
 *
 * **Example** (The suite over the memory backend)
 *
 * ```ts
 * import { Effect } from "effect"
 * import * as Memory from "worklease/layers/Memory"
 * import * as BackendContract from "worklease/testing/BackendContract"
 *
 * BackendContract.suite("Memory", {
 *   layer: Memory.layer,
 *   // Its clock is Effect's, which the suite moves itself.
 *   advance: () => Effect.void,
 *   standsStill: true
 * })
 * ```
 *
 * @stability unstable
 * @since 0.1.0
 */

import { assert, describe, it, type Vitest } from "@effect/vitest"
import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Cause from "effect/Cause"
import * as Context from "effect/Context"
import * as SecureRandom from "effect/crypto/SecureRandom"
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
import * as Backend from "../Backend.ts"
import * as Checkpoint from "../Checkpoint.ts"
import * as Lease from "../Lease.ts"
import { BackendError } from "../LeaseError.ts"
import * as Renewal from "../Renewal.ts"
import * as Work from "../Work.ts"
import * as Worker from "../Worker.ts"

/**
 * The backend under test, and what the suite may do to its store.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options<R = never, E = never> {
  /** The backend, over a store that nothing else uses meanwhile. */
  readonly layer: Layer.Layer<Backend.Backend | R, E>

  /**
   * Moves the store's clock on, relative to what it stores: either the clock
   * itself, or every stored time the other way. A backend on Effect's Clock has
   * nothing to do here, because the suite moves that too.
   *
   * Without it, the suite really waits. It then takes minutes rather than
   * seconds, wants a short `ttl`, and leaves out what takes hours.
   */
  readonly advance?: ((duration: Duration.Duration) => Effect.Effect<unknown, unknown, Backend.Backend | R>) | undefined

  /** Whether the store's clock moves by `advance` only, so that instants can be tested. Defaults to `false`. */
  readonly standsStill?: boolean | undefined

  /** Sets the store's clock back, and leaves what it stores as it is. */
  readonly setBack?: ((duration: Duration.Duration) => Effect.Effect<unknown, unknown, Backend.Backend | R>) | undefined

  /** Raises the stored fencing token of a work ID that is free to a larger one. */
  readonly raiseToken?:
    | ((workId: string, fencingToken: bigint) => Effect.Effect<unknown, unknown, Backend.Backend | R>)
    | undefined

  /** Has somebody else lock what is stored for a work ID, for as long as the scope is open. */
  readonly lock?: ((workId: string) => Effect.Effect<unknown, unknown, Backend.Backend | R | Scope.Scope>) | undefined

  /** How long the leases of the suite last. Defaults to 30 seconds, or to 1 second where the suite really waits. */
  readonly ttl?: Duration.Input | undefined
}

/**
 * Defines the tests of a backend. Call it at the top level of a test file.
 *
 * @category constructors
 * @since 0.1.0
 */
export const suite = <R, E>(name: string, options: Options<R, E>): void => {
  it.layer(Layer.provideMerge(storeLayer(options), options.layer), { timeout: "2 minutes" })(name, (it) => {
    const rules = makeRules(it, options)
    describe("The storage port", () => {
      describe("taking a lease (I1, I10)", () => taking(rules))
      describe("fencing tokens (I2)", () => fencingTokens(rules))
      describe("attempts (I9)", () => attempts(rules))
      describe("operations of a term (I3)", () => operationsOfTerm(rules))
      describe("what the operations of a term do", () => effectsOfOperations(rules))
      describe("checkpoints (I4)", () => checkpoints(rules))
      describe("releases (I5, I9)", () => releases(rules))
      describe("giving back (I6)", () => givingBack(rules))
      describe("forgetting", () => forgetting(rules))
      describe("the prior (I6)", () => priors(rules))
      describe("terms without progress", () => termsWithoutProgress(rules))
      describe("requests to yield", () => yieldRequests(rules))
      describe("batches", () => batches(rules))
      describe("names and bytes", () => namesAndBytes(rules))
      describe("lists", () => lists(rules))
      if (options.advance !== undefined) {
        describe("sweeps (I2)", () => sweeps(rules))
      }
      describe("wake-ups", () => wakeups(rules))
      if (options.lock !== undefined) {
        describe("rows that somebody else has locked (I10)", () => locks(rules))
      }
    })
    describe("Leases over it", () => {
      describe("acquire", () => acquires(rules))
      describe("operations on a token", () => operationsOnToken(rules))
      describe("how work ends", () => outcomes(rules))
      describe("how a lease is lost", () => losses(rules))
      describe("handing over on request", () => handovers(rules))
      describe("states", () => states(rules))
    })
  })
}

// -----------------------------------------------------------------------------
// the storage port
// -----------------------------------------------------------------------------

const taking = ({ rule, whenStanding }: Rules) => {
  rule("a work ID that nobody has held is taken at once, and nothing is known of it", function*() {
    const a = yield* take(yield* freshId, "a")
    assert.deepStrictEqual(told(a.prior), { exit: "none", by: undefined, state: undefined, count: 0 })
  })

  rule("a lease that is held is refused, with its holder and the time it still has", function*() {
    const { ttl } = yield* Store
    const a = yield* take(yield* freshId, "a")
    const early = yield* answers("Held", acquire(a.workId, "b"))
    assert.strictEqual(early.holderId, "a")
    yield* assertNear(early.remaining, ttl)
    yield* passTtls(0.5)
    const late = yield* answers("Held", acquire(a.workId, "b"))
    yield* assertNear(late.remaining, Duration.times(ttl, 0.5))
  })

  rule("its own holder is refused too", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Held", acquire(a.workId, "a"))
  })

  rule("a refused acquire changes nothing, and its attempt can take the lease later", function*() {
    const attempt = randomId()
    const a = yield* take(yield* freshId, "a")
    yield* unchanged(a.workId, answers("Held", acquire(a.workId, "b", { attempt })))
    yield* answers("Done", renew(a))
    yield* answers("Done", release(a, "yielded"))
    const b = yield* take(a.workId, "b", { attempt })
    assert.deepStrictEqual(told(b.prior), left(a, "yielded", { count: 0 }))
  })

  for (const exit of exits) {
    rule(`a lease that was released as ${exit} is free at once`, function*() {
      const a = yield* take(yield* freshId, "a")
      yield* answers("Done", release(a, exit))
      yield* take(a.workId, "b")
    })
  }

  rule("a lease that was forgotten is free at once", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", forget(a))
    yield* take(a.workId, "b")
  })

  rule("a lease that has expired is free", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* passTtls(1)
    yield* take(a.workId, "b")
  })

  rule("a lease lasts for the ttl of its own acquire", function*() {
    const short = yield* take(yield* freshId, "a", { ttls: 0.5 })
    const long = yield* take(yield* freshId, "a", { ttls: 2 })
    yield* passTtls(1)
    yield* answers("Acquired", acquire(short.workId, "b"))
    yield* answers("Held", acquire(long.workId, "b"))
  })

  rule("one holder holds leases on several work IDs, and each ends by itself", function*() {
    const first = yield* take(yield* freshId, "a")
    const second = yield* take(yield* freshId, "a")
    yield* answers("Done", release(first, "finished"))
    yield* answers("Held", acquire(second.workId, "b"))
    yield* answers("Done", renew(second))
  })

  whenStanding("a lease expires its ttl after it was taken", function*() {
    const { ttl } = yield* Store
    const a = yield* take(yield* freshId, "a")
    yield* pass("1 second")
    const b = yield* take(yield* freshId, "b")
    assert.strictEqual(b.expiresAt - a.expiresAt, 1000)
    yield* pass(Duration.subtract(ttl, Duration.seconds(1)))
    const c = yield* take(yield* freshId, "c", { ttls: 2 })
    assert.strictEqual(c.expiresAt - a.expiresAt, 2 * Duration.toMillis(ttl))
  })

  whenStanding("until the instant of its expiry it is held, and at that instant it is not", function*() {
    const { ttl } = yield* Store
    const a = yield* take(yield* freshId, "a")
    const b = yield* take(yield* freshId, "b")
    const c = yield* take(yield* freshId, "c")
    yield* pass(Duration.subtract(ttl, Duration.millis(1)))
    const refused = yield* answers("Held", acquire(a.workId, "d"))
    assert.strictEqual(Duration.toMillis(refused.remaining), 1)
    assert.isTrue(yield* requestYield(a.workId))
    assert.strictEqual((yield* record(a.workId))?.status, "held")

    yield* pass("1 millis")
    assert.strictEqual((yield* record(a.workId))?.status, "expired")
    assert.isFalse(yield* requestYield(a.workId))
    yield* answers("Expired", renew(a))
    yield* answers("Expired", release(b, "finished"))
    yield* answers("AttemptEnded", acquire(c.workId, "c", { attempt: c.attempt }))
    yield* answers("Acquired", acquire(a.workId, "d"))
  })

  rule("of acquires that race for one work ID, one wins each time, and tokens stay in order", function*() {
    const workId = yield* freshId
    const tokens: Array<bigint> = []
    const endings: Array<
      (term: Backend.Term) => Effect.Effect<{ readonly _tag: string }, BackendError, Backend.Backend>
    > = [
      (term) => release(term, "finished"),
      (term) => forget(term),
      (term) => release(term, "given-back"),
      (term) => release(term, "retired", { state: [1, "last"] })
    ]
    let holding = 0
    const race = Effect.fnUntraced(function*(holderId: string) {
      let terms = 0
      while (terms < 4) {
        const reply = yield* acquire(workId, holderId)
        if (reply._tag === "Acquired") {
          terms++
          assert.strictEqual(++holding, 1, "two hold the lease")
          tokens.push(reply.fencingToken)
          const term = { workId, holderId, fencingToken: reply.fencingToken }
          yield* eventually("a checkpoint is stored", Effect.map(checkpoint(term, 1, "one"), (_) => _._tag === "Done"))
          holding--
          const end = endings[tokens.length % endings.length]
          yield* eventually("the term ends", Effect.map(end(term), (_) => _._tag === "Done"))
        } else {
          assert.include(["Held", "Contended"], reply._tag)
          yield* live(Effect.sleep("2 millis"))
        }
      }
    })
    yield* Effect.forEach(Array.from({ length: 8 }, (_, i) => `holder-${i}`), race, { concurrency: "unbounded" })
    assert.strictEqual(tokens.length, 32)
    assertIncreasing(tokens)
  })
}

const fencingTokens = ({ rule, whenRaised, whenSetBack, whenTravelling }: Rules) => {
  rule("are strictly larger for each later term, however the one before has ended", function*() {
    const workId = yield* freshId
    const tokens: Array<bigint> = []
    const next = Effect.tap(take(workId, "a"), (a) => Effect.sync(() => tokens.push(a.fencingToken)))
    for (const exit of [...exits, ...exits]) yield* answers("Done", release(yield* next, exit))
    yield* answers("Done", forget(yield* next))
    yield* next
    yield* passTtls(1)
    yield* answers("Done", release(yield* next, "finished", { state: [1, "one"] }))
    yield* next
    assertIncreasing(tokens)
  })

  rule("are positive signed 64-bit integers, and not behind the store's clock in microseconds", function*() {
    const { ttl } = yield* Store
    const workId = yield* freshId
    for (let i = 0; i < 3; i++) {
      const a = yield* take(workId, "a")
      assert.isTrue(a.fencingToken > 0n && a.fencingToken <= maxToken)
      const clock = BigInt(Math.round((a.expiresAt - Duration.toMillis(ttl)) * 1000))
      assert.isTrue(a.fencingToken >= clock, `${a.fencingToken} is behind the clock, ${clock}`)
      yield* answers("Done", release(a, "finished"))
      yield* passTtls(0.1)
    }
  })

  whenTravelling("go on from where they were after a sweep", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", release(a, "retired"))
    yield* pass("2 hours")
    yield* sweepAll
    const b = yield* take(a.workId, "b")
    assertIncreasing([a.fencingToken, b.fencingToken])
    assert.deepStrictEqual(told(b.prior), { exit: "none", by: undefined, state: undefined, count: 0 })
  })

  whenSetBack("are in order although the store's clock was set back", function*(setBack) {
    const endings: Record<string, Ending> = {
      finished: (a) => answers("Done", release(a, "finished")),
      "given back": (a) => answers("Done", release(a, "given-back")),
      forgotten: (a) => answers("Done", forget(a)),
      swept: (a) => Effect.andThen(answers("Done", release(a, "retired")), Effect.andThen(pass("2 hours"), sweepAll)),
      "forgotten and swept": (a) =>
        Effect.andThen(answers("Done", forget(a)), Effect.andThen(pass("2 hours"), sweepAll))
    }
    for (const end of Object.values(endings)) {
      yield* pass("1 days")
      const a = yield* take(yield* freshId, "a")
      yield* end(a)
      yield* setBack("1 days")
      const b = yield* take(a.workId, "b")
      yield* answers("Done", release(b, "finished"))
      const c = yield* take(a.workId, "c")
      assertIncreasing([a.fencingToken, b.fencingToken, c.fencingToken])
    }
    yield* pass("2 days")
  })

  whenSetBack(
    "are in order then whichever of several work IDs was swept first, and whichever has the largest",
    function*(setBack) {
      const prefix = yield* freshId
      for (const order of ["abc", "cba", "bca"]) {
        yield* pass("1 days")
        const taken: Record<string, Taken> = {}
        for (const key of ["a", "b", "c"]) {
          taken[key] = yield* take(`${prefix}${order}${key}`, "a", { ttls: 1_000_000 })
          yield* pass("1 hours")
        }
        // The first by itself, then the others together.
        for (const keys of [order.slice(0, 1), order.slice(1)]) {
          for (const key of keys) yield* answers("Done", release(taken[key], "retired"))
          yield* pass("2 hours")
          yield* sweepAll
        }
        yield* setBack("1 days")
        for (const { fencingToken, workId } of Object.values(taken)) {
          assertIncreasing([fencingToken, (yield* take(workId, "b")).fencingToken])
        }
      }
      yield* pass("2 days")
    }
  )

  whenRaised("are told apart beyond what a double holds", function*(raise) {
    const workId = yield* freshId
    yield* answers("Done", release(yield* take(workId, "z"), "finished"))
    yield* raise(workId, 2n ** 53n + 1000n)
    const a = yield* take(workId, "a")
    assert.strictEqual(a.fencingToken, 2n ** 53n + 1001n)
    yield* fenced({ ...a, fencingToken: a.fencingToken + 1n })
    yield* fenced({ ...a, fencingToken: a.fencingToken - 1n })
    yield* answers("Done", checkpoint(a, 1, "one"))
    yield* answers("Done", release(a, "finished"))
    const b = yield* take(workId, "b")
    assert.strictEqual(b.fencingToken, 2n ** 53n + 1002n)
    assert.deepStrictEqual(told(b.prior), left(a, "finished", { state: "one" }))
  })

  whenRaised("that have reached the largest refuse the acquire of that work ID only", function*(raise) {
    const workId = yield* freshId
    yield* answers("Done", release(yield* take(workId, "a"), "finished"))
    yield* raise(workId, maxToken)
    const backend = yield* Backend.Backend
    const { ttl } = yield* Store
    yield* unchanged(
      workId,
      Effect.gen(function*() {
        const replies = yield* backend.acquire([
          { workId: yield* freshId, holderId: "b", attempt: randomId(), ttl },
          { workId, holderId: "b", attempt: randomId(), ttl },
          { workId: yield* freshId, holderId: "b", attempt: randomId(), ttl }
        ])
        assert.deepStrictEqual(replies.map((_) => _._tag), ["Acquired", "BackendError", "Acquired"])
        const [, refused] = replies
        const error = refused as BackendError
        assert.strictEqual(error.reason._tag, "TokenExhausted")
        assert.strictEqual(error.outcome, "rejected")
      })
    )
  })
}

const attempts = ({ rule, whenTravelling }: Rules) => {
  rule("the same attempt again gets the same answer", function*() {
    const workId = yield* freshId
    const before = yield* take(workId, "z")
    yield* answers("Done", release(before, "abandoned", { state: [1, "one"] }))
    const attempt = randomId()
    const first = yield* answers("Acquired", acquire(workId, "a", { attempt }))
    yield* unchanged(
      workId,
      Effect.gen(function*() {
        assert.deepStrictEqual(yield* acquire(workId, "a", { attempt }), first)
        assert.deepStrictEqual(yield* acquire(workId, "a", { attempt }), first)
      })
    )
  })

  rule("asked again, it does not extend the lease", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* passTtls(0.5)
    yield* answers("Acquired", acquire(a.workId, "a", { attempt: a.attempt }))
    yield* passTtls(0.5)
    yield* answers("Acquired", acquire(a.workId, "b"))
  })

  const endings: Record<string, Ending> = {
    "has expired": () => passTtls(1),
    "was released": (a) => answers("Done", release(a, "finished")),
    "was given back": (a) => answers("Done", release(a, "given-back")),
    "was forgotten": (a) => answers("Done", forget(a))
  }
  for (const [ending, end] of Object.entries(endings)) {
    rule(`an attempt whose term ${ending} takes no lease again, and changes nothing`, function*() {
      const a = yield* take(yield* freshId, "a")
      yield* end(a)
      yield* unchanged(a.workId, answers("AttemptEnded", acquire(a.workId, "a", { attempt: a.attempt })))
    })

    rule(`an attempt whose term ${ending} takes no lease again while a successor has it, or after`, function*() {
      const a = yield* take(yield* freshId, "a")
      yield* end(a)
      const b = yield* take(a.workId, "b")
      yield* unchanged(a.workId, answers("AttemptEnded", acquire(a.workId, "a", { attempt: a.attempt })))
      yield* answers("Done", renew(b))
      yield* answers("Done", release(b, "finished"))
      yield* unchanged(a.workId, answers("AttemptEnded", acquire(a.workId, "a", { attempt: a.attempt })))
      yield* take(a.workId, "c")
    })
  }

  rule("an attempt of one holder is no attempt of another", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* unchanged(a.workId, answers("AttemptEnded", acquire(a.workId, "b", { attempt: a.attempt })))
    yield* answers("Done", renew(a))
  })

  rule("an attempt that is sent several times at once takes one lease", function*() {
    const workId = yield* freshId
    for (let term = 0; term < 5; term++) {
      const attempt = randomId()
      const replies = yield* Effect.forEach(
        Array.from({ length: 8 }),
        () => acquire(workId, "a", { attempt }),
        { concurrency: "unbounded" }
      )
      for (const { _tag } of replies) assert.include(["Acquired", "Contended"], _tag)
      const tokens = new Set(replies.flatMap((_) => _._tag === "Acquired" ? [_.fencingToken] : []))
      assert.strictEqual(tokens.size, 1)
      const again = yield* answers("Acquired", acquire(workId, "a", { attempt }))
      assert.isTrue(tokens.has(again.fencingToken))
      const [fencingToken] = tokens
      yield* answers("Done", release({ workId, holderId: "a", fencingToken }, "finished"))
    }
  })

  rule("an attempt belongs to its work ID", function*() {
    const attempt = randomId()
    const a = yield* take(yield* freshId, "a", { attempt })
    const b = yield* take(yield* freshId, "b", { attempt })
    yield* answers("Done", release(a, "finished"))
    yield* answers("Done", renew(b))
  })

  rule("an expired lease that a checkpoint has revived is its attempt's again", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* passTtls(1)
    yield* answers("Done", checkpoint(a, 1, "one"))
    const again = yield* answers("Acquired", acquire(a.workId, "a", { attempt: a.attempt }))
    assert.strictEqual(again.fencingToken, a.fencingToken)
  })

  whenTravelling("a work ID that was swept begins anew", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", forget(a))
    yield* pass("2 hours")
    yield* sweepAll
    yield* take(a.workId, "b")
  })
}

/** The semantics table of the port: who may do what, when. */
const operationsOfTerm = ({ rule, whenTravelling }: Rules) => {
  type Operation = (
    term: Backend.Term
  ) => Effect.Effect<{ readonly _tag: string }, BackendError, Backend.Backend | Store>
  // After its own release as finished, and as yielded. A term that is not current: of another holder, another token, or
  // another work ID.
  const columns = ["held", "expired", "finished", "yielded", "forgotten", "not current"] as const
  const table: Record<string, readonly [Operation, ...answers: ReadonlyArray<"Done" | "Expired" | "Fenced">]> = {
    "read": [read, "Done", "Done", "Done", "Done", "Done", "Fenced"],
    // Progress is worth more than tidiness: it revives an expired term.
    "checkpoint": [(_) => checkpoint(_, 2, "two"), "Done", "Done", "Expired", "Expired", "Expired", "Fenced"],
    "renew": [renew, "Done", "Expired", "Expired", "Expired", "Expired", "Fenced"],
    "release as finished": [finish, "Done", "Expired", "Done", "Expired", "Expired", "Fenced"],
    "release as finished with a state": [finishWithState, "Done", "Done", "Done", "Expired", "Expired", "Fenced"],
    "forget": [forget, "Done", "Done", "Done", "Done", "Done", "Fenced"]
  }

  interface Situation {
    readonly column: typeof columns[number]
    /** Brings a term into the situation, and answers whose operations are then tried. */
    readonly arrange: (a: Taken) => Effect.Effect<Backend.Term, unknown, Backend.Backend | Store>
    readonly when?: Rules["rule"]
  }
  const succeeded = (end: Ending) =>
    Effect.fnUntraced(function*(a: Taken) {
      yield* end(a)
      yield* answers("Done", checkpoint(yield* take(a.workId, "b"), 1, "of the successor"))
      return a
    })
  const situations: Record<string, Situation> = {
    "a term that is held": { column: "held", arrange: Effect.succeed },
    "a term that has expired": { column: "expired", arrange: (a) => Effect.as(passTtls(1), a) },
    "a term that was released as finished": {
      column: "finished",
      arrange: (a) => Effect.as(answers("Done", release(a, "finished")), a)
    },
    "a term that was released as yielded": {
      column: "yielded",
      arrange: (a) => Effect.as(answers("Done", release(a, "yielded")), a)
    },
    "a term that was forgotten": { column: "forgotten", arrange: (a) => Effect.as(answers("Done", forget(a)), a) },
    "an expired term with a successor": { column: "not current", arrange: succeeded(() => passTtls(1)) },
    "a released term with a successor": {
      column: "not current",
      arrange: succeeded((a) => answers("Done", release(a, "yielded")))
    },
    "a forgotten term with a successor": {
      column: "not current",
      arrange: succeeded((a) => answers("Done", forget(a)))
    },
    "a term whose successor has left": {
      column: "not current",
      arrange: Effect.fnUntraced(function*(a) {
        yield* passTtls(1)
        yield* answers("Done", release(yield* take(a.workId, "b"), "finished"))
        return a
      })
    },
    "a term that is another holder's": {
      column: "not current",
      arrange: (a) => Effect.succeed({ ...a, holderId: "b" })
    },
    "a term that was another holder's": {
      column: "not current",
      arrange: (a) => Effect.as(answers("Done", release(a, "finished")), { ...a, holderId: "b" })
    },
    "a larger token than the current one": {
      column: "not current",
      arrange: (a) => Effect.succeed({ ...a, fencingToken: a.fencingToken + 1n })
    },
    "a smaller token than the current one": {
      column: "not current",
      arrange: (a) => Effect.succeed({ ...a, fencingToken: a.fencingToken - 1n })
    },
    "a larger token than the last one": {
      column: "not current",
      arrange: (a) => Effect.as(answers("Done", release(a, "finished")), { ...a, fencingToken: a.fencingToken + 1n })
    },
    "a work ID that nobody has held": {
      column: "not current",
      arrange: (a) => Effect.map(freshId, (workId) => ({ ...a, workId }))
    },
    "a work ID that was swept": {
      when: whenTravelling,
      column: "not current",
      arrange: (a) =>
        answers("Done", release(a, "retired")).pipe(
          Effect.andThen(pass("2 hours")),
          Effect.andThen(sweepAll),
          Effect.as(a)
        )
    }
  }

  for (const [situation, { arrange, column, when = rule }] of Object.entries(situations)) {
    for (const [name, [operation, ...columnAnswers]] of Object.entries(table)) {
      const answer = columnAnswers[columns.indexOf(column)]
      const isRepeated = column === (name === "forget" ? "forgotten" : "finished")
      if (answer === "Done" && name !== "read" && !isRepeated) {
        when(`${name}, with ${situation}: Done`, function*() {
          const term = yield* arrange(yield* takeWithState("one"))
          yield* answers("Done", operation(term))
        })
      } else {
        when(`${name}, with ${situation}: ${answer}, and nothing changes`, function*() {
          const a = yield* takeWithState("one")
          const term = yield* arrange(a)
          yield* unchanged(a.workId, unchanged(term.workId, answers(answer, operation(term))))
        })
      }
    }
  }
}

const effectsOfOperations = ({ rule, whenSetBack, whenStanding }: Rules) => {
  rule("a read gives the last checkpoint", function*() {
    const a = yield* take(yield* freshId, "a")
    assert.deepStrictEqual(yield* read(a), { _tag: "Done", state: Option.none() })
    yield* answers("Done", checkpoint(a, 1, "one"))
    yield* answers("Done", checkpoint(a, 2, "two"))
    assert.strictEqual(yield* readText(a), "two")
    yield* passTtls(1)
    assert.strictEqual(yield* readText(a), "two")
  })

  rule("a read gives the state that the last term has left", function*() {
    const a = yield* takeWithState("one")
    yield* answers("Done", release(a, "abandoned"))
    assert.strictEqual(yield* readText(yield* take(a.workId, "b")), "one")
  })

  const extensions = { renewal: renew, checkpoint: (a: Backend.Term) => checkpoint(a, 1, "one") }
  for (const [name, extend] of Object.entries(extensions)) {
    rule(`a ${name} extends the lease by its ttl, counted from then`, function*() {
      const a = yield* take(yield* freshId, "a")
      yield* passTtls(0.75)
      yield* answers("Done", extend(a))
      yield* passTtls(0.75)
      yield* answers("Held", acquire(a.workId, "b"))
      yield* passTtls(0.25)
      yield* answers("Acquired", acquire(a.workId, "b"))
    })

    whenStanding(`a ${name} answers when the lease then expires`, function*() {
      const { ttl } = yield* Store
      const a = yield* take(yield* freshId, "a")
      yield* pass("1 seconds")
      const reply = yield* extend(a)
      assert.deepStrictEqual(reply, { _tag: "Done", expiresAt: a.expiresAt + 1000, yieldRequest: Option.none() })
      assert.strictEqual((yield* record(a.workId))?.expiresAt, a.expiresAt + 1000)
      yield* pass(ttl)
      yield* answers("Acquired", acquire(a.workId, "b"))
    })
  }

  whenSetBack("a term that has ended stays so although the store's clock was set back", function*(setBack) {
    for (const mode of exitModes) {
      const a = yield* takeWithState("one")
      yield* pass("1 hours")
      yield* answers("Done", checkpoint(a, 2, "two"))
      yield* answers("Done", release(a, mode))
      yield* setBack("30 minutes")
      yield* answers("Expired", renew(a))
      yield* answers("Expired", checkpoint(a, 3, "three"))
      assert.isFalse(yield* requestYield(a.workId))
      assert.strictEqual((yield* record(a.workId))?.status, mode)
      yield* answers("AttemptEnded", acquire(a.workId, "a", { attempt: a.attempt }))
      const b = yield* take(a.workId, "b")
      assert.deepStrictEqual(told(b.prior), left(a, mode, { state: "two" }))
    }
  })

  rule("a renewal may make a lease longer or shorter than it was", function*() {
    const a = yield* take(yield* freshId, "a")
    const b = yield* take(yield* freshId, "b")
    yield* answers("Done", renewFor(a, 2))
    yield* answers("Done", renewFor(b, 0.5))
    yield* passTtls(0.75)
    yield* answers("Held", acquire(a.workId, "c"))
    yield* answers("Acquired", acquire(b.workId, "c"))
    yield* passTtls(0.75)
    yield* answers("Held", acquire(a.workId, "c"))
  })

  rule("a checkpoint revives a lease that has expired and has no successor", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* passTtls(1.5)
    yield* answers("Done", checkpoint(a, 1, "one"))
    yield* answers("Held", acquire(a.workId, "b"))
    yield* answers("Done", renew(a))
    assert.strictEqual((yield* record(a.workId))?.status, "held")
  })

  rule("a renewal that was late does not revive it for the next one", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* passTtls(1)
    yield* answers("Expired", renew(a))
    yield* answers("Expired", renew(a))
    yield* answers("Acquired", acquire(a.workId, "b"))
  })

  rule("a release that carries a state ends a lease that has expired and has no successor", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* passTtls(1)
    yield* answers("Done", release(a, "yielded", { state: [1, "one"] }))
    const b = yield* take(a.workId, "b")
    assert.deepStrictEqual(told(b.prior), left(a, "yielded", { state: "one" }))
  })

  rule("a release without one comes too late then: the term has expired", function*() {
    const a = yield* takeWithState("one")
    yield* passTtls(1)
    yield* answers("Expired", release(a, "finished"))
    const b = yield* take(a.workId, "b")
    assert.deepStrictEqual(told(b.prior), left(a, "expired", { state: "one" }))
  })

  rule("an expired holder changes nothing of what its successor has written", function*() {
    const a = yield* takeWithState("one")
    yield* passTtls(1)
    const b = yield* take(a.workId, "b")
    yield* answers("Done", checkpoint(b, 1, "of b"))
    yield* fenced(a)
    assert.strictEqual(yield* readText(b), "of b")
    yield* answers("Done", renew(b))
  })
}

const checkpoints = ({ rule, whenStanding }: Rules) => {
  rule("one that arrives late never overwrites a newer one, and changes nothing", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", checkpoint(a, 3, "three"))
    yield* passTtls(0.5)
    for (const [sequence, text] of [[1, "one"], [2, "two"], [1, "one"]] as const) {
      yield* unchanged(a.workId, answers("Done", checkpoint(a, sequence, text)))
    }
    yield* answers("Done", checkpoint(a, 4, "four"))
    assert.strictEqual(yield* readText(a), "four")
  })

  rule("one that arrives late does not revive a lease that has expired", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", checkpoint(a, 2, "two"))
    yield* passTtls(1)
    yield* unchanged(a.workId, checkpoint(a, 1, "one"))
    yield* answers("Acquired", acquire(a.workId, "b"))
  })

  whenStanding("one that arrives late is told the expiry as it is", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", checkpoint(a, 2, "two"))
    yield* pass("1 seconds")
    const reply = yield* checkpoint(a, 1, "one")
    assert.deepStrictEqual(reply, { _tag: "Done", expiresAt: a.expiresAt, yieldRequest: Option.none() })
  })

  rule("the same one again only extends the lease", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", checkpoint(a, 1, "one"))
    yield* passTtls(0.75)
    yield* answers("Done", checkpoint(a, 1, { version: 2, bytes: bytesOf("another") }))
    assert.deepStrictEqual(yield* read(a), { _tag: "Done", state: Option.some(state("one")) })
    yield* passTtls(0.75)
    yield* answers("Held", acquire(a.workId, "b"))
  })

  rule("each term counts from one again", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", checkpoint(a, 7, "seven"))
    yield* answers("Done", release(a, "yielded"))
    const b = yield* take(a.workId, "b")
    yield* answers("Done", checkpoint(b, 1, "one of b"))
    assert.strictEqual(yield* readText(b), "one of b")
  })

  rule("sequences beyond what a double holds are told apart", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", checkpoint(a, 2n ** 53n + 1n, "newer"))
    yield* answers("Done", checkpoint(a, 2n ** 53n, "older"))
    assert.strictEqual(yield* readText(a), "newer")
    yield* answers("Done", checkpoint(a, 2n ** 53n + 2n, "newest"))
    assert.strictEqual(yield* readText(a), "newest")
  })

  rule("the state that a release carries follows the same order", function*() {
    for (const sequence of [1, 2]) {
      const a = yield* take(yield* freshId, "a")
      yield* answers("Done", checkpoint(a, 2, "two"))
      yield* answers("Done", release(a, "yielded", { state: [sequence, { version: 2, bytes: bytesOf("late") }] }))
      const b = yield* take(a.workId, "b")
      assert.deepStrictEqual(b.prior.state, Option.some(state("two")))
    }
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", checkpoint(a, 2, "two"))
    yield* answers("Done", release(a, "yielded", { state: [3, "three"] }))
    const b = yield* take(a.workId, "b")
    assert.deepStrictEqual(told(b.prior), left(a, "yielded", { state: "three" }))
  })

  rule("the version is stored with the state", function*() {
    const a = yield* take(yield* freshId, "a")
    for (const [index, version] of [1, 2, 2 ** 31 - 1].entries()) {
      const state = { version, bytes: bytesOf(`version ${version}`) }
      yield* answers("Done", checkpoint(a, index + 1, state))
      assert.deepStrictEqual(yield* read(a), { _tag: "Done", state: Option.some(state) })
    }
    const last = { version: 5, bytes: bytesOf("last") }
    yield* answers("Done", release(a, "finished", { state: [4, last] }))
    const b = yield* take(a.workId, "b")
    assert.deepStrictEqual(b.prior.state, Option.some(last))
  })
}

const releases = ({ rule }: Rules) => {
  for (const first of exits) {
    rule(
      `after a release as ${first}, the same again succeeds, another mode is refused, and the first stands`,
      function*() {
        const before = yield* takeWithState("one")
        yield* answers("Done", release(before, "yielded"))
        const a = yield* take(before.workId, "a")
        yield* answers("Done", release(a, first))
        for (const second of exits) {
          const answer = second === first ? "Done" : "Expired"
          yield* unchanged(a.workId, answers(answer, release(a, second)))
          yield* unchanged(a.workId, answers(answer, release(a, second, { state: [1, "too late"] })))
        }
        const b = yield* take(a.workId, "b")
        assert.deepStrictEqual(
          told(b.prior),
          first === "given-back"
            ? left(before, "yielded", { state: "one" })
            : left(a, first, { state: "one", count: first === "abandoned" ? 1 : 0 })
        )
      }
    )
  }

  for (const mode of exitModes) {
    rule(
      `a release as ${mode} that is sent again after a successor has begun succeeds, and changes nothing`,
      function*() {
        const a = yield* takeWithState("one")
        yield* answers("Done", release(a, mode))
        const b = yield* take(a.workId, "b")
        for (const second of exits) {
          const answer = second === mode ? "Done" : "Fenced"
          yield* unchanged(a.workId, answers(answer, release(a, second)))
          yield* unchanged(a.workId, answers(answer, release(a, second, { state: [9, "too late"] })))
        }
        yield* unchanged(a.workId, answers("Fenced", release({ ...a, holderId: "c" }, mode)))
        yield* unchanged(a.workId, answers("Fenced", release({ ...a, fencingToken: a.fencingToken - 1n }, mode)))
        yield* answers("Done", renew(b))
        assert.strictEqual(yield* readText(b), "one")

        yield* answers("Done", release(b, "given-back"))
        yield* unchanged(a.workId, answers("Done", release(a, mode)))
        yield* answers("Done", release(yield* take(a.workId, "c"), "finished"))
        yield* unchanged(a.workId, answers("Done", release(a, mode)))
        yield* take(a.workId, "d")
        yield* unchanged(a.workId, answers("Fenced", release(a, mode)))
      }
    )
  }

  rule("a release of the successor is not taken for the same release of the term before", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", release(a, "finished"))
    const b = yield* take(a.workId, "a")
    yield* answers("Done", release(b, "finished"))
    const c = yield* take(a.workId, "c")
    assert.deepStrictEqual(told(c.prior), left(b, "finished"))
  })
}

const givingBack = ({ rule }: Rules) => {
  const before: Record<string, Ending> = {
    "that nobody had held": () => Effect.void,
    "whose last term has expired": () => passTtls(1),
    "that was forgotten": forget,
    ...Object.fromEntries(exitModes.map((mode) => [`whose last term was ${mode}`, (a: Taken) => release(a, mode)]))
  }
  const endings: Record<string, (b: Taken) => Effect.Effect<unknown, unknown, Backend.Backend | Store>> = {
    "": () => Effect.void,
    ", also after it has expired": () => passTtls(1)
  }
  for (const [name, end] of Object.entries(before)) {
    for (const [when, wait] of Object.entries(endings)) {
      rule(`a lease ${name} is as it was when it is given back${when}`, function*() {
        const workId = yield* freshId
        if (name !== "that nobody had held") {
          yield* answers("Done", release(yield* take(workId, "z"), "abandoned"))
          const a = yield* take(workId, "a")
          yield* answers("Done", checkpoint(a, 1, "one"))
          yield* end(a)
        }
        const { prior: expected, ...b } = yield* take(workId, "b")
        yield* wait({ ...b, prior: expected })
        yield* answers("Done", release(b, "given-back"))
        yield* unchanged(workId, answers("Done", release(b, "given-back")))
        const c = yield* take(workId, "c")
        assert.deepStrictEqual(told(c.prior), told(expected))
        yield* answers("Done", release(c, "given-back"))
        const d = yield* take(workId, "d")
        assert.deepStrictEqual(told(d.prior), told(expected))
        assertIncreasing([b.fencingToken, c.fencingToken, d.fencingToken])
      })
    }
  }

  rule("a term that was given back is over", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", release(a, "given-back"))
    yield* unchanged(a.workId, answers("Expired", renew(a)))
    yield* unchanged(a.workId, answers("Expired", checkpoint(a, 1, "one")))
    assert.isFalse(yield* requestYield(a.workId))
  })

  rule("a term with a checkpoint has started: once it has expired, it is not given back", function*() {
    const a = yield* takeWithState("one")
    yield* passTtls(1)
    yield* unchanged(a.workId, answers("Expired", release(a, "given-back")))
    assert.deepStrictEqual(told((yield* take(a.workId, "b")).prior), left(a, "expired", { state: "one" }))
  })

  rule("a term that expired instead is told to the next holder", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* passTtls(1)
    const b = yield* take(a.workId, "b")
    yield* fenced(a, "given-back")
    yield* answers("Done", release(b, "given-back"))
    assert.deepStrictEqual(told((yield* take(a.workId, "c")).prior), left(a, "expired", { count: 1 }))
  })
}

const forgetting = ({ rule }: Rules) => {
  const endings: Record<string, Ending> = {
    "that is held": () => Effect.void,
    "that has expired": () => passTtls(1),
    "that was released": (a) => release(a, "abandoned")
  }
  for (const [name, end] of Object.entries(endings)) {
    rule(`clears the state, the exit and the prior of a lease ${name}, and frees it`, function*() {
      const before = yield* take(yield* freshId, "z")
      yield* answers("Done", release(before, "abandoned"))
      const a = yield* take(before.workId, "a")
      yield* answers("Done", checkpoint(a, 1, "one"))
      yield* end(a)
      yield* answers("Done", forget(a))
      assert.deepStrictEqual(yield* read(a), { _tag: "Done", state: Option.none() })
      const b = yield* take(a.workId, "b")
      assert.deepStrictEqual(told(b.prior), { exit: "none", by: undefined, state: undefined, count: 0 })
      assertIncreasing([a.fencingToken, b.fencingToken])
    })
  }

  rule("of a term without progress clears the count", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", release(a, "abandoned"))
    const b = yield* take(a.workId, "b")
    yield* answers("Done", forget(b))
    assert.strictEqual((yield* record(a.workId))?.termsWithoutProgress ?? 0, 0)
    assert.strictEqual((yield* take(a.workId, "c")).prior.termsWithoutProgress, 0)
  })

  rule("clears what the term before has left too", function*() {
    const a = yield* takeWithState("one")
    yield* answers("Done", release(a, "finished"))
    const b = yield* take(a.workId, "b")
    yield* answers("Done", forget(b))
    yield* fenced(a)
    const c = yield* take(a.workId, "c")
    assert.deepStrictEqual(told(c.prior), { exit: "none", by: undefined, state: undefined, count: 0 })
  })

  rule("is forgotten with the next term, which leaves a prior like any other", function*() {
    const a = yield* takeWithState("one")
    yield* answers("Done", forget(a))
    const b = yield* take(a.workId, "b")
    yield* answers("Done", checkpoint(b, 1, "of b"))
    yield* answers("Done", release(b, "yielded"))
    assert.deepStrictEqual(told((yield* take(a.workId, "c")).prior), left(b, "yielded", { state: "of b" }))
  })
}

const priors = ({ rule }: Rules) => {
  const endings: Record<Backend.ExitMode | "expired", Ending> = {
    finished: (a) => release(a, "finished"),
    abandoned: (a) => release(a, "abandoned"),
    retired: (a) => release(a, "retired"),
    yielded: (a) => release(a, "yielded"),
    expired: () => passTtls(1)
  }
  for (const [exit, end] of Object.entries(endings) as Array<[keyof typeof endings, Ending]>) {
    rule(
      `a term that ${exit === "expired" ? "has" : "was"} ${exit} tells its exit, its holder, its token and its state`,
      function*() {
        const a = yield* takeWithState("one")
        yield* end(a)
        const b = yield* take(a.workId, "b")
        assert.deepStrictEqual(told(b.prior), left(a, exit, { state: "one" }))
      }
    )

    rule(
      `a term that ${exit === "expired" ? "has" : "was"} ${exit} without a checkpoint leaves the state as it was`,
      function*() {
        const a = yield* takeWithState("one")
        yield* answers("Done", release(a, "yielded"))
        const b = yield* take(a.workId, "b")
        yield* end(b)
        const c = yield* take(a.workId, "c")
        const count = exit === "abandoned" || exit === "expired" ? 1 : 0
        assert.deepStrictEqual(told(c.prior), left(b, exit, { state: "one", count }))
      }
    )
  }

  rule("the state that a release carries is the one that is told", function*() {
    for (const exit of exitModes) {
      const a = yield* takeWithState("one")
      yield* answers("Done", release(a, exit, { state: [2, "two"] }))
      assert.deepStrictEqual(told((yield* take(a.workId, "b")).prior), left(a, exit, { state: "two" }))
    }
  })

  rule("does not change during the term, whatever its holder does", function*() {
    const before = yield* takeWithState("one")
    yield* answers("Done", release(before, "yielded"))
    const a = yield* take(before.workId, "a")
    const toldAgain = Effect.gen(function*() {
      const reply = yield* answers("Acquired", acquire(a.workId, "a", { attempt: a.attempt }))
      assert.deepStrictEqual({ ...told(reply.prior), state: undefined }, left(before, "yielded"))
    })
    yield* answers("Done", renew(a))
    yield* toldAgain
    yield* answers("Done", checkpoint(a, 1, "two"))
    yield* toldAgain
    assert.isTrue(yield* requestYield(a.workId))
    yield* toldAgain
  })

  rule("is of the last term only", function*() {
    const a = yield* takeWithState("one")
    yield* answers("Done", release(a, "finished"))
    const b = yield* take(a.workId, "b")
    yield* answers("Done", checkpoint(b, 1, "two"))
    yield* passTtls(1)
    const c = yield* take(a.workId, "c")
    yield* answers("Done", release(c, "yielded"))
    assert.deepStrictEqual(told((yield* take(a.workId, "d")).prior), left(c, "yielded", { state: "two" }))
  })
}

const termsWithoutProgress = ({ rule }: Rules) => {
  const afterCheckpoint = (end: Ending): Ending => (a) => Effect.andThen(checkpoint(a, 1, "one"), end(a))
  const released = (exit: Backend.ReleaseRequest["exit"], options?: Parameters<typeof release>[2]): Ending => (a) =>
    release(a, exit, options)
  // The count before is 2.
  const table: ReadonlyArray<readonly [ending: string, end: Ending, count: number]> = [
    ["expired", () => passTtls(1), 3],
    ["expired after a checkpoint", afterCheckpoint(() => passTtls(1)), 0],
    ["was abandoned", released("abandoned"), 3],
    ["was abandoned after a checkpoint", afterCheckpoint(released("abandoned")), 0],
    ["was abandoned with a state", released("abandoned", { state: [1, "one"] }), 0],
    ["was interrupted", released("abandoned", { interrupted: true }), 2],
    ["was interrupted after a checkpoint", afterCheckpoint(released("abandoned", { interrupted: true })), 0],
    ["was yielded", released("yielded"), 2],
    ["was yielded after a checkpoint", afterCheckpoint(released("yielded")), 0],
    ["was yielded with a state", released("yielded", { state: [1, "one"] }), 0],
    ["was finished", released("finished"), 0],
    ["was finished with a state", released("finished", { state: [1, "one"] }), 0],
    ["was retired", released("retired"), 0],
    ["was given back", released("given-back"), 2],
    ["expired and was given back", (a) => Effect.andThen(passTtls(1), release(a, "given-back")), 2],
    ["was forgotten", forget, 0]
  ]
  for (const [ending, end, count] of table) {
    rule(`are ${count} after 2, if the next term ${ending}`, function*() {
      const workId = yield* freshId
      for (const expected of [0, 1]) {
        const a = yield* take(workId, "a")
        assert.strictEqual(a.prior.termsWithoutProgress, expected)
        yield* answers("Done", release(a, "abandoned"))
      }
      const b = yield* take(workId, "b")
      assert.strictEqual(b.prior.termsWithoutProgress, 2)
      yield* end(b)
      assert.strictEqual((yield* record(workId))?.termsWithoutProgress ?? 0, count)
      assert.strictEqual((yield* take(workId, "c")).prior.termsWithoutProgress, count)
    })
  }
}

const yieldRequests = ({ rule }: Rules) => {
  const requested = (reply: Backend.ExtendReply) => {
    assert.strictEqual(reply._tag, "Done")
    return Option.map((reply as Extract<Backend.ExtendReply, { _tag: "Done" }>).yieldRequest, (_) => _.remaining)
  }
  const remaining = (reply: Backend.ExtendReply) => Option.getOrThrow(Option.flatten(requested(reply)))

  rule("reach the holder with each renewal and each checkpoint", function*() {
    const a = yield* take(yield* freshId, "a")
    assert.deepStrictEqual(requested(yield* renew(a)), Option.none())
    assert.deepStrictEqual(requested(yield* checkpoint(a, 1, "one")), Option.none())
    assert.isTrue(yield* requestYield(a.workId))
    for (let i = 0; i < 2; i++) {
      assert.deepStrictEqual(requested(yield* renew(a)), Option.some(Option.none()))
      assert.deepStrictEqual(requested(yield* checkpoint(a, 2, "two")), Option.some(Option.none()))
      // One that arrives late too.
      assert.deepStrictEqual(requested(yield* checkpoint(a, 1, "one")), Option.some(Option.none()))
    }
  })

  rule("with a deadline tell how long is left, which shrinks to nothing", function*() {
    const { ttl } = yield* Store
    const a = yield* take(yield* freshId, "a")
    assert.isTrue(yield* requestYield(a.workId, Duration.times(ttl, 1.5)))
    for (const left of [1.5, 1, 0.5, 0, 0]) {
      yield* assertNear(remaining(yield* renew(a)), Duration.times(ttl, left))
      yield* assertNear(remaining(yield* checkpoint(a, 1, "one")), Duration.times(ttl, left))
      yield* passTtls(0.5)
    }
  })

  rule("extend no lease", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* passTtls(0.5)
    assert.isTrue(yield* requestYield(a.workId))
    yield* passTtls(0.5)
    yield* answers("Acquired", acquire(a.workId, "b"))
  })

  rule("are replaced by later ones", function*() {
    const { ttl } = yield* Store
    const a = yield* take(yield* freshId, "a")
    assert.isTrue(yield* requestYield(a.workId, Duration.times(ttl, 2)))
    assert.isTrue(yield* requestYield(a.workId, ttl))
    yield* assertNear(remaining(yield* renew(a)), ttl)
    assert.isTrue(yield* requestYield(a.workId))
    assert.deepStrictEqual(requested(yield* renew(a)), Option.some(Option.none()))
  })

  const endings: Record<string, Ending> = {
    "has expired": () => passTtls(1),
    "was released": (a) => answers("Done", release(a, "yielded")),
    "was given back": (a) => answers("Done", release(a, "given-back")),
    "was forgotten": (a) => answers("Done", forget(a))
  }
  for (const [ending, end] of Object.entries(endings)) {
    rule(`find nobody where the lease ${ending}, and do not wait for the next holder`, function*() {
      const a = yield* take(yield* freshId, "a")
      yield* end(a)
      yield* unchanged(
        a.workId,
        Effect.gen(function*() {
          assert.isFalse(yield* requestYield(a.workId))
          assert.isFalse(yield* requestYield(a.workId, Duration.minutes(1)))
        })
      )
      const b = yield* take(a.workId, "b")
      assert.deepStrictEqual(requested(yield* renew(b)), Option.none())
    })

    rule(`end with a term that ${ending}`, function*() {
      const a = yield* take(yield* freshId, "a")
      assert.isTrue(yield* requestYield(a.workId, Duration.minutes(1)))
      yield* end(a)
      const b = yield* take(a.workId, "b")
      assert.deepStrictEqual(requested(yield* renew(b)), Option.none())
      assert.deepStrictEqual(requested(yield* checkpoint(b, 1, "one")), Option.none())
      assert.isTrue(yield* requestYield(a.workId))
      assert.deepStrictEqual(requested(yield* renew(b)), Option.some(Option.none()))
    })
  }

  rule("find nobody where nobody has ever held the lease, and leave nothing behind", function*() {
    const workId = yield* freshId
    assert.isFalse(yield* requestYield(workId))
    assert.isUndefined(yield* record(workId))
  })

  rule("reach the holder of that work ID only", function*() {
    const a = yield* take(yield* freshId, "a")
    const b = yield* take(yield* freshId, "a")
    assert.isTrue(yield* requestYield(a.workId))
    assert.deepStrictEqual(requested(yield* renew(b)), Option.none())
  })
}

const batches = ({ rule }: Rules) => {
  rule("are answered in their order, and a refused item does not hold up its neighbours", function*() {
    const { ttl } = yield* Store
    const backend = yield* Backend.Backend
    const prefix = `${yield* freshId}/`
    const others = yield* take(`${prefix}b`, "other")
    const ended = yield* take(`${prefix}e`, "a")
    yield* answers("Done", release(ended, "finished"))

    // Not in the order of their bytes, in which a store may keep them.
    const again = yield* take(`${prefix}g`, "a")
    const acquires: NonEmptyReadonlyArray<readonly [key: string, attempt: string, answer: string]> = [
      ["f", randomId(), "Acquired"],
      ["g", again.attempt, "Acquired"],
      ["b", randomId(), "Held"],
      ["a", randomId(), "Acquired"],
      ["e", ended.attempt, "AttemptEnded"],
      ["c", randomId(), "Acquired"]
    ]
    const acquired = yield* backend.acquire(
      map(acquires, ([key, attempt]) => ({ workId: prefix + key, holderId: "a", attempt, ttl }))
    )
    assert.deepStrictEqual(tags(acquired), acquires.map(([, , answer]) => answer))
    const [f, g, , a, , c] = acquires.map(([key], i): Backend.Term => ({
      workId: prefix + key,
      holderId: "a",
      fencingToken: (acquired[i] as Backend.Acquired).fencingToken
    }))
    assert.strictEqual(g.fencingToken, again.fencingToken)
    const expired = yield* take(`${prefix}d`, "a", { ttls: 0.1 })
    yield* passTtls(0.5)

    const rows: NonEmptyReadonlyArray<
      readonly [term: Backend.Term, renew: string, checkpoint: string, exit: Backend.ExitMode, release: string]
    > = [
      [f, "Done", "Done", "yielded", "Done"],
      [{ ...others, holderId: "a" }, "Fenced", "Fenced", "finished", "Fenced"],
      [a, "Done", "Done", "retired", "Done"],
      [ended, "Expired", "Expired", "yielded", "Expired"],
      [{ ...a, workId: `${prefix}nobody's` }, "Fenced", "Fenced", "finished", "Fenced"],
      [expired, "Expired", "Done", "abandoned", "Done"],
      [{ ...c, fencingToken: c.fencingToken + 1n }, "Fenced", "Fenced", "finished", "Fenced"]
    ]
    const renewed = yield* backend.renew(map(rows, ([term]) => ({ ...termOf(term), ttl })))
    assert.deepStrictEqual(tags(renewed), rows.map(([, answer]) => answer))
    const stored = yield* backend.checkpoint(
      map(rows, ([term], i) => ({ ...termOf(term), ttl, sequence: 1n, state: state(`state ${i}`) }))
    )
    assert.deepStrictEqual(tags(stored), rows.map(([, , answer]) => answer))
    const texts = yield* Effect.forEach([f, a, expired, others, ended, c], readText)
    assert.deepStrictEqual(texts, ["state 0", "state 2", "state 5", undefined, undefined, undefined])
    const released = yield* backend.release(map(rows, ([term, , , exit], i) => ({
      ...termOf(term),
      exit,
      interrupted: false,
      state: i === 2 ? Option.some({ sequence: 2n, state: state("last") }) : Option.none()
    })))
    assert.deepStrictEqual(tags(released), rows.map(([, , , , answer]) => answer))
    const statuses = yield* Effect.forEach([f, a, expired, others, ended, c], ({ workId }) => statusOf(workId))
    assert.deepStrictEqual(
      statuses.map(({ status }) => status),
      ["yielded", "retired", "abandoned", "held", "finished", "held"]
    )
    assert.deepStrictEqual(told((yield* take(a.workId, "b")).prior), left(a, "retired", { state: "last" }))
  })

  rule("of hundreds of items are answered one by one", function*() {
    const { ttl } = yield* Store
    const backend = yield* Backend.Backend
    const prefix = yield* freshId
    const requests = Array.from({ length: 600 }, (_, i) => ({
      // In another order than their bytes'.
      workId: `${prefix}/${(i * 7) % 600}`,
      holderId: `holder-${i}`,
      attempt: randomId(),
      ttl
    })) as unknown as NonEmptyReadonlyArray<Backend.AcquireRequest>
    const acquired = yield* backend.acquire(requests)
    const terms = map(requests, ({ workId, holderId }, i) => {
      const reply = acquired[i]
      return { workId, holderId, fencingToken: "fencingToken" in reply ? reply.fencingToken : 0n }
    })
    const expectAll = (replies: ReadonlyArray<{ readonly _tag: string }>, answer: string) => {
      assert.strictEqual(replies.length, 600)
      assert.deepStrictEqual(replies.filter((_) => _._tag !== answer), [])
    }
    expectAll(acquired, "Acquired")
    expectAll(yield* backend.renew(map(terms, (term) => ({ ...term, ttl }))), "Done")
    expectAll(
      yield* backend.checkpoint(map(terms, (term, i) => ({ ...term, ttl, sequence: 1n, state: state(`state ${i}`) }))),
      "Done"
    )
    expectAll(
      yield* backend.release(
        map(terms, (term) => ({ ...term, exit: "finished" as const, interrupted: false, state: Option.none() }))
      ),
      "Done"
    )
    const again = yield* backend.acquire(map(requests, (request) => ({ ...request, attempt: randomId() })))
    assert.deepStrictEqual(
      again.map((reply) => "prior" in reply ? told(reply.prior) : reply),
      terms.map((term, i) => left(term, "finished", { state: `state ${i}` }))
    )
  })

  rule("that cross each other are all answered: nothing deadlocks", function*() {
    const { ttl } = yield* Store
    const backend = yield* Backend.Backend
    const prefix = yield* freshId
    const workIds = Array.from({ length: 600 }, (_, i) => `${prefix}/${i}`)
    const crossing = <A, B>(items: ReadonlyArray<A>, send: (items: NonEmptyReadonlyArray<A>, i: number) => B) =>
      Array.from(
        { length: 8 },
        (_, i) => send((i % 2 === 0 ? items : items.slice().reverse()) as unknown as NonEmptyReadonlyArray<A>, i)
      )

    const acquired = yield* Effect.all(
      crossing(
        workIds,
        (workIds, i) =>
          backend.acquire(map(workIds, (workId) => ({ workId, holderId: `${i}`, attempt: randomId(), ttl })))
      ),
      { concurrency: "unbounded" }
    )
    for (const { _tag } of acquired.flat()) assert.include(["Acquired", "Contended", "Held"], _tag)
    assert.strictEqual(acquired.flat().filter(({ _tag }) => _tag === "Acquired").length, workIds.length)

    const terms = acquired.flatMap((replies, i) =>
      replies.flatMap((reply, j): ReadonlyArray<Backend.Term> =>
        reply._tag !== "Acquired" ? [] : [{
          workId: workIds[i % 2 === 0 ? j : workIds.length - 1 - j],
          holderId: `${i}`,
          fencingToken: reply.fencingToken
        }]
      )
    )
    const extended = yield* Effect.all(
      crossing(terms, (terms, i) =>
        i % 4 < 2
          ? backend.renew(map(terms, (term) => ({ ...term, ttl })))
          : backend.checkpoint(map(terms, (term) => ({ ...term, ttl, sequence: BigInt(i), state: state("one") })))),
      { concurrency: "unbounded" }
    )
    for (const { _tag } of extended.flat()) assert.include(["Done", "Busy"], _tag)
  })

  rule("of different work IDs do not get in each other's way", function*() {
    const terms = yield* Effect.forEach(Array.from({ length: 40 }), () => Effect.flatMap(freshId, (_) => take(_, "a")))
    for (const operation of [renew, (term: Backend.Term) => checkpoint(term, 1, "one"), finish]) {
      yield* Effect.forEach(terms, (term) => answers("Done", operation(term)), { concurrency: "unbounded" })
    }
    yield* Effect.forEach(terms, (term) => take(term.workId, "b"), { concurrency: "unbounded" })
  })
}

const namesAndBytes = ({ rule }: Rules) => {
  const hostile: Record<string, (prefix: string) => string> = {
    "quotes": (prefix) => `${prefix}'"\`''""$$`,
    "SQL": (prefix) => `${prefix}'; DROP TABLE worklease; --`,
    "braces and commas": (prefix) => `${prefix}{a,"b",NULL}[0](1)<2>`,
    "NULL": (prefix) => `${prefix}NULL`,
    "spaces": (prefix) => `${prefix}  two  spaces `,
    "spaces, one less": (prefix) => `${prefix}  two  spaces`,
    "emoji": (prefix) => `${prefix}😀👩‍👩‍👧🏴󠁧󠁢󠁥󠁮󠁧󠁿`,
    "wildcards": (prefix) => `${prefix}%_*?`,
    "backslashes": (prefix) => `${prefix}\\\\n\\x41\\u0041\\`,
    "newlines and tabs": (prefix) => `${prefix}\r\n\t\u000b`,
    "control characters": (prefix) => `${prefix}\u0001\u001f\u007f\u0085`,
    "colons and slashes": (prefix) => `${prefix}:a/b//../c:`,
    "lower case": (prefix) => `${prefix}straße`,
    "upper case": (prefix) => `${prefix}STRASSE`,
    "a composed letter": (prefix) => `${prefix}\u00e9`,
    "a decomposed letter": (prefix) => `${prefix}e\u0301`,
    "a letter from right to left": (prefix) => `${prefix}\u202eא`,
    "a byte order mark": (prefix) => `${prefix}\ufeff`,
    "digits": (prefix) => `${prefix}007`,
    "other digits": (prefix) => `${prefix}7`,
    "512 bytes of letters": (prefix) => prefix.padEnd(512, "x"),
    "512 bytes, of which most are of four bytes each": (prefix) =>
      prefix.padEnd(Math.ceil(prefix.length / 4) * 4, "x") + "𝕏".repeat(Math.floor((512 - prefix.length) / 4))
  }

  rule("work IDs with any characters are kept apart, and come back as they were", function*() {
    const { ttl } = yield* Store
    const backend = yield* Backend.Backend
    const prefix = yield* freshId
    const workIds = Object.values(hostile).map((make) => make(prefix))
    assert.strictEqual(new Set(workIds).size, workIds.length)
    const requests = workIds.map((workId) => ({ workId, holderId: "a", attempt: randomId(), ttl }))
    const replies = yield* backend.acquire(requests as unknown as NonEmptyReadonlyArray<Backend.AcquireRequest>)
    for (const [i, workId] of workIds.entries()) {
      const reply = replies[i]
      assert.strictEqual(reply._tag, "Acquired", workId)
      if (reply._tag !== "Acquired") return
      const term = { workId, holderId: "a", fencingToken: reply.fencingToken }
      yield* answers("Done", renew(term))
      yield* answers("Done", checkpoint(term, 1, `state ${i}`))
      yield* answers("Held", acquire(workId, "b"))
      assert.isTrue(yield* requestYield(workId))
    }
    const records = yield* backend.list({ prefix, after: Option.none(), limit: 100 })
    assert.deepStrictEqual(records.map((_) => _.workId), workIds.slice().sort(compareBytes))
    for (const [i, workId] of workIds.entries()) {
      const reply = replies[i]
      if (reply._tag !== "Acquired") return
      const term = { workId, holderId: "a", fencingToken: reply.fencingToken }
      assert.strictEqual(yield* readText(term), `state ${i}`)
      yield* answers("Done", i % 2 === 0 ? release(term, "yielded") : forget(term))
      const b = yield* take(workId, "b")
      assert.deepStrictEqual(
        told(b.prior),
        i % 2 === 0
          ? left(term, "yielded", { state: `state ${i}` })
          : { exit: "none", by: undefined, state: undefined, count: 0 }
      )
    }
  })

  rule("holder IDs with any characters are kept apart, and come back as they were", function*() {
    const holderIds = Object.values(hostile).map((make) => make("holder"))
    assert.strictEqual(new Set(holderIds).size, holderIds.length)
    for (const [i, holderId] of holderIds.entries()) {
      const a = yield* take(yield* freshId, holderId)
      const other = holderIds[(i + 1) % holderIds.length]
      yield* answers("Fenced", renew({ ...a, holderId: other }))
      const refused = yield* answers("Held", acquire(a.workId, other))
      assert.strictEqual(refused.holderId, holderId)
      assert.strictEqual((yield* record(a.workId))?.holderId, holderId)
      yield* answers("Done", release(a, "finished"))
      assert.deepStrictEqual(told((yield* take(a.workId, other)).prior), left(a, "finished"))
    }
  })

  const bytes: Record<string, Uint8Array> = {
    "no bytes at all": new Uint8Array(0),
    "every byte": Uint8Array.from({ length: 256 }, (_, i) => i),
    "nothing but zeros": new Uint8Array(1000),
    "what is not UTF-8": Uint8Array.of(0xff, 0xfe, 0xc3, 0x28, 0xed, 0xa0, 0x80),
    "what looks like an escape": bytesOf("\\x41\\\\000'\"{}"),
    "a mebibyte": Uint8Array.from({ length: 1024 * 1024 }, (_, i) => (i * 31 + (i >> 8)) & 0xff)
  }
  for (const [name, expected] of Object.entries(bytes)) {
    rule(`a state of ${name} comes back as it was`, function*() {
      const a = yield* take(yield* freshId, "a")
      const stored = { version: 1, bytes: expected }
      yield* answers("Done", checkpoint(a, 1, stored))
      const readBack = yield* read(a)
      assertBytes(readBack._tag === "Done" ? readBack.state : Option.none(), expected)
      yield* answers("Done", checkpoint(a, 2, "another"))
      yield* answers("Done", release(a, "finished", { state: [3, stored] }))
      const backend = yield* Backend.Backend
      const [listed] = yield* backend.list({ prefix: a.workId, after: Option.none(), limit: 1 })
      assertBytes(listed.state, expected)
      assertBytes((yield* take(a.workId, "b")).prior.state, expected)
    })
  }

  rule("what is read of a state is the reader's own", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", checkpoint(a, 1, "one"))
    const first = yield* read(a)
    if (first._tag === "Done" && Option.isSome(first.state)) first.state.value.bytes.fill(0)
    assert.strictEqual(yield* readText(a), "one")
    yield* answers("Done", release(a, "yielded"))
    const b = yield* take(a.workId, "b")
    if (Option.isSome(b.prior.state)) b.prior.state.value.bytes.fill(0)
    const backend = yield* Backend.Backend
    const [listed] = yield* backend.list({ prefix: a.workId, after: Option.none(), limit: 1 })
    if (Option.isSome(listed.state)) listed.state.value.bytes.fill(0)
    assert.strictEqual(yield* readText(b), "one")
  })

  rule("a view of a larger buffer is stored without what surrounds it", function*() {
    const a = yield* take(yield* freshId, "a")
    const bytes = bytesOf("before one after").subarray(7, 10)
    yield* answers("Done", checkpoint(a, 1, { version: 1, bytes }))
    assert.strictEqual(yield* readText(a), "one")
  })
}

const lists = ({ rule, whenStanding }: Rules) => {
  /** Takes a lease for each, and lists what the options find, without the prefix. */
  const found = (
    prefix: string,
    options: { readonly prefix?: string; readonly after?: string; readonly limit?: number }
  ) =>
    Effect.gen(function*() {
      const backend = yield* Backend.Backend
      const records = yield* backend.list({
        prefix: prefix + (options.prefix ?? ""),
        after: Option.map(Option.fromUndefinedOr(options.after), (after) => prefix + after),
        limit: options.limit ?? 100
      })
      return records.map((_) => _.workId.slice(prefix.length))
    })

  rule("are in the order of their bytes, by prefix, from any point on, and no longer than asked for", function*() {
    const prefix = `${yield* freshId}/`
    // UTF-16 orders the last two the other way round; most collations all of them.
    const sorted = ["%", "A", "Z", "_", "a", "a b", "aB", "ab", "b", "é", "ﾞ", "😀"]
    for (const key of sorted.slice().reverse()) yield* take(prefix + key, "a")
    assert.deepStrictEqual(yield* found(prefix, {}), sorted)
    assert.deepStrictEqual(yield* found(prefix, { prefix: "a" }), ["a", "a b", "aB", "ab"])
    assert.deepStrictEqual(yield* found(prefix, { prefix: "😀" }), ["😀"])
    assert.deepStrictEqual(yield* found(prefix, { prefix: "ab", after: "ab" }), [])
    assert.deepStrictEqual(yield* found(prefix, { prefix: "none" }), [])
    assert.deepStrictEqual(yield* found(prefix, { after: "b" }), ["é", "ﾞ", "😀"])
    // It need not be there itself.
    assert.deepStrictEqual(yield* found(prefix, { after: "c" }), ["é", "ﾞ", "😀"])
    assert.deepStrictEqual(yield* found(prefix, { prefix: "a", after: "Z" }), ["a", "a b", "aB", "ab"])
    assert.deepStrictEqual(yield* found(prefix, { limit: 3 }), ["%", "A", "Z"])
    assert.deepStrictEqual(yield* found(prefix, { limit: 3, after: "Z" }), ["_", "a", "a b"])
    assert.deepStrictEqual(yield* found(prefix, { prefix: "a", limit: 1, after: "a b" }), ["aB"])
  })

  rule("take % and _ and \\ of a prefix for what they are", function*() {
    const prefix = `${yield* freshId}/`
    for (const key of ["a%b", "a_b", "a\\b", "axb", "%", "_"]) yield* take(prefix + key, "a")
    assert.deepStrictEqual(yield* found(prefix, { prefix: "a%" }), ["a%b"])
    assert.deepStrictEqual(yield* found(prefix, { prefix: "a_" }), ["a_b"])
    assert.deepStrictEqual(yield* found(prefix, { prefix: "a\\" }), ["a\\b"])
    assert.deepStrictEqual(yield* found(prefix, { prefix: "%" }), ["%"])
    assert.deepStrictEqual(yield* found(prefix, { prefix: "_" }), ["_"])
  })

  rule("with an empty prefix begin with the first of all", function*() {
    const a = yield* take(yield* freshId, "a")
    const backend = yield* Backend.Backend
    const all = yield* backend.list({ prefix: "", after: Option.none(), limit: 100_000 })
    assert.isTrue(all.some((_) => _.workId === a.workId))
    assert.deepStrictEqual(yield* backend.list({ prefix: "", after: Option.none(), limit: 1 }), all.slice(0, 1))
  })

  rule("tell who holds a lease, and how its last term has ended", function*() {
    const a = yield* takeWithState("one")
    assert.deepStrictEqual(yield* statusOf(a.workId), { status: "held", by: "a", token: a.fencingToken })
    yield* passTtls(1)
    assert.deepStrictEqual(yield* statusOf(a.workId), { status: "expired", by: "a", token: a.fencingToken })
    let last = yield* take(a.workId, "b")
    for (const mode of exitModes) {
      yield* answers("Done", release(last, mode))
      assert.deepStrictEqual(yield* statusOf(a.workId), { status: mode, by: last.holderId, token: last.fencingToken })
      assert.strictEqual((yield* record(a.workId))?.text, "one")
      last = yield* take(a.workId, mode)
    }
  })

  whenStanding("tell when a lease expires, and when its term has ended", function*() {
    const a = yield* take(yield* freshId, "a")
    assert.strictEqual((yield* record(a.workId))?.expiresAt, a.expiresAt)
    yield* pass("1 seconds")
    yield* answers("Done", release(a, "finished"))
    const { ttl } = yield* Store
    assert.strictEqual((yield* record(a.workId))?.expiresAt, a.expiresAt - Duration.toMillis(ttl) + 1000)
  })

  rule("show nothing of a term that was given back", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", release(a, "given-back"))
    assert.isUndefined((yield* record(a.workId))?.status)
    const b = yield* takeWithState("one", a.workId)
    yield* answers("Done", release(b, "yielded"))
    yield* answers("Done", release(yield* take(a.workId, "c"), "given-back"))
    assert.deepStrictEqual(yield* statusOf(a.workId), { status: "yielded", by: b.holderId, token: b.fencingToken })
  })

  rule("show nothing of a term that was forgotten", function*() {
    const a = yield* takeWithState("one")
    yield* answers("Done", forget(a))
    const forgotten = yield* record(a.workId)
    assert.isUndefined(forgotten?.status)
    assert.isUndefined(forgotten?.text)
  })

  rule("tell of a held lease the terms without progress that its holder was told", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", release(a, "abandoned"))
    const b = yield* take(a.workId, "b")
    assert.strictEqual((yield* record(a.workId))?.termsWithoutProgress, 1)
    yield* answers("Done", renew(b))
    assert.strictEqual((yield* record(a.workId))?.termsWithoutProgress, 1)
  })
}

const sweeps = ({ whenStanding, whenTravelling }: Rules) => {
  const sweep = (retention: Duration.Input, limit = 1000) =>
    Effect.flatMap(Backend.Backend, (_) => _.sweep({ retention: Duration.fromInputUnsafe(retention), limit }))

  /** Sweeps what earlier tests have left, so that what is counted is this test's. */
  const clean = Effect.andThen(pass("2 hours"), sweepAll)

  whenTravelling("delete what was retired or forgotten, and nothing else", function*() {
    yield* clean
    const endings: Record<string, Ending> = {
      retired: (a) => release(a, "retired"),
      forgotten: forget,
      finished: (a) => release(a, "finished"),
      abandoned: (a) => release(a, "abandoned"),
      yielded: (a) => release(a, "yielded"),
      expired: () => Effect.void,
      "retired, then given back": (a) =>
        Effect.gen(function*() {
          yield* release(a, "retired")
          yield* release(yield* take(a.workId, "b"), "given-back")
        }),
      "given back by the first that took it": (a) => release(a, "given-back"),
      "finished, then given back": (a) =>
        Effect.gen(function*() {
          yield* release(a, "finished")
          yield* release(yield* take(a.workId, "b"), "given-back")
        }),
      "retired, then taken again": (a) =>
        Effect.gen(function*() {
          yield* release(a, "retired")
          yield* renewFor(yield* take(a.workId, "b"), 100_000)
        })
    }
    const workIds: Record<string, string> = {}
    for (const [name, end] of Object.entries(endings)) {
      const a = yield* take(yield* freshId, "a")
      workIds[name] = a.workId
      yield* end(a)
    }
    yield* pass("61 minutes")
    assert.strictEqual(yield* sweep(0), 4)
    const left: Array<string> = []
    for (const [name, workId] of Object.entries(workIds)) {
      if ((yield* record(workId)) !== undefined) left.push(name)
    }
    assert.deepStrictEqual(left, [
      "finished",
      "abandoned",
      "yielded",
      "expired",
      "finished, then given back",
      "retired, then taken again"
    ])
    assert.strictEqual(yield* sweep(0), 0)
  })

  whenTravelling("wait for the retention, and for an hour at least", function*() {
    yield* clean
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", release(a, "retired"))
    yield* pass("59 minutes")
    assert.strictEqual(yield* sweep(0), 0)
    yield* pass("2 minutes")
    assert.strictEqual(yield* sweep("3 hours"), 0)
    yield* pass("118 minutes")
    assert.strictEqual(yield* sweep("3 hours"), 0)
    yield* pass("2 minutes")
    assert.strictEqual(yield* sweep("3 hours"), 1)
    assert.isUndefined(yield* record(a.workId))
  })

  whenTravelling("count from the end of a term, whenever its lease was to expire", function*() {
    yield* clean
    const early = yield* take(yield* freshId, "a")
    const late = yield* take(yield* freshId, "a")
    yield* pass("2 hours")
    yield* answers("Done", release(early, "retired", { state: [1, "one"] }))
    yield* answers("Done", forget(late))
    for (const end of [(a: Backend.Term) => release(a, "retired"), forget]) {
      const a = yield* take(yield* freshId, "a")
      yield* renewFor(a, 100_000)
      yield* answers("Done", end(a))
    }
    yield* pass("50 minutes")
    assert.strictEqual(yield* sweep(0), 0)
    // The end stands.
    yield* answers("Done", release(early, "retired"))
    yield* answers("Done", forget(late))
    yield* pass("11 minutes")
    assert.strictEqual(yield* sweep(0), 4)
  })

  whenStanding("delete what ended longer ago than that, not just as long", function*() {
    yield* clean
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", release(a, "retired"))
    yield* pass("1 hours")
    assert.strictEqual(yield* sweep(0), 0)
    yield* pass("1 millis")
    assert.strictEqual(yield* sweep(0), 1)
  })

  whenTravelling("delete no more than their limit at a time", function*() {
    yield* clean
    for (let i = 0; i < 5; i++) yield* answers("Done", forget(yield* take(yield* freshId, "a")))
    yield* pass("61 minutes")
    assert.strictEqual(yield* sweep(0, 2), 2)
    assert.strictEqual(yield* sweep(0, 2), 2)
    assert.strictEqual(yield* sweep(0, 2), 1)
    assert.strictEqual(yield* sweep(0, 2), 0)
  })
}

const wakeups = ({ rule: ruleOfAll }: Rules) => {
  type Subscribe = (workId: string) => Effect.Effect<Effect.Effect<void>, never, Scope.Scope>

  // They are optional: without them, waiters poll.
  const rule: Rule<[subscribe: Subscribe]> = (name, body) =>
    ruleOfAll(`${name}, if the backend has wake-ups`, function*() {
      const { wakeups } = yield* Backend.Backend
      if (Option.isSome(wakeups)) yield* Effect.gen(() => body(wakeups.value))
    })

  const waitFor = Effect.fnUntraced(function*(what: string, wakeup: Effect.Effect<void>) {
    const waiting = yield* Effect.forkScoped(wakeup, { startImmediately: true })
    yield* eventually(what, Effect.sync(() => isOver(waiting)))
  })

  /** Waits for the hint that follows the first. */
  const subscribed = Effect.fnUntraced(function*(subscribe: Subscribe, workId: string) {
    const wakeup = yield* subscribe(workId)
    yield* waitFor("the subscription stands", wakeup)
    return yield* Effect.forkScoped(wakeup, { startImmediately: true })
  })

  rule("the first hint comes by itself, whether the work ID is free, held or unknown", function*(subscribe) {
    const a = yield* take(yield* freshId, "a")
    const released = yield* take(yield* freshId, "a")
    yield* answers("Done", release(released, "yielded"))
    for (const workId of [a.workId, released.workId, yield* freshId, a.workId]) {
      yield* waitFor("the first hint", yield* subscribe(workId))
    }
  })

  const endings: Record<string, (a: Taken) => Effect.Effect<{ readonly _tag: string }, BackendError, Backend.Backend>> =
    {
      release: (a) => release(a, "yielded"),
      "giving back": (a) => release(a, "given-back"),
      forgetting: forget
    }
  for (const [name, end] of Object.entries(endings)) {
    rule(`${name} wakes who waits for that work ID`, function*(subscribe) {
      const a = yield* take(yield* freshId, "a")
      const other = yield* take(yield* freshId, "a")
      const waiting = yield* subscribed(subscribe, a.workId)
      const waitingToo = yield* subscribed(subscribe, a.workId)
      const elsewhere = yield* subscribed(subscribe, other.workId)
      yield* answers("Done", renew(a))
      yield* answers("Done", checkpoint(a, 1, "one"))
      assert.isFalse(isOver(waiting))
      yield* answers("Done", end(a))
      yield* eventually("both are woken", Effect.sync(() => isOver(waiting) && isOver(waitingToo)))
      assert.isFalse(isOver(elsewhere))
    })
  }

  rule("a hint that comes between two waits is not lost", function*(subscribe) {
    const a = yield* take(yield* freshId, "a")
    const wakeup = yield* subscribe(a.workId)
    yield* waitFor("the subscription stands", wakeup)
    yield* answers("Done", release(a, "yielded"))
    yield* waitFor("the hint has arrived", wakeup)
    const second = yield* Effect.forkScoped(wakeup, { startImmediately: true })
    const b = yield* take(a.workId, "b")
    assert.isFalse(isOver(second))
    yield* answers("Done", release(b, "yielded"))
    yield* eventually("the next one too", Effect.sync(() => isOver(second)))
  })

  rule("who waits again, after nobody did, is told again", function*(subscribe) {
    const workId = yield* freshId
    for (let i = 0; i < 3; i++) {
      const a = yield* take(workId, "a")
      yield* Effect.scoped(Effect.gen(function*() {
        const waiting = yield* subscribed(subscribe, workId)
        yield* answers("Done", release(a, "yielded"))
        yield* eventually("it is woken", Effect.sync(() => isOver(waiting)))
      }))
    }
  })
}

const locks = ({ whenLocking, whenLockingAndTravelling }: Rules) => {
  const free: Record<string, Ending> = {
    "was released": (a) => answers("Done", release(a, "yielded")),
    "has expired": () => passTtls(1)
  }
  for (const [name, end] of Object.entries(free)) {
    whenLocking(`an acquire of a lease that ${name} waits for nobody: it is contended`, function*(lock) {
      const { ttl } = yield* Store
      const backend = yield* Backend.Backend
      const a = yield* takeWithState("one")
      yield* end(a)
      const attempt = randomId()
      yield* unchanged(
        a.workId,
        Effect.gen(function*() {
          yield* lock(a.workId)
          const replies = yield* promptly(backend.acquire([
            { workId: yield* freshId, holderId: "b", attempt: randomId(), ttl },
            { workId: a.workId, holderId: "b", attempt, ttl },
            { workId: yield* freshId, holderId: "b", attempt: randomId(), ttl }
          ]))
          assert.deepStrictEqual(tags(replies), ["Acquired", "Contended", "Acquired"])
        }).pipe(Effect.scoped)
      )
      yield* eventually(
        "the lock is gone",
        Effect.map(acquire(a.workId, "b", { attempt }), ({ _tag }) => _tag === "Acquired")
      )
    })
  }

  whenLocking("an acquire of a lease that is held says who holds it", function*(lock) {
    const a = yield* take(yield* freshId, "a")
    yield* lock(a.workId)
    yield* promptly(answers("Held", acquire(a.workId, "b")))
  })

  whenLocking("the same attempt again gets its answer", function*(lock) {
    const a = yield* take(yield* freshId, "a")
    yield* lock(a.workId)
    yield* promptly(answers("Acquired", acquire(a.workId, "a", { attempt: a.attempt })))
  })

  whenLocking("a batch does not wait for one of its items: that one is busy, and nothing was done", function*(lock) {
    const { ttl } = yield* Store
    const backend = yield* Backend.Backend
    const terms = [yield* takeWithState("one"), yield* takeWithState("one"), yield* takeWithState("one")] as const
    const batchesOf: Record<string, Effect.Effect<ReadonlyArray<{ readonly _tag: string }>, BackendError>> = {
      renew: backend.renew(map(terms, (term) => ({ ...term, ttl }))),
      checkpoint: backend.checkpoint(map(terms, (term) => ({ ...term, ttl, sequence: 2n, state: state("two") }))),
      release: backend.release(
        map(terms, (term) => ({ ...term, exit: "yielded" as const, interrupted: false, state: Option.none() }))
      )
    }
    const locked = terms[1]
    for (const batch of Object.values(batchesOf)) {
      yield* unchanged(
        locked.workId,
        Effect.gen(function*() {
          yield* lock(locked.workId)
          assert.deepStrictEqual(tags(yield* promptly(batch)), ["Done", "Busy", "Done"])
          yield* promptly(answers("Busy", forget(locked)))
        }).pipe(Effect.scoped)
      )
    }
    yield* eventually("the lock is gone", Effect.map(renew(locked), (_) => _._tag === "Done"))
    yield* answers("Done", release(locked, "finished"))
  })

  whenLocking("a work ID that nobody has held is fenced, not busy", function*(lock) {
    const a = yield* take(yield* freshId, "a")
    yield* lock(a.workId)
    yield* promptly(fenced({ ...a, workId: yield* freshId }))
  })

  whenLocking("reads and lists do not wait", function*(lock) {
    const a = yield* takeWithState("one")
    yield* lock(a.workId)
    assert.strictEqual(yield* promptly(readText(a)), "one")
    assert.strictEqual((yield* promptly(record(a.workId)))?.status, "held")
  })

  whenLockingAndTravelling("a sweep leaves them for later", function*(lock) {
    const backend = yield* Backend.Backend
    yield* pass("2 hours")
    yield* sweepAll
    const a = yield* take(yield* freshId, "a")
    const b = yield* take(yield* freshId, "a")
    yield* answers("Done", release(a, "retired"))
    yield* answers("Done", release(b, "retired"))
    yield* pass("61 minutes")
    yield* Effect.scoped(Effect.gen(function*() {
      yield* lock(a.workId)
      assert.strictEqual(yield* promptly(backend.sweep({ retention: Duration.zero, limit: 10 })), 1)
    }))
    yield* eventually(
      "the other is swept once it is free",
      Effect.map(backend.sweep({ retention: Duration.zero, limit: 10 }), (swept) => swept === 1)
    )
  })
}

// -----------------------------------------------------------------------------
// leases over it
// -----------------------------------------------------------------------------

const Progress = Work.make("contract", Checkpoint.make(Schema.Struct({ at: Schema.Int })))

type Progress = Work.State<typeof Progress>

class Boom extends Data.TaggedError("Boom") {}

const acquires = ({ rule }: Rules) => {
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
const operationsOnToken = ({ rule }: Rules) => {
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
const outcomes = ({ rule }: Rules) => {
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

const losses = ({ rule }: Rules) => {
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
      yield* assertNear(refused.remaining, ttl)
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
      let before: Listed | undefined
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
      let before: Listed | undefined
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

const handovers = ({ rule }: Rules) => {
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

const states = ({ rule }: Rules) => {
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

/** The options, as the tests use them. */
class Store extends Context.Service<Store, {
  readonly ttl: Duration.Duration
  readonly advance: (duration: Duration.Duration) => Effect.Effect<void>
  readonly setBack: (duration: Duration.Duration) => Effect.Effect<void>
  readonly raiseToken: (workId: string, fencingToken: bigint) => Effect.Effect<void>
  readonly lock: (workId: string) => Effect.Effect<void, never, Scope.Scope>
}>()("worklease/testing/BackendContract/Store") {}

const storeLayer = <R, E>(options: Options<R, E>): Layer.Layer<Store, never, Backend.Backend | R> =>
  Layer.effect(
    Store,
    Effect.map(Effect.context<Backend.Backend | R>(), (context) => {
      const provided = <R2 = never>(effect: Effect.Effect<unknown, unknown, Backend.Backend | R | R2>) =>
        Effect.updateContext(
          Effect.asVoid(Effect.orDie(effect)),
          // The test's own scope, not the layer's.
          (current: Context.Context<R2>) => Context.merge(context, current) as Context.Context<Backend.Backend | R | R2>
        )
      return {
        ttl: Duration.fromInputUnsafe(options.ttl ?? (options.advance === undefined ? "1 seconds" : "30 seconds")),
        advance: (duration) =>
          options.advance === undefined ? live(Effect.sleep(duration)) : provided<never>(options.advance(duration)),
        setBack: (duration) => provided<never>(options.setBack!(duration)),
        raiseToken: (workId, fencingToken) => provided<never>(options.raiseToken!(workId, fencingToken)),
        lock: (workId) => provided<Scope.Scope>(options.lock!(workId))
      }
    })
  )

type Body<Args extends Array<unknown> = []> = (
  ...args: Args
) => Generator<Effect.Effect<any, any, Backend.Backend | Store | Scope.Scope>, void, any>

type Rule<Args extends Array<unknown> = []> = (name: string, body: Body<Args>) => void

/** How the tests of a group are defined; all but `rule` depend on options. */
interface Rules {
  readonly rule: Rule
  readonly whenStanding: Rule
  readonly whenTravelling: Rule
  readonly whenSetBack: Rule<[setBack: (duration: Duration.Input) => Effect.Effect<void, never, Store>]>
  readonly whenRaised: Rule<[raise: (workId: string, token: bigint) => Effect.Effect<void, never, Store>]>
  readonly whenLocking: Rule<[lock: (workId: string) => Effect.Effect<void, never, Store | Scope.Scope>]>
  readonly whenLockingAndTravelling: Rules["whenLocking"]
}

const makeRules = (
  it: Vitest.MethodsNonLive<Backend.Backend | Store>,
  options: { readonly [K in keyof Options]?: unknown }
): Rules => {
  const when = (...conditions: ReadonlyArray<unknown>): Rule => (name, body) => {
    if (conditions.some((condition) => condition === undefined || condition === false)) return
    it.effect(name, () => Effect.gen(body))
  }
  const withArgs = <Args extends Array<unknown>>(rule: Rule, ...args: Args): Rule<Args> => (name, body) =>
    rule(name, () => body(...args))
  const { advance, lock, raiseToken, setBack, standsStill } = options
  const lockRow = (workId: string) => Effect.flatMap(Store, (_) => _.lock(workId))
  return {
    rule: when(),
    whenStanding: when(standsStill, advance),
    whenTravelling: when(advance),
    whenSetBack: withArgs(
      when(setBack, advance),
      (duration) => Effect.flatMap(Store, (_) => _.setBack(Duration.fromInputUnsafe(duration)))
    ),
    whenRaised: withArgs(
      when(raiseToken),
      (workId, token) => Effect.flatMap(Store, (_) => _.raiseToken(workId, token))
    ),
    whenLocking: withArgs(when(lock), lockRow),
    whenLockingAndTravelling: withArgs(when(lock, advance), lockRow)
  }
}

// ---- time

const live = TestClock.withLive

/** Lets time pass, for the store and for the library. */
const pass = (duration: Duration.Input) =>
  Effect.flatMap(Store, ({ advance }) => {
    const decoded = Duration.fromInputUnsafe(duration)
    // The store first, so that what the library then sends finds it in its time.
    return Effect.andThen(advance(decoded), TestClock.adjust(decoded))
  })

const passTtls = (ttls: number) => Effect.flatMap(Store, ({ ttl }) => pass(Duration.times(ttl, ttls)))

/** Lets time pass until the next renewal is due. One millisecond more, for a ttl that has no exact third. */
const passRenewal = Effect.flatMap(
  Store,
  ({ ttl }) => pass(Duration.sum(Duration.times(ttl, 1 / 3), Duration.millis(1)))
)

const patience = Duration.seconds(10)

/** Waits, in real time, for what is on its way. */
const eventually = <E, R>(what: string, condition: Effect.Effect<boolean, E, R>): Effect.Effect<void, E, R> =>
  Effect.flatMap(condition, (holds) => holds ? Effect.void : Effect.fail(notYet)).pipe(
    Effect.tapError(() => live(Effect.sleep("2 millis"))),
    Effect.retry({ while: (error) => error === notYet }),
    Effect.raceFirst(
      Effect.andThen(
        live(Effect.sleep(patience)),
        Effect.die(new Error(`In ${Duration.format(patience)}, not yet: ${what}`))
      )
    ),
    Effect.catchIf((error): error is typeof notYet => error === notYet, (error) => Effect.die(error))
  )

const notYet = "not yet" as const

/** Fails, in real time, what waits where it should not. */
const promptly = <A, E, R>(effect: Effect.Effect<A, E, R>): Effect.Effect<A, E, R> =>
  Effect.raceFirst(
    effect,
    Effect.andThen(live(Effect.sleep("5 seconds")), Effect.die(new Error("It waits for the lock")))
  )

/** Does something again and again until a fiber has ended. */
const meanwhile = <R>(fiber: Fiber.Fiber<unknown, unknown>, effect: Effect.Effect<unknown, never, R>) =>
  eventually("the fiber has ended", Effect.as(effect, false).pipe(Effect.map(() => isOver(fiber))))

const isOver = (fiber: Fiber.Fiber<unknown, unknown>): boolean => fiber.pollUnsafe() !== undefined

/** Exactly, where the store's clock stands still; else within what a slow machine takes. */
const assertNear = (actual: Duration.Duration, expected: Duration.Duration) =>
  Effect.map(Store, ({ ttl }) => {
    const ahead = Duration.toMillis(expected) - Duration.toMillis(actual)
    assert.isTrue(
      ahead >= 0 && ahead < Duration.toMillis(ttl) / 4,
      `${Duration.format(actual)} is not ${Duration.format(expected)}`
    )
  })

// ---- single operations

/** What a test has taken: a term, and what it was told with it. */
interface Taken extends Backend.Term {
  readonly attempt: string
  readonly expiresAt: number
  readonly prior: Backend.StoredPrior
}

const exitModes = ["finished", "abandoned", "retired", "yielded"] as const

const exits = [...exitModes, "given-back"] as const

const maxToken = 2n ** 63n - 1n

const randomId = () => SecureRandom.uuidV4Unsafe()

/** A way for a term to end, or something that happens to it. */
type Ending = (a: Taken) => Effect.Effect<unknown, unknown, Backend.Backend | Store>

/** A work ID of this test alone, in this run alone. */
const freshId = Effect.sync(() => `contract-${randomId()}`)

const freshWork = Effect.map(freshId, (key) => Progress.id(key))

const one = <Request, Reply>(
  operation: (backend: Backend.Backend["Service"]) => Backend.Batch<Request, Reply>,
  request: Request
): Effect.Effect<Reply, BackendError, Backend.Backend> =>
  Effect.flatMap(Backend.Backend, (backend) =>
    Effect.flatMap(operation(backend)([request]), (replies) => {
      assert.strictEqual(replies.length, 1)
      const [reply] = replies
      return reply instanceof BackendError ? Effect.fail(reply) : Effect.succeed(reply)
    }))

/** Only what names the term, whatever else a test keeps with it. */
const termOf = ({ fencingToken, holderId, workId }: Backend.Term): Backend.Term => ({ workId, holderId, fencingToken })

const acquire = (
  workId: string,
  holderId: string,
  options?: { readonly attempt?: string; readonly ttls?: number }
): Effect.Effect<Backend.AcquireReply, BackendError, Backend.Backend | Store> =>
  Effect.flatMap(Store, ({ ttl }) =>
    one((_) => _.acquire, {
      workId,
      holderId,
      attempt: options?.attempt ?? randomId(),
      ttl: Duration.times(ttl, options?.ttls ?? 1)
    }))

/** An acquire that succeeds. */
const take = (
  workId: string,
  holderId: string,
  options?: { readonly attempt?: string; readonly ttls?: number }
): Effect.Effect<Taken, BackendError, Backend.Backend | Store> =>
  Effect.suspend(() => {
    const attempt = options?.attempt ?? randomId()
    return Effect.map(acquire(workId, holderId, { ...options, attempt }), (reply) => {
      assert.strictEqual(reply._tag, "Acquired")
      const { expiresAt, fencingToken, prior } = reply as Backend.Acquired
      return { workId, holderId, fencingToken, attempt, expiresAt, prior }
    })
  })

/** An acquire and a first checkpoint. */
const takeWithState = (text: string, workId?: string) =>
  Effect.gen(function*() {
    const a = yield* take(workId ?? (yield* freshId), "a")
    yield* answers("Done", checkpoint(a, 1, text))
    return a
  })

const renew = (term: Backend.Term) => renewFor(term, 1)

const renewFor = (term: Backend.Term, ttls: number) =>
  Effect.flatMap(Store, ({ ttl }) => one((_) => _.renew, { ...termOf(term), ttl: Duration.times(ttl, ttls) }))

const checkpoint = (term: Backend.Term, sequence: number | bigint, stored: string | Backend.Stored) =>
  Effect.flatMap(
    Store,
    ({ ttl }) => one((_) => _.checkpoint, { ...termOf(term), ttl, sequence: BigInt(sequence), state: state(stored) })
  )

const release = (
  term: Backend.Term,
  exit: Backend.ReleaseRequest["exit"],
  options?: {
    readonly interrupted?: boolean
    readonly state?: readonly [sequence: number, stored: string | Backend.Stored]
  }
): Effect.Effect<Backend.TermReply, BackendError, Backend.Backend> =>
  one((_) => _.release, {
    ...termOf(term),
    exit,
    interrupted: options?.interrupted ?? false,
    state: Option.map(Option.fromUndefinedOr(options?.state), ([sequence, stored]) => ({
      sequence: BigInt(sequence),
      state: state(stored)
    }))
  })

const finish = (term: Backend.Term) => release(term, "finished")

const finishWithState = (term: Backend.Term) => release(term, "finished", { state: [2, "two"] })

const read = (term: Backend.Term) => Effect.flatMap(Backend.Backend, (_) => _.read(termOf(term)))

const readText = (term: Backend.Term) =>
  Effect.map(
    read(term),
    (reply) => reply._tag === "Done" ? Option.getOrUndefined(Option.map(reply.state, textOf)) : reply._tag
  )

const forget = (term: Backend.Term) => Effect.flatMap(Backend.Backend, (_) => _.forget(termOf(term)))

const requestYield = (workId: string, deadline?: Duration.Duration) =>
  Effect.flatMap(Backend.Backend, (_) => _.requestYield({ workId, deadline: Option.fromUndefinedOr(deadline) }))

const sweepAll = Effect.flatMap(Backend.Backend, (_) => _.sweep({ retention: Duration.zero, limit: 100_000 }))

/** What a list tells of one work ID, for comparison. */
interface Listed {
  readonly status: string | undefined
  readonly holderId: string | undefined
  readonly fencingToken: bigint | undefined
  readonly expiresAt: number | undefined
  readonly text: string | undefined
  readonly termsWithoutProgress: number
}

const record = (workId: string): Effect.Effect<Listed | undefined, BackendError, Backend.Backend> =>
  Effect.gen(function*() {
    const backend = yield* Backend.Backend
    // The first with the prefix is the work ID itself, if it is there.
    const [first] = yield* backend.list({ prefix: workId, after: Option.none(), limit: 1 })
    if (first === undefined || first.workId !== workId) return undefined
    const term = Option.getOrUndefined(first.term)
    return {
      status: term?.status,
      holderId: term?.holderId,
      fencingToken: term?.fencingToken,
      expiresAt: term?.expiresAt,
      text: Option.getOrUndefined(Option.map(first.state, textOf)),
      termsWithoutProgress: first.termsWithoutProgress
    }
  })

const statusOf = (workId: string) =>
  Effect.map(record(workId), (_) => ({ status: _?.status, by: _?.holderId, token: _?.fencingToken }))

/** The rows of a store whose clock moves by moving them have another expiry after a while. */
const withoutExpiry = (listed: Listed | undefined) =>
  listed === undefined ? undefined : { ...listed, expiresAt: undefined }

/** A process of the application. */
const processOf = (holderId: string) =>
  Effect.map(
    Effect.flatMap(Store, ({ ttl }) => Layer.build(Lease.layerWith({ holderId, ttl }))),
    (context) => <A, E, R>(effect: Effect.Effect<A, E, R>) => Effect.provideContext(effect, context)
  )

// ---- expectations

const answers = <A extends { readonly _tag: string }, E, R, Tag extends A["_tag"]>(
  expected: Tag,
  operation: Effect.Effect<A, E, R>
): Effect.Effect<Extract<A, { readonly _tag: Tag }>, E, R> =>
  Effect.map(operation, (reply) => {
    assert.strictEqual(reply._tag, expected)
    return reply as Extract<A, { readonly _tag: Tag }>
  })

/** Runs an effect that changes nothing of what is stored for a work ID. */
const unchanged = <A, E, R>(workId: string, effect: Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const before = yield* record(workId)
    const result = yield* effect
    assert.deepStrictEqual(yield* record(workId), before)
    return result
  })

/** No operation of this term takes effect. */
const fenced = Effect.fnUntraced(function*(term: Backend.Term, exit: Backend.ReleaseRequest["exit"] = "finished") {
  const operations = [
    read(term),
    renew(term),
    checkpoint(term, 1000, "too late"),
    release(term, exit),
    release(term, exit, { state: [1000, "too late"] }),
    forget(term)
  ]
  for (const operation of operations) yield* unchanged(term.workId, answers("Fenced", operation))
})

interface Told {
  readonly exit: Backend.ExitMode | "expired" | "none"
  readonly by: { readonly holderId: string; readonly fencingToken: bigint } | undefined
  readonly state: string | undefined
  readonly count: number
}

/** A prior, for comparison. */
const told = (prior: Backend.StoredPrior): Told => ({
  exit: Option.match(prior.term, { onNone: () => "none", onSome: (_) => _.exit }),
  by: Option.getOrUndefined(
    Option.map(prior.term, ({ fencingToken, holderId }) => ({ holderId, fencingToken }))
  ),
  state: Option.getOrUndefined(Option.map(prior.state, textOf)),
  count: prior.termsWithoutProgress
})

/** The prior that a term leaves. */
const left = (
  { fencingToken, holderId }: Backend.Term,
  exit: Backend.ExitMode | "expired",
  options?: { readonly state?: string; readonly count?: number }
): Told => ({
  exit,
  by: { holderId, fencingToken },
  state: options?.state,
  count: options?.count ?? (exit === "abandoned" && options?.state === undefined ? 1 : 0)
})

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

const assertIncreasing = (tokens: ReadonlyArray<bigint>) => {
  for (let i = 1; i < tokens.length; i++) {
    assert.isTrue(tokens[i - 1] < tokens[i], `token ${tokens[i]} came after ${tokens[i - 1]}`)
  }
}

const assertBytes = (actual: Option.Option<Backend.Stored>, expected: Uint8Array) => {
  assert.isTrue(Option.isSome(actual))
  if (Option.isNone(actual)) return
  const { bytes } = actual.value
  assert.isTrue(bytes instanceof Uint8Array)
  assert.strictEqual(bytes.byteLength, expected.byteLength)
  assert.strictEqual(bytes.findIndex((byte, i) => byte !== expected[i]), -1)
}

const tags = (replies: ReadonlyArray<{ readonly _tag: string }>) => replies.map((_) => _._tag)

const map = <A, B>(self: NonEmptyReadonlyArray<A>, f: (a: A, i: number) => B): NonEmptyReadonlyArray<B> =>
  self.map(f) as unknown as NonEmptyReadonlyArray<B>

const bytesOf = (text: string): Uint8Array => new TextEncoder().encode(text)

const textOf = (stored: Backend.Stored): string => new TextDecoder().decode(stored.bytes)

const state = (stored: string | Backend.Stored): Backend.Stored =>
  typeof stored === "string" ? { version: 1, bytes: bytesOf(stored) } : stored

const compareBytes = (a: string, b: string): number => {
  const [left, right] = [bytesOf(a), bytesOf(b)]
  const different = left.findIndex((byte, i) => byte !== right[i])
  return different === -1 ? left.length - right.length : left[different] - (right[different] ?? -1)
}
