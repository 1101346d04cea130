/**
 * What the rules of the contract expect of single operations.
 */

import { assert } from "@effect/vitest"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import type * as Backend from "../../Backend.ts"
import { answers, bytesOf, checkpoint, forget, read, record, release, renew, textOf } from "./operations.ts"

/** Runs an effect that changes nothing of what is stored for a work ID. */
export const unchanged = <A, E, R>(workId: string, effect: Effect.Effect<A, E, R>) =>
  Effect.gen(function*() {
    const before = yield* record(workId)
    const result = yield* effect
    assert.deepStrictEqual(yield* record(workId), before)
    return result
  })

/** No operation of this term takes effect. */
export const fenced = Effect.fnUntraced(
  function*(term: Backend.Term, exit: Backend.ReleaseRequest["exit"] = "finished") {
    const operations = [
      read(term),
      renew(term),
      checkpoint(term, 1000, "too late"),
      release(term, exit),
      release(term, exit, { state: [1000, "too late"] }),
      forget(term)
    ]
    for (const operation of operations) yield* unchanged(term.workId, answers("Fenced", operation))
  }
)

interface Told {
  readonly exit: Backend.ExitMode | "expired" | "none"
  readonly by: { readonly holderId: string; readonly fencingToken: bigint } | undefined
  readonly state: string | undefined
  readonly count: number
}

/** A prior, for comparison. */
export const told = (prior: Backend.StoredPrior): Told => ({
  exit: Option.match(prior.term, { onNone: () => "none", onSome: (_) => _.exit }),
  by: Option.getOrUndefined(
    Option.map(prior.term, ({ fencingToken, holderId }) => ({ holderId, fencingToken }))
  ),
  state: Option.getOrUndefined(Option.map(prior.state, textOf)),
  count: prior.termsWithoutProgress
})

/** The prior that a term leaves. */
export const left = (
  { fencingToken, holderId }: Backend.Term,
  exit: Backend.ExitMode | "expired",
  options?: { readonly state?: string; readonly count?: number }
): Told => ({
  exit,
  by: { holderId, fencingToken },
  state: options?.state,
  count: options?.count ?? (exit === "abandoned" && options?.state === undefined ? 1 : 0)
})

export const assertIncreasing = (tokens: ReadonlyArray<bigint>) => {
  for (let i = 1; i < tokens.length; i++) {
    assert.isTrue(tokens[i - 1] < tokens[i], `token ${tokens[i]} came after ${tokens[i - 1]}`)
  }
}

export const assertBytes = (actual: Option.Option<Backend.Stored>, expected: Uint8Array) => {
  assert.isTrue(Option.isSome(actual))
  if (Option.isNone(actual)) return
  const { bytes } = actual.value
  assert.isTrue(bytes instanceof Uint8Array)
  assert.strictEqual(bytes.byteLength, expected.byteLength)
  assert.strictEqual(bytes.findIndex((byte, i) => byte !== expected[i]), -1)
}

export const tags = (replies: ReadonlyArray<{ readonly _tag: string }>) => replies.map((_) => _._tag)

export const compareBytes = (a: string, b: string): number => {
  const [left, right] = [bytesOf(a), bytesOf(b)]
  const different = left.findIndex((byte, i) => byte !== right[i])
  return different === -1 ? left.length - right.length : left[different] - (right[different] ?? -1)
}
