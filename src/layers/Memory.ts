/**
 * Leases in the memory of the process, on Effect's Clock: under `TestClock`,
 * the test drives expiry, and everything is deterministic.
 *
 * Provide it once, around everything. Two processes in a test are two
 * `Lease.layerWith({ holderId })` over it.
 *
 * **Gotchas**
 *
 * It keeps to the Clock that was there when the layer was built. `it.effect`
 * puts the `TestClock` around it; elsewhere, build it under the `TestClock`,
 * not beside it.
 *
 * **Example** (Two holders, one lease)
 *
 * ```ts
 * import { Effect, Layer } from "effect"
 * import { Lease } from "worklease"
 * import * as Memory from "worklease/layers/Memory"
 *
 * const program = Effect.gen(function*() {
 *   yield* Effect.provide(Lease.acquire("job"), Lease.layerWith({ holderId: "a" }))
 *   return yield* Effect.flip(Effect.provide(Lease.acquire("job"), Lease.layerWith({ holderId: "b" })))
 * })
 *
 * Effect.runPromise(program.pipe(Effect.provide(Memory.layer))) // LeaseHeld, by "a"
 * ```
 *
 * @since 0.1.0
 */

import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Clock from "effect/Clock"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Backend from "../Backend.ts"
import { Hints, YieldRequests } from "../internal/hints.ts"
import { minimumRetention, timesOf } from "../internal/storage.ts"
import { compareBytes } from "../internal/workId.ts"
import { BackendError, TokenExhausted } from "../LeaseError.ts"

/**
 * Provides a `Backend` that keeps everything in memory, for as long as the
 * layer lives.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer: Layer.Layer<Backend.Backend> = Layer.effect(Backend.Backend, Effect.suspend(() => make))

// -----------------------------------------------------------------------------
// internal
// -----------------------------------------------------------------------------

/** The same columns as every other backend's. Times are in microseconds. */
interface Row {
  readonly workId: string
  holderId: string
  fencingToken: bigint
  attempt: string
  expiresAt: number
  exit: Backend.ReleaseRequest["exit"] | "forgotten" | undefined
  sequence: bigint
  state: Backend.Stored | undefined
  /** −1 where a term that had expired was lifted, which then does not count. */
  termsWithoutProgress: number
  prior: {
    readonly exit: Backend.ExitMode | "expired"
    readonly holderId: string
    readonly fencingToken: bigint
  } | undefined
  priorAttempt: string | undefined
  yieldRequest: { readonly deadline: number | undefined } | undefined
}

const maxToken = 2n ** 63n - 1n

const micros = (duration: Duration.Duration): number => Math.round(Duration.toMillis(duration) * 1000)

