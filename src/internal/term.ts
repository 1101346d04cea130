/**
 * One term as its holder sees it: what it may still rely on, how it was lost,
 * and how its work wants to leave.
 */

import type * as Clock from "effect/Clock"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import type * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import * as Semaphore from "effect/Semaphore"
import type * as Backend from "../Backend.ts"
import type { AnyToken, Token } from "../Lease.ts"
import {
  type BackendError,
  Fenced,
  LeaseExpired,
  LeaseLost,
  type LeaseLostReason,
  WindowExhausted
} from "../LeaseError.ts"
import type * as Renewal from "../Renewal.ts"
import type { Codec } from "./codec.ts"
import { Turn } from "./turn.ts"
import * as Window from "./window.ts"

interface YieldDeadline {
  readonly since: Window.Instant
  readonly millis: number
}

export class Term implements Backend.Term {
  readonly workId: string
  readonly holderId: string
  readonly fencingToken: bigint
  readonly policy: Renewal.Policy
  readonly codec: Codec
  readonly clock: Clock.Clock

  /** Renewals and checkpoints are sent one after the other. */
  readonly turn = new Turn()
  private ownPermit: Semaphore.Semaphore | undefined
  sequence = 0n
  private latest = 0n
  /** The last checkpoint that may have been stored outside of any transaction of the user's. */
  latestOutside = 0n

  readonly lost = Deferred.makeUnsafe<never, LeaseLost>()
  loss: LeaseLost | undefined

  /**
   * Why a checkpoint inside a transaction was refused. It is final, also where
   * the user's code has caught the error.
   */
  refused: Fenced | LeaseExpired | undefined

  /** Whether the work left at a safe point, and the state it left to its release. */
  handedOff: { readonly state: Option.Option<Backend.Stored> } | undefined
  /** Whether the work was interrupted because it overran a handoff's deadline. */
  overran = false
  /** How a success will leave. */
  leaving: { readonly exit: "finished" | "retired"; readonly state: Option.Option<Backend.Stored> } = {
    exit: "finished",
    state: Option.none()
  }

  readonly yieldRequested = Deferred.makeUnsafe<void>()
  /** Lets the deadline of a requested handoff be kept. */
  onYieldRequest: () => void = () => {}
  /** When the requested handoff's work is interrupted, by the local clock. */
  private yieldDeadline: YieldDeadline | undefined
  /** When its own process wants it to be interrupted, whatever others ask for. */
  private ownYieldDeadline: YieldDeadline | undefined

  /** Why the last attempt to extend the lease failed, unless one has succeeded since. */
  lastFailure: BackendError | undefined

  /** Whether the term is being left: nothing begins under it any more. */
  private leavingNow = false
  /** Whether its work has ended. What still uses its lease then is a mistake. */
  ended = false
  /** Completes when its work begins to be interrupted, and when it has ended. */
  readonly interrupting = Deferred.makeUnsafe<void>()
  /** The work that runs under it. */
  readonly running = new Set<Fiber.Fiber<unknown, unknown>>()

  private confirmedAt: Window.Instant
  private readonly window: number
  private readonly onStop = new Set<() => void>()

  constructor(options: {
    readonly workId: string
    readonly holderId: string
    readonly fencingToken: bigint
    readonly policy: Renewal.Policy
    readonly codec: Codec
    readonly clock: Clock.Clock
    readonly confirmedAt: Window.Instant
  }) {
    this.workId = options.workId
    this.holderId = options.holderId
    this.fencingToken = options.fencingToken
    this.policy = options.policy
    this.codec = options.codec
    this.clock = options.clock
    this.confirmedAt = options.confirmedAt
    this.window = Window.windowMillis(options.policy)
  }

  /** Operations on the token take turns, each from its beginning to its end. A held lease rarely has any. */
  get permit(): Semaphore.Semaphore {
    return this.ownPermit ??= Semaphore.makeUnsafe(1)
  }

  /** The milliseconds left for which the holder may rely on the lease. */
  get remaining(): number {
    return this.window - this.sinceConfirmed
  }

  /** The milliseconds since the last operation that succeeded was sent. */
  get sinceConfirmed(): number {
    return Window.elapsedMillis(this.clock, this.confirmedAt)
  }

  /** Notes that a checkpoint may have been stored. Tells whether it comes after all that may have been before. */
  mayHaveStored(sequence: bigint, inTransaction = false): boolean {
    if (!inTransaction && sequence > this.latestOutside) this.latestOutside = sequence
    if (sequence < this.latest) return false
    this.latest = sequence
    return true
  }

