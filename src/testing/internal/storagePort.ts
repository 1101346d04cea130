/**
 * The contract of a backend, first part: through the storage port itself.
 */

import { assert } from "@effect/vitest"
import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import type * as Scope from "effect/Scope"
import * as Backend from "../../Backend.ts"
import type { BackendError } from "../../LeaseError.ts"
import { assertBytes, assertIncreasing, compareBytes, fenced, left, tags, told, unchanged } from "./expectations.ts"
import {
  acquire,
  answers,
  bytesOf,
  checkpoint,
  type Ending,
  exitModes,
  exits,
  finish,
  finishWithState,
  forget,
  freshId,
  lift,
  map,
  maxToken,
  randomId,
  read,
  readText,
  record,
  release,
  renew,
  renewFor,
  requestYield,
  state,
  statusOf,
  sweepAll,
  take,
  type Taken,
  takeWithState,
  termOf
} from "./operations.ts"
import {
  assertNear,
  eventually,
  isOver,
  live,
  pass,
  passTtls,
  promptly,
  type Rule,
  type Rules,
  Store
} from "./rules.ts"

export const taking = ({ rule, whenStanding }: Rules) => {
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

export const fencingTokens = ({ rule, whenRaised, whenSetBack, whenTravelling }: Rules) => {
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
          { workId: yield* freshId, holderId: "b", attempt: randomId(), ttl, quarantineAfter: Option.none() },
          { workId, holderId: "b", attempt: randomId(), ttl, quarantineAfter: Option.none() },
          { workId: yield* freshId, holderId: "b", attempt: randomId(), ttl, quarantineAfter: Option.none() }
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

export const attempts = ({ rule, whenTravelling }: Rules) => {
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
export const operationsOfTerm = ({ rule, whenTravelling }: Rules) => {
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

export const effectsOfOperations = ({ rule, whenSetBack, whenStanding }: Rules) => {
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

export const checkpoints = ({ rule, whenStanding }: Rules) => {
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
    yield* answers("Done", checkpoint(a, 2n ** 53n, "older"))
    yield* answers("Done", checkpoint(a, 2n ** 53n + 1n, "newer"))
    assert.strictEqual(yield* readText(a), "newer")
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

export const releases = ({ rule }: Rules) => {
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

export const givingBack = ({ rule }: Rules) => {
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

export const forgetting = ({ rule }: Rules) => {
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

export const priors = ({ rule }: Rules) => {
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

export const termsWithoutProgress = ({ rule }: Rules) => {
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
      if (count > 0) {
        const refused = yield* unchanged(
          workId,
          answers("Quarantined", acquire(workId, "c", { quarantineAfter: count }))
        )
        assert.strictEqual(refused.termsWithoutProgress, count)
      }
      const c = yield* take(workId, "c", { quarantineAfter: count + 1 })
      assert.strictEqual(c.prior.termsWithoutProgress, count)
    })
  }
}

/** A work ID whose last term, the third without progress, has left a state of a term before. */
const takeInVain = Effect.gen(function*() {
  const { workId } = yield* Effect.tap(takeWithState("one"), (a) => release(a, "yielded"))
  for (const holderId of ["a", "b"]) yield* answers("Done", release(yield* take(workId, holderId), "abandoned"))
  const c = yield* take(workId, "c")
  yield* answers("Done", release(c, "abandoned"))
  return c
})

export const quarantines = ({ rule, whenLocking }: Rules) => {
  rule("refuse a work ID after as many terms without progress, say of the last one, and change nothing", function*() {
    const { workId } = yield* takeInVain
    for (const quarantineAfter of [3, 2, 1]) {
      assert.deepStrictEqual(yield* unchanged(workId, acquire(workId, "d", { quarantineAfter })), {
        _tag: "Quarantined",
        termsWithoutProgress: 3,
        exit: "abandoned",
        holderId: "c"
      })
    }
  })

  rule("are of the acquire: others take the work ID", function*() {
    for (const options of [{}, { quarantineAfter: 4 }, { quarantineAfter: Number.MAX_SAFE_INTEGER }]) {
      const c = yield* takeInVain
      const d = yield* take(c.workId, "d", options)
      assert.deepStrictEqual(told(d.prior), left(c, "abandoned", { state: "one", count: 3 }))
    }
  })

  rule("count a term that has expired, and was not counted before", function*() {
    const { workId } = yield* takeInVain
    yield* take(workId, "d")
    yield* passTtls(1)
    assert.deepStrictEqual(yield* unchanged(workId, acquire(workId, "e", { quarantineAfter: 4 })), {
      _tag: "Quarantined",
      termsWithoutProgress: 4,
      exit: "expired",
      holderId: "d"
    })
  })

  rule("do not count a term that has expired after a checkpoint, nor those before it", function*() {
    const { workId } = yield* takeInVain
    const d = yield* take(workId, "d")
    yield* answers("Done", checkpoint(d, 1, "two"))
    yield* passTtls(1)
    const e = yield* take(workId, "e", { quarantineAfter: 1 })
    assert.deepStrictEqual(told(e.prior), left(d, "expired", { state: "two" }))
  })

  rule("tell of the term before one that was given back", function*() {
    const { workId } = yield* takeInVain
    yield* answers("Done", release(yield* take(workId, "d"), "given-back"))
    const refused = yield* answers("Quarantined", acquire(workId, "e", { quarantineAfter: 3 }))
    assert.strictEqual(refused.exit, "abandoned")
    assert.strictEqual(refused.holderId, "c")
  })

  rule("leave a lease that is held as it is: held", function*() {
    const { workId } = yield* takeInVain
    yield* take(workId, "d")
    const refused = yield* answers("Held", acquire(workId, "e", { quarantineAfter: 1 }))
    assert.strictEqual(refused.holderId, "d")
  })

  rule("find nothing to count where nobody has ever held the lease, and after a forget", function*() {
    const a = yield* take(yield* freshId, "a", { quarantineAfter: 1 })
    yield* answers("Done", release(a, "abandoned"))
    const b = yield* take(a.workId, "b")
    yield* answers("Done", forget(b))
    yield* take(a.workId, "c", { quarantineAfter: 1 })
  })

  rule("the attempt that has taken the lease gets its answer again", function*() {
    const { workId } = yield* takeInVain
    const attempt = randomId()
    const first = yield* answers("Acquired", acquire(workId, "d", { attempt, quarantineAfter: 4 }))
    assert.deepStrictEqual(yield* acquire(workId, "d", { attempt, quarantineAfter: 4 }), first)
    assert.deepStrictEqual(yield* acquire(workId, "d", { attempt, quarantineAfter: 1 }), first)
    yield* passTtls(1)
    const again = acquire(workId, "d", { attempt, quarantineAfter: 4 })
    yield* unchanged(workId, answers("AttemptEnded", again))
    yield* answers("Done", release(yield* take(workId, "e"), "abandoned"))
    yield* unchanged(workId, answers("AttemptEnded", again))
  })

  rule("an attempt that was refused can take the lease later", function*() {
    const { workId } = yield* takeInVain
    const attempt = randomId()
    yield* answers("Quarantined", acquire(workId, "d", { attempt, quarantineAfter: 3 }))
    yield* lift(workId)
    yield* answers("Acquired", acquire(workId, "d", { attempt, quarantineAfter: 3 }))
  })

  rule("in a batch are each item's own", function*() {
    const { ttl } = yield* Store
    const backend = yield* Backend.Backend
    const held = yield* take(yield* freshId, "a")
    const requests = [
      [yield* freshId, 1],
      [(yield* takeInVain).workId, 3],
      [(yield* takeInVain).workId, 4],
      [held.workId, 1],
      [(yield* takeInVain).workId, undefined]
    ] as const
    const replies = yield* backend.acquire(map(requests, ([workId, quarantineAfter]) => ({
      workId,
      holderId: "d",
      attempt: randomId(),
      ttl,
      quarantineAfter: Option.fromUndefinedOr(quarantineAfter)
    })))
    assert.deepStrictEqual(tags(replies), ["Acquired", "Quarantined", "Acquired", "Held", "Acquired"])
  })

  whenLocking("wait for nobody", function*(lock) {
    const { workId } = yield* takeInVain
    yield* lock(workId)
    yield* promptly(answers("Quarantined", acquire(workId, "d", { quarantineAfter: 3 })))
  })
}

export const lifts = ({ rule, whenLocking, whenSetBack, whenTravelling }: Rules) => {
  const endings: ReadonlyArray<
    readonly [ending: string, end: Ending, exit: Backend.ExitMode | "expired", state?: string]
  > = [
    ["was abandoned", (d) => answers("Done", release(d, "abandoned")), "abandoned"],
    ["was interrupted", (d) => answers("Done", release(d, "abandoned", { interrupted: true })), "abandoned"],
    ["was yielded", (d) => answers("Done", release(d, "yielded")), "yielded"],
    ["was finished", (d) => answers("Done", release(d, "finished")), "finished"],
    ["has expired", () => passTtls(1), "expired"],
    [
      "has expired after a checkpoint",
      (d) => Effect.andThen(checkpoint(d, 1, "two"), passTtls(1)),
      "expired",
      "two"
    ]
  ]
  for (const [ending, end, exit, state = "one"] of endings) {
    rule(`after a term that ${ending}, let the work ID go again, and change nothing else`, function*() {
      const { workId } = yield* takeInVain
      const d = yield* take(workId, "d")
      yield* end(d)
      const before = yield* record(workId)
      for (let i = 0; i < 2; i++) {
        assert.isTrue(yield* lift(workId))
        assert.deepStrictEqual(yield* record(workId), { ...before!, termsWithoutProgress: 0 })
      }
      const e = yield* take(workId, "e", { quarantineAfter: 1 })
      assert.deepStrictEqual(told(e.prior), left(d, exit, { state, count: 0 }))
      yield* answers("Done", release(e, "abandoned"))
      assert.strictEqual((yield* record(workId))?.termsWithoutProgress, 1)
    })
  }

  rule("after a term that was given back, too", function*() {
    const c = yield* takeInVain
    yield* answers("Done", release(yield* take(c.workId, "d"), "given-back"))
    assert.isTrue(yield* lift(c.workId))
    const e = yield* take(c.workId, "e", { quarantineAfter: 1 })
    assert.deepStrictEqual(told(e.prior), left(c, "abandoned", { state: "one", count: 0 }))
  })

  rule("let a term that is held go on, which counts when it ends", function*() {
    const { workId } = yield* takeInVain
    const d = yield* take(workId, "d")
    const before = yield* record(workId)
    assert.isTrue(yield* lift(workId))
    assert.deepStrictEqual(yield* record(workId), { ...before!, termsWithoutProgress: 0 })
    const again = yield* answers("Acquired", acquire(workId, "d", { attempt: d.attempt }))
    assert.deepStrictEqual(told(again.prior), { ...told(d.prior), count: 0 })
    yield* answers("Done", renew(d))
    yield* answers("Held", acquire(workId, "e"))
    yield* passTtls(1)
    assert.strictEqual((yield* take(workId, "e")).prior.termsWithoutProgress, 1)
  })

  rule("let a term that is given back then count for nothing", function*() {
    const { workId } = yield* takeInVain
    const d = yield* take(workId, "d")
    assert.isTrue(yield* lift(workId))
    yield* answers("Done", release(d, "given-back"))
    assert.strictEqual((yield* take(workId, "e")).prior.termsWithoutProgress, 0)
  })

  rule("leave a request to yield as it is", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* requestYield(a.workId)
    yield* lift(a.workId)
    const reply = yield* answers("Done", renew(a))
    assert.isTrue(Option.isSome(reply.yieldRequest))
  })

  rule("of a term that has expired: it may still be given back", function*() {
    const { workId } = yield* takeInVain
    const d = yield* take(workId, "d")
    yield* passTtls(1)
    yield* lift(workId)
    yield* answers("Done", release(d, "given-back"))
    assert.strictEqual((yield* record(workId))?.termsWithoutProgress, 0)
    assert.strictEqual((yield* take(workId, "e")).prior.termsWithoutProgress, 0)
  })

  rule("of a term that has expired: a checkpoint may still revive it", function*() {
    const { workId } = yield* takeInVain
    const d = yield* take(workId, "d")
    yield* passTtls(1)
    yield* lift(workId)
    yield* answers("Done", checkpoint(d, 1, "two"))
    assert.strictEqual((yield* record(workId))?.termsWithoutProgress, 0)
    const again = yield* answers("Acquired", acquire(workId, "d", { attempt: d.attempt }))
    assert.strictEqual(again.prior.termsWithoutProgress, 0)
    yield* answers("Done", release(d, "yielded"))
    assert.strictEqual((yield* take(workId, "e")).prior.termsWithoutProgress, 0)
  })

  whenSetBack("of a term that has expired, and is held again because the clock was set back", function*(setBack) {
    const ends: ReadonlyArray<readonly [Ending, number]> = [
      [(d) => answers("Done", release(d, "yielded")), 0],
      [(d) => answers("Done", release(d, "given-back")), 0],
      [(d) => answers("Done", release(d, "abandoned")), 1]
    ]
    for (const [end, count] of ends) {
      const { workId } = yield* takeInVain
      const d = yield* take(workId, "d", { ttls: 2 })
      yield* passTtls(2)
      yield* lift(workId)
      yield* setBack("15 seconds")
      assert.strictEqual((yield* record(workId))?.status, "held")
      assert.strictEqual((yield* record(workId))?.termsWithoutProgress, 0)
      const again = yield* answers("Acquired", acquire(workId, "d", { attempt: d.attempt }))
      assert.strictEqual(again.prior.termsWithoutProgress, 0)
      yield* end(d)
      assert.strictEqual((yield* take(workId, "e")).prior.termsWithoutProgress, count)
    }
  })

  rule("of a work ID that nobody has held find nothing, and leave nothing behind", function*() {
    const workId = yield* freshId
    assert.isFalse(yield* lift(workId))
    assert.isUndefined(yield* record(workId))
  })

  whenTravelling("of a work ID that was swept find nothing", function*() {
    const a = yield* take(yield* freshId, "a")
    yield* answers("Done", release(a, "retired"))
    assert.isTrue(yield* lift(a.workId))
    yield* pass("2 hours")
    yield* sweepAll
    assert.isFalse(yield* lift(a.workId))
  })

  rule("are of that work ID only", function*() {
    const c = yield* takeInVain
    yield* lift((yield* takeInVain).workId)
    yield* answers("Quarantined", acquire(c.workId, "d", { quarantineAfter: 3 }))
  })

  whenLocking("wait for who has the row locked", function*(lock) {
    const { workId } = yield* takeInVain
    const lifting = yield* Effect.scoped(Effect.gen(function*() {
      yield* lock(workId)
      const lifting = yield* Effect.forkChild(lift(workId), { startImmediately: true })
      yield* live(Effect.sleep("50 millis"))
      assert.isFalse(isOver(lifting))
      return lifting
    }))
    assert.isTrue(yield* Fiber.join(lifting))
    assert.strictEqual((yield* record(workId))?.termsWithoutProgress, 0)
  })
}

export const yieldRequests = ({ rule }: Rules) => {
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

  rule("are told to who subscribes, where there are hints, of whatever work ID", function*() {
    const { yieldRequests } = yield* Backend.Backend
    if (Option.isNone(yieldRequests)) return
    const next = yield* yieldRequests.value
    for (const workId of [yield* freshId, `${yield* freshId} é%{}"'\\`, "𝕏".repeat(128)]) {
      const a = yield* take(workId, "a")
      const told = yield* Effect.forkScoped(Effect.repeat(next, { until: (told) => told === workId }))
      yield* eventually("it is told", Effect.map(requestYield(workId), () => isOver(told)))
      yield* answers("Done", release(a, "finished"))
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

export const batches = ({ rule }: Rules) => {
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
      map(
        acquires,
        ([key, attempt]) => ({ workId: prefix + key, holderId: "a", attempt, ttl, quarantineAfter: Option.none() })
      )
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
      ttl,
      quarantineAfter: Option.none()
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
          backend.acquire(
            map(
              workIds,
              (workId) => ({ workId, holderId: `${i}`, attempt: randomId(), ttl, quarantineAfter: Option.none() })
            )
          )
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

export const namesAndBytes = ({ rule }: Rules) => {
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
    const requests = workIds.map((workId) => ({
      workId,
      holderId: "a",
      attempt: randomId(),
      ttl,
      quarantineAfter: Option.none()
    }))
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
    const inspected = yield* backend.inspect({ workIds, states: true })
    assert.deepStrictEqual(inspected.map((_) => _.workId).sort(compareBytes), workIds.slice().sort(compareBytes))
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

export const lists = ({ rule, whenStanding }: Rules) => {
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
    const first = yield* backend.list({ prefix: "", after: Option.none(), limit: 1 })
    assert.deepStrictEqual(first.map((_) => _.workId), [all[0].workId])
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

  whenStanding("tell when a lease expires, and when its term has ended, and for how long that has been", function*() {
    const { ttl } = yield* Store
    const millis = Duration.toMillis(ttl)
    const a = yield* take(yield* freshId, "a")
    const backend = yield* Backend.Backend
    const times = Effect.map(backend.inspect({ workIds: [a.workId], states: false }), ([{ term }]) => {
      const { expiresAt, remaining, sinceEnd } = Option.getOrThrow(term)
      return { expiresAt, remaining: Duration.toMillis(remaining), sinceEnd: Duration.toMillis(sinceEnd) }
    })
    assert.deepStrictEqual(yield* times, { expiresAt: a.expiresAt, remaining: millis, sinceEnd: 0 })
    yield* pass(millis - 1)
    assert.deepStrictEqual(yield* times, { expiresAt: a.expiresAt, remaining: 1, sinceEnd: 0 })
    yield* pass(1)
    assert.deepStrictEqual(yield* times, { expiresAt: a.expiresAt, remaining: 0, sinceEnd: 0 })
    yield* pass(2)
    assert.deepStrictEqual(yield* times, { expiresAt: a.expiresAt, remaining: 0, sinceEnd: 2 })
    const b = yield* take(a.workId, "b")
    yield* pass(1)
    yield* answers("Done", release(b, "finished"))
    yield* pass(3)
    assert.deepStrictEqual(yield* times, { expiresAt: b.expiresAt - millis + 1, remaining: 0, sinceEnd: 3 })
  })

  rule("tell the same of many work IDs by name, with states if asked, and nothing of what is not there", function*() {
    const prefix = `${yield* freshId}/`
    for (const mode of exitModes) {
      yield* answers("Done", release(yield* takeWithState(mode, prefix + mode), mode))
    }
    yield* answers("Done", forget(yield* takeWithState("forgotten", `${prefix}forgotten`)))
    yield* answers("Done", release(yield* take(`${prefix}given back`, "a"), "given-back"))
    yield* takeWithState("held", `${prefix}held`)
    const backend = yield* Backend.Backend
    const withoutTimes = (records: ReadonlyArray<Backend.LeaseRecord>) =>
      records.map(({ term, ...record }) => ({
        ...record,
        term: Option.map(term, ({ fencingToken, holderId, status }) => ({ fencingToken, holderId, status }))
      })).sort((a, b) => compareBytes(a.workId, b.workId))
    const listed = withoutTimes(yield* backend.list({ prefix, after: Option.none(), limit: 100 }))
    assert.lengthOf(listed, exitModes.length + 3)
    const workIds = [...listed.map((_) => _.workId).reverse(), `${prefix}nothing`, prefix]
    assert.deepStrictEqual(withoutTimes(yield* backend.inspect({ workIds, states: true })), listed)
    assert.deepStrictEqual(
      withoutTimes(yield* backend.inspect({ workIds, states: false })),
      listed.map((record) => ({ ...record, state: Option.none() }))
    )
    assert.deepStrictEqual(yield* backend.inspect({ workIds: [], states: true }), [])
  })

  rule("tell of ten thousand work IDs at once", function*() {
    const backend = yield* Backend.Backend
    const a = yield* take(yield* freshId, "a")
    const workIds = Array.from({ length: 10_000 }, (_, i) => `${a.workId}/${i}`)
    workIds[5000] = a.workId
    const inspected = yield* backend.inspect({ workIds, states: true })
    assert.deepStrictEqual(inspected.map((_) => _.workId), [a.workId])
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

export const sweeps = ({ whenStanding, whenTravelling }: Rules) => {
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

export const wakeups = ({ rule: ruleOfAll }: Rules) => {
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
      const last = yield* take(yield* freshId, "a")
      const waitingForLast = yield* subscribed(subscribe, last.workId)
      yield* answers("Done", renew(a))
      yield* answers("Done", checkpoint(a, 1, "one"))
      // Hints may be on their way for a while, but they come in order.
      yield* answers("Done", end(last))
      yield* eventually("a later hint has come", Effect.sync(() => isOver(waitingForLast)))
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

export const locks = ({ whenLocking, whenLockingAndTravelling }: Rules) => {
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
            { workId: yield* freshId, holderId: "b", attempt: randomId(), ttl, quarantineAfter: Option.none() },
            { workId: a.workId, holderId: "b", attempt, ttl, quarantineAfter: Option.none() },
            { workId: yield* freshId, holderId: "b", attempt: randomId(), ttl, quarantineAfter: Option.none() }
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