const make = Effect.gen(function*() {
  const clock = yield* Clock.Clock
  const rows = new Map<string, Row>()
  const hints = new Hints()
  const yieldRequests = new YieldRequests()
  let highWaterMark = 0n

  const clockMicros = (): number => Number(clock.currentTimeNanosUnsafe() / 1000n)

  const batch =
    <Request, Reply>(answer: (request: Request, now: number) => Reply | BackendError): Backend.Batch<Request, Reply> =>
    (requests) =>
      Effect.sync(() => {
        const now = clockMicros()
        return requests.map((request) => answer(request, now)) as unknown as NonEmptyReadonlyArray<
          Reply | BackendError
        >
      })

  const isHeld = (row: Row, now: number): boolean => row.exit === undefined && row.expiresAt > now

  const isCurrent = (row: Row | undefined, term: Backend.Term): row is Row =>
    row !== undefined && row.holderId === term.holderId && row.fencingToken === term.fencingToken

  const countOf = (row: Row): number => Math.max(row.termsWithoutProgress, 0)

  /** What a holder that takes the row would be told. */
  const priorOf = (row: Row): Pick<Row, "prior" | "termsWithoutProgress"> => {
    switch (row.exit) {
      case "forgotten":
        return { prior: undefined, termsWithoutProgress: 0 }
      case "given-back":
        return { prior: row.prior, termsWithoutProgress: countOf(row) }
      default: {
        const { fencingToken, holderId } = row
        return {
          prior: { exit: row.exit ?? "expired", holderId, fencingToken },
          termsWithoutProgress: row.exit !== undefined
            ? countOf(row)
            : row.sequence > 0n
            ? 0
            : row.termsWithoutProgress + 1
        }
      }
    }
  }

  const acquired = (row: Row): Backend.Acquired => ({
    _tag: "Acquired",
    fencingToken: row.fencingToken,
    expiresAt: row.expiresAt / 1000,
    prior: {
      state: stateOf(row),
      term: Option.fromUndefinedOr(row.prior),
      termsWithoutProgress: countOf(row)
    }
  })

  const acquire = batch<Backend.AcquireRequest, Backend.AcquireReply>((request, now) => {
    const { attempt, holderId, workId } = request
    const row = rows.get(workId)
    if (row !== undefined) {
      if (row.attempt === attempt) {
        return isHeld(row, now) && row.holderId === holderId ? acquired(row) : { _tag: "AttemptEnded" }
      }
      if (row.priorAttempt === attempt) return { _tag: "AttemptEnded" }
      if (isHeld(row, now)) {
        return { _tag: "Held", holderId: row.holderId, remaining: Duration.micros(BigInt(row.expiresAt - now)) }
      }
    }
    const left = row && priorOf(row)
    if (
      left?.prior !== undefined && Option.exists(request.quarantineAfter, (after) => left.termsWithoutProgress >= after)
    ) {
      const { exit, holderId } = left.prior
      return { _tag: "Quarantined", termsWithoutProgress: left.termsWithoutProgress, exit, holderId }
    }
    const previous = row?.fencingToken ?? highWaterMark
    if (previous >= maxToken) {
      return new BackendError({ operation: "acquire", outcome: "rejected", reason: new TokenExhausted({}) })
    }
    const taken: Row = {
      workId,
      holderId,
      attempt,
      fencingToken: previous + 1n > now ? previous + 1n : BigInt(now),
      expiresAt: now + micros(request.ttl),
      exit: undefined,
      sequence: 0n,
      state: row?.state,
      prior: left?.prior,
      termsWithoutProgress: left?.termsWithoutProgress ?? 0,
      priorAttempt: row?.attempt,
      yieldRequest: undefined
    }
    rows.set(workId, taken)
    return acquired(taken)
  })

  const extended = (row: Row, now: number): Backend.ExtendReply => ({
    _tag: "Done",
    expiresAt: row.expiresAt / 1000,
    yieldRequest: row.yieldRequest === undefined ? Option.none() : Option.some({
      remaining: Option.map(
        Option.fromUndefinedOr(row.yieldRequest.deadline),
        (deadline) => Duration.micros(BigInt(Math.max(0, deadline - now)))
      )
    })
  })

  const renew = batch<Backend.RenewRequest, Backend.ExtendReply>((request, now) => {
    const row = rows.get(request.workId)
    if (!isCurrent(row, request)) return { _tag: "Fenced" }
    if (!isHeld(row, now)) return { _tag: "Expired" }
    row.expiresAt = now + micros(request.ttl)
    return extended(row, now)
  })

  const checkpoint = batch<Backend.CheckpointRequest, Backend.ExtendReply>((request, now) => {
    const row = rows.get(request.workId)
    if (!isCurrent(row, request)) return { _tag: "Fenced" }
    if (row.exit !== undefined) return { _tag: "Expired" }
    if (request.sequence > row.sequence) {
      row.sequence = request.sequence
      row.state = request.state
    }
    if (request.sequence === row.sequence) row.expiresAt = now + micros(request.ttl)
    return extended(row, now)
  })

  const release = batch<Backend.ReleaseRequest, Backend.TermReply>((request, now) => {
    const row = rows.get(request.workId)
    const prior = row?.prior
    if (!isCurrent(row, request)) {
      return prior !== undefined && prior.holderId === request.holderId &&
          prior.fencingToken === request.fencingToken && prior.exit === request.exit
        ? { _tag: "Done" }
        : { _tag: "Fenced" }
    }
    if (row.exit !== undefined) return { _tag: row.exit === request.exit ? "Done" : "Expired" }
    const revives = Option.isSome(request.state) || (request.exit === "given-back" && row.sequence === 0n)
    if (!isHeld(row, now) && !revives) return { _tag: "Expired" }
    if (Option.isSome(request.state) && request.state.value.sequence > row.sequence) {
      row.sequence = request.state.value.sequence
      row.state = request.state.value.state
    }
    row.exit = request.exit
    row.expiresAt = now
    if (request.exit !== "given-back") {
      if (request.exit === "finished" || request.exit === "retired" || row.sequence > 0n) row.termsWithoutProgress = 0
      else if (request.exit === "abandoned" && !request.interrupted) row.termsWithoutProgress = countOf(row) + 1
    }
    hints.wake(request.workId)
    return { _tag: "Done" }
  })

  const read: Backend.Backend["Service"]["read"] = (term) =>
    Effect.sync(() => {
      const row = rows.get(term.workId)
      return isCurrent(row, term) ? { _tag: "Done", state: stateOf(row) } : { _tag: "Fenced" }
    })

  const forget: Backend.Backend["Service"]["forget"] = (term) =>
    Effect.sync(() => {
      const row = rows.get(term.workId)
      if (!isCurrent(row, term)) return { _tag: "Fenced" }
      if (row.exit === "forgotten") return { _tag: "Done" }
      row.exit = "forgotten"
      row.expiresAt = clockMicros()
      row.state = undefined
      row.prior = undefined
      row.termsWithoutProgress = 0
      row.yieldRequest = undefined
      hints.wake(term.workId)
      return { _tag: "Done" }
    })

  const requestYield: Backend.Backend["Service"]["requestYield"] = ({ deadline, workId }) =>
    Effect.sync(() => {
      const now = clockMicros()
      const row = rows.get(workId)
      if (row === undefined || !isHeld(row, now)) return false
      row.yieldRequest = { deadline: Option.getOrUndefined(Option.map(deadline, (_) => now + micros(_))) }
      yieldRequests.tell(workId)
      return true
    })

  const lift: Backend.Backend["Service"]["lift"] = (workId) =>
    Effect.sync(() => {
      const row = rows.get(workId)
      if (row === undefined) return false
      const counts = row.exit === undefined && !isHeld(row, clockMicros()) && row.sequence === 0n
      row.termsWithoutProgress = counts ? -1 : 0
      return true
    })

  const sweep: Backend.Backend["Service"]["sweep"] = ({ limit, retention }) =>
    Effect.sync(() => {
      const before = clockMicros() - micros(Duration.max(retention, minimumRetention))
      let swept = 0
      for (const row of rows.values()) {
        if (swept === limit) break
        const exit = row.exit === "given-back" ? row.prior?.exit ?? "forgotten" : row.exit
        if ((exit !== "retired" && exit !== "forgotten") || row.expiresAt >= before) continue
        if (row.fencingToken > highWaterMark) highWaterMark = row.fencingToken
        rows.delete(row.workId)
        swept++
      }
      return swept
    })

  const recordOf = (row: Row, now: number, states: boolean): Backend.LeaseRecord => {
    const held = isHeld(row, now)
    const { prior, termsWithoutProgress } = held
      ? { prior: undefined, termsWithoutProgress: countOf(row) }
      : priorOf(row)
    const last = held ? { exit: "held" as const, holderId: row.holderId, fencingToken: row.fencingToken } : prior
    return {
      workId: row.workId,
      term: Option.map(Option.fromUndefinedOr(last), ({ exit, fencingToken, holderId }) => ({
        holderId,
        fencingToken,
        status: exit,
        expiresAt: row.expiresAt / 1000,
        ...timesOf(held, row.expiresAt - now)
      })),
      state: states ? stateOf(row) : Option.none(),
      termsWithoutProgress
    }
  }

  const list: Backend.Backend["Service"]["list"] = ({ after, limit, prefix }) =>
    Effect.sync(() => {
      const now = clockMicros()
      return [...rows.values()]
        .filter((row) =>
          row.workId.startsWith(prefix) && (Option.isNone(after) || compareBytes(row.workId, after.value) > 0)
        )
        .sort((a, b) => compareBytes(a.workId, b.workId))
        .slice(0, limit)
        .map((row) => recordOf(row, now, true))
    })

  const inspect: Backend.Backend["Service"]["inspect"] = ({ states, workIds }) =>
    Effect.sync(() => {
      const now = clockMicros()
      return workIds.flatMap((workId) => {
        const row = rows.get(workId)
        return row === undefined ? [] : [recordOf(row, now, states)]
      })
    })

  return Backend.Backend.of({
    acquire,
    renew,
    checkpoint,
    release,
    read,
    forget,
    requestYield,
    lift,
    sweep,
    inspect,
    list,
    // The first hint comes at once: it may have become free before.
    wakeups: Option.some((workId) => hints.subscribe(workId, () => true, () => {})),
    yieldRequests: Option.some(yieldRequests.subscribe),
    transaction: Option.none()
  })
})

/** A copy, because it becomes the reader's own. */
const stateOf = (row: Row): Option.Option<Backend.Stored> =>
  Option.map(Option.fromUndefinedOr(row.state), ({ bytes, version }) => ({ version, bytes: bytes.slice() }))