  /** An operation that was sent at `sentAt` has succeeded. */
  confirm(sentAt: Window.Instant): void {
    // Answers may arrive in another order than they were sent in.
    if (sentAt.monotonic >= this.confirmedAt.monotonic) this.confirmedAt = sentAt
    this.lastFailure = undefined
  }

  /** Whether the work has to end now. */
  get stopped(): boolean {
    return this.loss !== undefined || this.handedOff !== undefined || this.overran || this.leavingNow
  }

  /** Calls back when the work has to end, at once if it already has to. Returns how to take that back. */
  whenStopped(callback: () => void): () => void {
    if (this.stopped) callback()
    else this.onStop.add(callback)
    return () => this.onStop.delete(callback)
  }

  private stop(): void {
    for (const callback of this.onStop) callback()
    this.onStop.clear()
  }

  lose(reason: LeaseLostReason): void {
    if (this.loss !== undefined) return
    this.loss = new LeaseLost({ workId: this.workId, reason })
    Deferred.doneUnsafe(this.lost, Effect.fail(this.loss))
    this.stop()
  }

  /** Work that goes on after its window has ended is lost, whether or not anybody has noticed yet. */
  loseIfExhausted(now: Window.Instant = Window.now(this.clock)): boolean {
    if (this.loss === undefined && this.window <= Window.millisBetween(this.confirmedAt, now)) {
      const { fencingToken, lastFailure, workId } = this
      this.lose(new WindowExhausted({ workId, fencingToken, cause: lastFailure }))
    }
    return this.loss !== undefined
  }

  handOff(state: Option.Option<Backend.Stored>): void {
    if (this.stopped) return
    this.handedOff = { state }
    this.stop()
  }

  /** Whatever still runs under it has to end, for it is about to be released. */
  leave(): void {
    this.leavingNow = true
    this.stop()
  }

  interrupted(): void {
    Deferred.doneUnsafe(this.interrupting, Effect.void)
  }

  overrun(): void {
    if (this.stopped) return
    this.overran = true
    this.stop()
  }

  requestYield(request: Backend.YieldRequest): void {
    this.yieldDeadline = Option.getOrUndefined(Option.map(request.remaining, (remaining) => ({
      since: Window.now(this.clock),
      millis: Duration.toMillis(remaining)
    })))
    this.beAsked()
  }

  /** Its own process asks it to leave, within so many milliseconds. */
  requestYieldWithin(millis: number): void {
    this.ownYieldDeadline = { since: Window.now(this.clock), millis }
    this.beAsked()
  }

  private beAsked(): void {
    Deferred.doneUnsafe(this.yieldRequested, Effect.void)
    this.onYieldRequest()
  }

  /** The milliseconds until the work has to have left; infinite if no deadline was set. */
  get untilYieldDeadline(): number {
    return Math.min(this.until(this.yieldDeadline), this.until(this.ownYieldDeadline))
  }

  private until(deadline: YieldDeadline | undefined): number {
    return deadline === undefined ? Infinity : deadline.millis - Window.elapsedMillis(this.clock, deadline.since)
  }

  /** The error of a refused operation. */
  refusal(reply: { readonly _tag: "Fenced" | "Expired" }): Fenced | LeaseExpired {
    return reply._tag === "Fenced" ? new Fenced(this) : new LeaseExpired(this)
  }
}

/** Proves its term, because nothing outside of this class can put one into it. */
class ProvenToken {
  readonly workId: string
  readonly holderId: string
  readonly fencingToken: bigint
  readonly expiresAt: number
  readonly #term: Term

  constructor(term: Term, expiresAt: number) {
    this.workId = term.workId
    this.holderId = term.holderId
    this.fencingToken = term.fencingToken
    this.expiresAt = expiresAt
    this.#term = term
    Object.freeze(this)
  }

  static termOf(self: unknown): Term {
    if (typeof self === "object" && self !== null && #term in self) return self.#term
    throw new TypeError("Not a token: only an acquire makes one")
  }
}

export const makeToken = (term: Term, expiresAt: number): Token<any> =>
  new ProvenToken(term, expiresAt) as unknown as Token<any>

export const termOf = (self: AnyToken): Term => ProvenToken.termOf(self)

/**
 * When a term began, in milliseconds since the epoch, by the backend's clock:
 * read off its token, and late by as much as that clock has been set back.
 */
export const beganAt = (fencingToken: bigint): number => Number(fencingToken / 1000n)
