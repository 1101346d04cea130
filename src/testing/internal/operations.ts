/**
 * The single operations of a backend, as the rules of the contract call them.
 */

import { assert } from "@effect/vitest"
import type { NonEmptyReadonlyArray } from "effect/Array"
import * as SecureRandom from "effect/crypto/SecureRandom"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import * as Backend from "../../Backend.ts"
import { BackendError } from "../../LeaseError.ts"
import { Store } from "./rules.ts"

/** What a test has taken: a term, and what it was told with it. */
export interface Taken extends Backend.Term {
  readonly attempt: string
  readonly expiresAt: number
  readonly prior: Backend.StoredPrior
}

export const exitModes = ["finished", "abandoned", "retired", "yielded"] as const

export const exits = [...exitModes, "given-back"] as const

export const maxToken = 2n ** 63n - 1n

export const randomId = () => SecureRandom.uuidV4Unsafe()

/** A way for a term to end, or something that happens to it. */
export type Ending = (a: Taken) => Effect.Effect<unknown, unknown, Backend.Backend | Store>

/** A work ID of this test alone, in this run alone. */
export const freshId = Effect.sync(() => `contract-${randomId()}`)

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
export const termOf = ({ fencingToken, holderId, workId }: Backend.Term): Backend.Term => ({
  workId,
  holderId,
  fencingToken
})

export const acquire = (
  workId: string,
  holderId: string,
  options?: { readonly attempt?: string; readonly ttls?: number; readonly quarantineAfter?: number }
): Effect.Effect<Backend.AcquireReply, BackendError, Backend.Backend | Store> =>
  Effect.flatMap(Store, ({ ttl }) =>
    one((_) => _.acquire, {
      workId,
      holderId,
      attempt: options?.attempt ?? randomId(),
      ttl: Duration.times(ttl, options?.ttls ?? 1),
      quarantineAfter: Option.fromUndefinedOr(options?.quarantineAfter)
    }))

/** An acquire that succeeds. */
export const take = (
  workId: string,
  holderId: string,
  options?: { readonly attempt?: string; readonly ttls?: number; readonly quarantineAfter?: number }
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
export const takeWithState = (text: string, workId?: string) =>
  Effect.gen(function*() {
    const a = yield* take(workId ?? (yield* freshId), "a")
    yield* answers("Done", checkpoint(a, 1, text))
    return a
  })

export const renew = (term: Backend.Term) => renewFor(term, 1)

export const renewFor = (term: Backend.Term, ttls: number) =>
  Effect.flatMap(Store, ({ ttl }) => one((_) => _.renew, { ...termOf(term), ttl: Duration.times(ttl, ttls) }))

export const checkpoint = (term: Backend.Term, sequence: number | bigint, stored: string | Backend.Stored) =>
  Effect.flatMap(
    Store,
    ({ ttl }) => one((_) => _.checkpoint, { ...termOf(term), ttl, sequence: BigInt(sequence), state: state(stored) })
  )

export const release = (
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

export const finish = (term: Backend.Term) => release(term, "finished")

export const finishWithState = (term: Backend.Term) => release(term, "finished", { state: [2, "two"] })

export const read = (term: Backend.Term) => Effect.flatMap(Backend.Backend, (_) => _.read(termOf(term)))

export const readText = (term: Backend.Term) =>
  Effect.map(
    read(term),
    (reply) => reply._tag === "Done" ? Option.getOrUndefined(Option.map(reply.state, textOf)) : reply._tag
  )

export const forget = (term: Backend.Term) => Effect.flatMap(Backend.Backend, (_) => _.forget(termOf(term)))

export const requestYield = (workId: string, deadline?: Duration.Duration) =>
  Effect.flatMap(Backend.Backend, (_) => _.requestYield({ workId, deadline: Option.fromUndefinedOr(deadline) }))

export const lift = (workId: string) => Effect.flatMap(Backend.Backend, (_) => _.lift(workId))

export const sweepAll = Effect.flatMap(Backend.Backend, (_) => _.sweep({ retention: Duration.zero, limit: 100_000 }))

/** What is told of one work ID, for comparison. */
export interface Inspected {
  readonly status: string | undefined
  readonly holderId: string | undefined
  readonly fencingToken: bigint | undefined
  readonly expiresAt: number | undefined
  readonly text: string | undefined
  readonly termsWithoutProgress: number
}

export const record = (workId: string): Effect.Effect<Inspected | undefined, BackendError, Backend.Backend> =>
  Effect.gen(function*() {
    const backend = yield* Backend.Backend
    const [first] = yield* backend.inspect({ workIds: [workId], states: true })
    if (first === undefined) return undefined
    assert.strictEqual(first.workId, workId)
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

export const statusOf = (workId: string) =>
  Effect.map(record(workId), (_) => ({ status: _?.status, by: _?.holderId, token: _?.fencingToken }))

export const answers = <A extends { readonly _tag: string }, E, R, Tag extends A["_tag"]>(
  expected: Tag,
  operation: Effect.Effect<A, E, R>
): Effect.Effect<Extract<A, { readonly _tag: Tag }>, E, R> =>
  Effect.map(operation, (reply) => {
    assert.strictEqual(reply._tag, expected)
    return reply as Extract<A, { readonly _tag: Tag }>
  })

export const map = <A, B>(self: NonEmptyReadonlyArray<A>, f: (a: A, i: number) => B): NonEmptyReadonlyArray<B> =>
  self.map(f) as unknown as NonEmptyReadonlyArray<B>

export const bytesOf = (text: string): Uint8Array => new TextEncoder().encode(text)

export const textOf = (stored: Backend.Stored): string => new TextDecoder().decode(stored.bytes)

export const state = (stored: string | Backend.Stored): Backend.Stored =>
  typeof stored === "string" ? { version: 1, bytes: bytesOf(stored) } : stored
