/**
 * The leases of one process: how a term is begun, kept, and ended; how each
 * operation of it is sent; and what is asked and changed without one.
 */

import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import type * as Context from "effect/Context"
import * as SecureRandom from "effect/crypto/SecureRandom"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Base64Url from "effect/encoding/Base64Url"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import * as Random from "effect/Random"
import * as Scope from "effect/Scope"
import * as Backend from "../Backend.ts"
import type { AcquireOptions, HoldOptions, LayerOptions, Lease, Leases, Prior, Token } from "../Lease.ts"
import {
  BackendError,
  type CheckpointDecodeError,
  Fenced,
  type InvalidConfig,
  type InvalidWorkId,
  type LeaseExpired,
  LeaseHeld,
  LeaseLost,
  Other,
  type Quarantined,
  WindowExhausted,
  Yielded
} from "../LeaseError.ts"
import * as Renewal from "../Renewal.ts"
import type * as Work from "../Work.ts"
import { type Codec, codecOf, decodePrior, decodeState, encodeFinal } from "./codec.ts"
import { Deadlines, makeRun } from "./deadlines.ts"
import * as Gather from "./gather.ts"
import { Keeper, type Renew } from "./keeper.ts"
import * as Lines from "./line.ts"
import { positiveMillis, validateId } from "./options.ts"
import * as Quarantine from "./quarantine.ts"
import { type Options as ResendOptions, resend, type Settled, startingWith } from "./resend.ts"
import { endHere, howToLeave, lossOf, noReturn, type Restore, settleExit, supervise } from "./supervision.ts"
import { beganAt, makeToken, Term, termOf } from "./term.ts"
import * as Window from "./window.ts"
import { validate } from "./workId.ts"

export const TypeId = "~worklease/Lease"

type AcquireError = InvalidWorkId | Quarantined | BackendError | LeaseHeld | WindowExhausted

type TakeError = InvalidWorkId | Quarantined | BackendError | LeaseHeld | CheckpointDecodeError | LeaseLost

type ExtendReply = Settled<Backend.ExtendReply>

/** A lease under supervision: renewed, and watched. */
interface Supervised {
  readonly term: Term
  readonly lease: Lease<any>
  /** How its one release went, once that has begun. */
  left: Deferred.Deferred<void, LeaseLost | BackendError> | undefined
}

interface Extending {
  readonly term: Term
  readonly sending: Gather.Options<Backend.RenewRequest | Backend.CheckpointRequest, Backend.ExtendReply>
  readonly resending: ResendOptions
}

class CheckpointRequest implements Backend.CheckpointRequest {
  readonly workId: string
  readonly holderId: string
  readonly fencingToken: bigint
  readonly ttl: Duration.Duration
  readonly sequence: bigint
  readonly state: Backend.Stored

  constructor({ fencingToken, holderId, policy, workId }: Term, state: Backend.Stored, sequence: bigint) {
    this.workId = workId
    this.holderId = holderId
    this.fencingToken = fencingToken
    this.ttl = policy.ttl
    this.sequence = sequence
    this.state = state
  }
}

/** How long a waiter lets pass after an expiry, at most, so that a hundred of them don't arrive together. */
const expiryJitter = 25

/** How often and within how many milliseconds a fail-fast acquire asks again for a row that is changing. */
const contendedTries = 3
const contendedWithin = 20

const contendedJitter = Random.nextBetween(1, contendedWithin / (contendedTries + 1))

interface Acquiring {
  readonly workId: string
  readonly policy: Renewal.Policy
  readonly quarantineAfter: Option.Option<number>
  readonly codec: Codec
  readonly restore: Restore
}

export const make = Effect.fnUntraced(function*(
  options: LayerOptions
): Effect.fn.Return<Leases["Service"], InvalidConfig, Backend.Backend | Scope.Scope> {
  const defaultPolicy = yield* Renewal.make(options)
  const pollInterval = yield* positiveMillis("pollInterval", options.pollInterval ?? "1 second")
  const holderId = options.holderId ?? SecureRandom.uuidV7Unsafe()
  yield* validateId("holderId", holderId)

  // No other attempt is called the same. Short ones make for short rows, and to count is faster than random bytes.
  const attemptPrefix = `${Base64Url.encode(SecureRandom.randomBytesUnsafe(12))}.`
  let attempts = 0

  const backend = yield* Backend.Backend
  const clock = yield* Clock.Clock
  // Whoever builds the layer inside a transaction has it end before the layer does.
  const run = yield* (Option.isNone(backend.transaction) ? makeRun : backend.transaction.value.outside(makeRun))
  const deadlines = new Deadlines(clock, run, (onDue) => renewals.together(onDue))
  const live = new Set<Supervised>()
  // Work that is still under way when the layer closes ends here, for afterwards nothing can be released any more.
  yield* Effect.addFinalizer(() =>
    Effect.forEach([...live], (supervised) => endBeforeClosing(supervised), { concurrency: "unbounded", discard: true })
  )
  const means = { run, clock, deadlines }
  const acquires = Gather.make({ ...means, operation: "acquire", send: backend.acquire })
  const renewals = Gather.make({ ...means, operation: "renew", send: backend.renew })
  const checkpoints = Gather.make({
    ...means,
    operation: "checkpoint",
    send: backend.checkpoint,
    sizeOf: ({ state }) => state.bytes.byteLength
  })
  const releases = Gather.make({
    ...means,
    operation: "release",
    send: backend.release,
    sizeOf: ({ state }) => Option.match(state, { onNone: () => 0, onSome: ({ state }) => state.bytes.byteLength })
  })

  const lines = Lines.make(clock, backend.wakeups)

  // ---------------------------------------------------------------------------
  // sending
  // ---------------------------------------------------------------------------

  const timeoutOf = (policy: Renewal.Policy): number => Duration.toMillis(policy.operationTimeout)

  /** The time for everything that must end by itself: a first sending that is not answered, and one more. */
  const budget = (policy: Renewal.Policy): () => number => {
    const start = Window.now(clock)
    return () => 2 * timeoutOf(policy) - Window.elapsedMillis(clock, start)
  }

  /** An operation that is not gathered. It is sent in fibers that the layer owns, too. */
  const single = <Reply extends { readonly _tag: string }>(
    operation: string,
    workId: string,
    policy: Renewal.Policy,
    send: Effect.Effect<Reply, BackendError>
  ) =>
    Effect.suspend(() => {
      const alone = Gather.make<{ readonly workId: string }, Reply>({
        ...means,
        operation,
        send: () => Effect.map(send, (reply): NonEmptyReadonlyArray<Reply> => [reply])
      })
      return Effect.andThen(
        refuseInsideExclusive(operation, workId),
        resend(operation, alone.send({ workId }, { timeout: timeoutOf(policy) }), {
          workId,
          persistent: false,
          remaining: budget(policy)
        })
      )
    })

  /** The same for what concerns no term, and may answer anything. */
  const ask = <A>(operation: string, workId: string, send: Effect.Effect<A, BackendError>) =>
    Effect.map(
      single(operation, workId, defaultPolicy, Effect.map(send, (answer) => ({ _tag: "Done" as const, answer }))),
      ({ answer }) => answer
    )

  /** Goes on with the transaction of the store that the caller has open, if there is one. */
  const inTransaction = <A, E>(
    f: (transaction: Option.Option<Backend.Transaction>) => Effect.Effect<A, E>
  ): Effect.Effect<A, E> =>
    Option.isNone(backend.transaction) ? f(backend.transaction) : Effect.flatMap(
      backend.transaction.value.isOpen,
      (isOpen) => f(isOpen ? backend.transaction : Option.none())
    )

  /** Operations that never join a transaction would wait for the one they are called in, where it is exclusive. */
  const refuseInsideExclusive = (operation: string, workId: string): Effect.Effect<void, BackendError> =>
    Option.isNone(backend.transaction) || !backend.transaction.value.exclusive
      ? Effect.void
      : Effect.flatMap(backend.transaction.value.isOpen, (isOpen) =>
        isOpen
          ? Effect.fail(
            new BackendError({
              operation,
              workId,
              outcome: "rejected",
              reason: new Other({
                why: "it never joins a transaction, and the open one keeps the client's only connection. " +
                  "Call it outside of the transaction, or use a client with more connections"
              })
            })
          )
          : Effect.void)

  // ---------------------------------------------------------------------------
  // acquiring
  // ---------------------------------------------------------------------------

  const releaseTerm = (
    term: Backend.Term & { readonly policy: Renewal.Policy },
    how: Pick<Backend.ReleaseRequest, "exit" | "interrupted" | "state">,
    remaining = budget(term.policy)
  ) => {
    const { fencingToken, holderId, workId } = term
    const request = { workId, holderId, fencingToken, ...how }
    return resend("release", releases.send(request, { timeout: timeoutOf(term.policy) }), {
      workId,
      persistent: false,
      remaining
    })
  }

  /** Undoes a term whose work never started. */
  const giveBack = (term: Backend.Term & { readonly policy: Renewal.Policy }): Effect.Effect<void> =>
    Effect.ignoreCause(releaseTerm(term, { exit: "given-back", interrupted: false, state: Option.none() }), {
      log: "Warn",
      message: `Could not give back the lease on ${JSON.stringify(term.workId)}; it expires within its ttl`
    })

  /**
   * One attempt, which is all of its sendings. After a refusal the next one is
   * another, because the window counts from its first sending.
   *
   * Interrupted, it finds out whether the lease was taken after all, and gives it back. */
  const attempt = ({ policy, quarantineAfter, restore, workId }: Acquiring) =>
    Effect.suspend(() => {
      const first = Window.now(clock)
      const request = {
        workId,
        holderId,
        attempt: `${attemptPrefix}${(attempts++).toString(36)}`,
        ttl: policy.ttl,
        quarantineAfter
      }
      let entry: Gather.Entry<Backend.AcquireReply> | undefined
      let offers = 0
      const send = Effect.suspend(() => {
        offers++
        entry = acquires.offer(request, { timeout: timeoutOf(policy) })
        return entry.reply
      })
      const inTime = budget(policy)
      const settle = Effect.suspend(() => {
        if (entry === undefined) return Effect.void
        const isWithdrawn = entry.withdraw()
        if (isWithdrawn && offers === 1) return Effect.void
        return resend("acquire", isWithdrawn ? send : startingWith(entry.reply, send), {
          workId,
          persistent: offers > 1,
          remaining: budget(policy),
          unknown: offers > 1
        }).pipe(
          Effect.flatMap((reply) =>
            reply._tag === "Acquired"
              ? giveBack({ workId, holderId, fencingToken: reply.fencingToken, policy })
              : Effect.void
          ),
          Effect.ignoreCause({
            log: "Warn",
            message: `An acquire of ${
              JSON.stringify(workId)
            } was interrupted and the backend does not answer; if the lease was taken, it expires within its ttl`
          })
        )
      })
      return restore(resend("acquire", send, {
        workId,
        persistent: false,
        remaining: () => Math.min(inTime(), Window.windowMillis(policy) - Window.elapsedMillis(clock, first))
      })).pipe(
        Effect.onInterrupt(() => settle),
        Effect.map((reply) => ({ reply, first }))
      )
    })

  /** What an answer comes to that is no refusal. */
  const begun = (
    { codec, policy, workId }: Acquiring,
    { first, reply }: Effect.Success<ReturnType<typeof attempt>>
  ): Effect.Effect<{ readonly term: Term; readonly acquired: Backend.Acquired }, AcquireError> => {
    switch (reply._tag) {
      case "Acquired": {
        const term = new Term({
          workId,
          holderId,
          fencingToken: reply.fencingToken,
          policy,
          codec,
          clock,
          confirmedAt: first
        })
        return term.remaining > 0
          ? Effect.succeed({ term, acquired: reply })
          : Effect.andThen(giveBack(term), Effect.fail(new WindowExhausted(term)))
      }
      case "AttemptEnded":
        // The answer came after the end of the term that this attempt had: too late to rely on it.
        return Effect.fail(new WindowExhausted({ workId }))
      case "Quarantined":
        return Effect.fail(Quarantine.errorOf(workId, reply))
      default:
        return Effect.fail(
          new BackendError({
            operation: "acquire",
            workId,
            outcome: "unknown",
            reason: new Other({ why: `the backend gave an answer that is none: ${JSON.stringify(reply)}` })
          })
        )
    }
  }

  /** Takes the lease, or says who has it. A row that is just changing is asked for again. */
  const takeTerm = (
    acquiring: Acquiring,
    since = Window.now(clock),
    tries = 0
  ): ReturnType<typeof begun> =>
    Effect.flatMap(attempt(acquiring), (answer) => {
      const { restore, workId } = acquiring
      const { reply } = answer
      if (reply._tag === "Held") {
        return Effect.fail(
          new LeaseHeld({
            workId,
            holderId: reply.holderId,
            retryAfter: Duration.millis(Math.ceil(Duration.toMillis(reply.remaining)))
          })
        )
      }
      if (reply._tag !== "Contended") return begun(acquiring, answer)
      if (tries === contendedTries || Window.elapsedMillis(clock, since) > contendedWithin) {
        return Effect.fail(new LeaseHeld({ workId, retryAfter: Duration.millis(contendedWithin) }))
      }
      return contendedJitter.pipe(
        Effect.flatMap((jitter) => restore(Effect.sleep(jitter))),
        Effect.andThen(Effect.suspend(() => takeTerm(acquiring, since, tries + 1)))
      )
    })

  /** Takes the lease when it is free, in line with those who wait for it in this process. */
  const waitForTerm = (acquiring: Acquiring): ReturnType<typeof begun> =>
    Effect.scopedWith(Effect.fnUntraced(function*(scope) {
      const { policy, restore, workId } = acquiring
      let line: Lines.Line | undefined
      let contended = 0

      const standInLine = Effect.fnUntraced(function*(heldFor?: number) {
        const joined = line = yield* Scope.provide(lines.join(workId), scope)
        if (heldFor !== undefined) joined.expectHeld(heldFor)
        yield* restore(Scope.provide(joined.first, scope))
        return joined
      })

      /** Waits until the lease may be free, or until a hint arrives. */
      const pause = (millis: number, { wakeup }: Lines.Line) =>
        restore(Effect.raceFirst(Effect.sleep(Math.min(millis, pollInterval)), wakeup))

      const waitForExpiry = Effect.fnUntraced(function*(line: Lines.Line) {
        yield* pause(line.untilExpiry() + (yield* Random.nextBetween(0, expiryJitter)), line)
        // Nothing is known until the answer. Should there be none, the next one in line asks at once.
        line.expectHeld(0)
      })

      if (lines.isOpen(workId)) yield* waitForExpiry(yield* standInLine())
      while (true) {
        const answer = yield* attempt(acquiring)
        const { reply } = answer
        if (reply._tag === "Held") {
          contended = 0
          const remaining = Duration.toMillis(reply.remaining)
          line?.expectHeld(remaining)
          yield* waitForExpiry(line ?? (yield* standInLine(remaining)))
        } else if (reply._tag === "Contended") {
          contended++
          const jitter = yield* contendedJitter
          // A row that stays so is pinned by a fenced transaction, which may last.
          yield* pause(jitter * 2 ** Math.min(contended, 10), line ?? (yield* standInLine()))
        } else {
          if (reply._tag === "Acquired") line?.expectHeld(Duration.toMillis(policy.ttl))
          return yield* begun(acquiring, answer)
        }
      }
    }))

  /** Begins a term, of whose prior nothing is known yet. */
  const begin = (work: Work.Input, options: AcquireOptions | undefined, restore: Restore) =>
    Effect.flatMap(validate(work), (workId) =>
      refuseInsideExclusive("acquire", workId).pipe(
        Effect.andThen(Quarantine.validate(options?.quarantineAfter)),
        Effect.flatMap((quarantineAfter) =>
          Effect.contextWith((context: Context.Context<never>) => {
            const codec = codecOf(work, context)
            const policy = options?.policy ?? defaultPolicy
            const acquiring: Acquiring = { workId, policy, quarantineAfter, codec, restore }
            return options?.wait === true ? waitForTerm(acquiring) : takeTerm(acquiring)
          })
        )
      ))

  // ---------------------------------------------------------------------------
  // operations of a term
  // ---------------------------------------------------------------------------

  /** How the renewals and checkpoints of a term are sent, and what is noted of their answers. */
  const extendingOf = (term: Term, supervised: boolean): Extending => ({
    term,
    sending: {
      timeout: timeoutOf(term.policy),
      turn: term.turn,
      // Of a supervised term nothing is sent once it is lost or has ended, not even what waits in a queue.
      isWanted: supervised ? (now) => !term.ended && !term.loseIfExhausted(now) : undefined,
      onReply: (reply, since, request) => {
        if (reply._tag !== "Done") return
        const hasExtended = !("sequence" in request) || term.mayHaveStored(request.sequence)
        answered(term, since, reply.yieldRequest, hasExtended)
      },
      onFailure: (error, request) => {
        noteUnanswered(term, request)
        term.lastFailure = error
      },
      onLeft: (request) => noteUnanswered(term, request)
    },
    resending: {
      workId: term.workId,
      persistent: supervised,
      remaining: supervised ? () => term.remaining : budget(term.policy)
    }
  })

  const noteUnanswered = (term: Term, request: Backend.RenewRequest | Backend.CheckpointRequest) => {
    if ("sequence" in request) term.mayHaveStored(request.sequence)
  }

  /** A checkpoint that arrives after a later one is done, too, and has not extended the lease. */
  const answered = (
    term: Term,
    sentAt: Window.Instant,
    yieldRequest: Option.Option<Backend.YieldRequest>,
    hasExtended: boolean
  ) => {
    if (hasExtended) term.confirm(sentAt)
    if (Option.isSome(yieldRequest)) term.requestYield(yieldRequest.value)
  }

  const renewRequest = ({ fencingToken, holderId, policy, workId }: Term): Backend.RenewRequest => ({
    workId,
    holderId,
    fencingToken,
    ttl: policy.ttl
  })

  /** Takes effect in the order of the calls, however long each of them encodes. */
  const checkpointTerm = <A, E, A2, E2>(
    { resending, sending, term }: Extending,
    state: unknown,
    then: {
      readonly onSuccess: (reply: ExtendReply) => Effect.Effect<A, E>
      readonly onFailure: (error: BackendError) => Effect.Effect<A2, E2>
    }
  ) => {
    const sequence = ++term.sequence
    return Effect.flatMapEager(term.codec.encode(state), (stored) => {
      const request = new CheckpointRequest(term, stored, sequence)
      return checkpoints.sendThen(
        request,
        sending,
        (answer): Effect.Effect<A | A2, E | E2> =>
          Exit.isSuccess(answer) && answer.value._tag !== "Busy"
            ? then.onSuccess(answer.value)
            : Effect.matchEffect(
              resend("checkpoint", startingWith(answer, checkpoints.send(request, sending)), resending),
              then
            )
      )
    })
  }

  /** A checkpoint inside an open transaction: in the caller's fiber, once, and counted after the commit. */
  const checkpointJoined = (
    transaction: Backend.Transaction,
    term: Term,
    state: unknown,
    onCommit: () => void
  ) => {
    const sequence = ++term.sequence
    return Effect.flatMap(term.codec.encode(state), (stored) => {
      const request = new CheckpointRequest(term, stored, sequence)
      const sentAt = Window.now(clock)
      return backend.checkpoint([request]).pipe(
        Effect.flatMap(([reply]) => reply instanceof BackendError ? Effect.fail(reply) : Effect.succeed(reply)),
        Effect.mapError((error) => Gather.forItem(error, term.workId)),
        Effect.flatMap((reply) => {
          // It waits for the row instead.
          return reply._tag === "Busy"
            ? Effect.die(new Error("A checkpoint inside a transaction answered Busy"))
            : Effect.succeed(reply)
        }),
        Effect.tap((reply) => {
          if (reply._tag !== "Done") {
            term.refused ??= term.refusal(reply)
            return Effect.void
          }
          // Noted at once, for the commit may be known here later than in the store. What comes later in the transaction
          // counts not against it: it may be rolled back.
          const hasExtended = term.mayHaveStored(sequence, true)
          return transaction.afterCommit(Effect.sync(() => {
            answered(term, sentAt, reply.yieldRequest, hasExtended && term.latestOutside < sequence)
            onCommit()
          }))
        })
      )
    })
  }

  // ---------------------------------------------------------------------------
  // supervision
  // ---------------------------------------------------------------------------

  /** A renewal asks whether its holder was asked to yield: the hint proves nothing. */
  const hearRequests = (subscribe: Option.Option.Value<Backend.Backend["Service"]["yieldRequests"]>) =>
    Effect.scoped(
      Effect.flatMap(subscribe, (next) => Effect.forever(Effect.map(next, (workId) => keeper.renewNow(workId))))
    ).pipe(
      Effect.catchCause((cause) =>
        Cause.hasInterruptsOnly(cause)
          ? Effect.void
          : Effect.logWarning("Requests to yield are not heard any more, and come with renewals", cause)
      ),
      Effect.annotateLogs({ module: "worklease/Lease", fiber: "yieldRequests" })
    )
  let hearing: Fiber.Fiber<void> | undefined

  // To be told takes a connection, which short leases are not worth.
  const keeper = new Keeper(clock, deadlines, (isLasting) => {
    hearing?.interruptUnsafe()
    hearing = isLasting && Option.isSome(backend.yieldRequests)
      ? run(hearRequests(backend.yieldRequests.value))
      : undefined
  })

  /** What mostly succeeds at once has no fiber of its own. */
  const renewal = ({ resending, sending, term }: Extending): Renew => {
    const request = renewRequest(term)
    const goOn = (first: Exit.Exit<Backend.ExtendReply, BackendError>) =>
      Effect.matchCauseEffect(resend("renew", startingWith(first, renewals.send(request, sending)), resending), {
        onSuccess: (reply) => {
          if (reply._tag !== "Done") term.lose(term.refusal(reply))
          return Effect.void
        },
        onFailure: (cause) =>
          Effect.andThen(
            Effect.logWarning(`Could not renew the lease on ${JSON.stringify(term.workId)}`, cause),
            Effect.sleep(Duration.min(term.policy.renewEvery, Duration.seconds(1)))
          ).pipe(Effect.annotateLogs({ module: "worklease/Lease", fiber: "renewal" }))
      })
    return (onEnd) => {
      let fiber: Fiber.Fiber<void> | undefined
      const cancel = renewals.call(request, sending, (answer) => {
        if (Exit.isSuccess(answer) && answer.value._tag === "Done") return onEnd()
        fiber = run(goOn(answer))
        fiber.addObserver(onEnd)
      })
      return Effect.suspend(() => {
        cancel()
        return fiber === undefined ? Effect.void : Fiber.interrupt(fiber)
      })
    }
  }

  const take = (
    work: Work.Input,
    options: HoldOptions | undefined,
    restore: Restore
  ): Effect.Effect<Supervised, TakeError> =>
    Effect.gen(function*() {
      const { acquired, term } = yield* begin(work, options, restore).pipe(
        Effect.mapError((error) =>
          error._tag === "WindowExhausted" ? new LeaseLost({ workId: error.workId, reason: error }) : error
        )
      )
      const extending = extendingOf(term, true)
      keeper.keep(term, renewal(extending))
      return yield* supervise(term, decodePrior(term.codec, acquired.prior), restore).pipe(
        Effect.flatMap((exit) => settleExit(term, exit)),
        Effect.map((prior): Supervised => ({
          term,
          lease: heldLease(extending, makeToken(term, acquired.expiresAt), prior, options?.yieldAt ?? "checkpoint"),
          left: undefined
        })),
        Effect.tap((supervised) => Effect.sync(() => live.add(supervised))),
        // The work never started.
        Effect.onError(() =>
          Effect.andThen(
            keeper.letGo(term),
            term.loss === undefined || term.loss.reason._tag === "WindowExhausted" ? giveBack(term) : Effect.void
          )
        )
      )
    })

  const heldLease = (
    extending: Extending,
    token: Token<any>,
    prior: Prior<any>,
    yieldAt: "checkpoint" | "handOff"
  ): Lease<any> => {
    const { term } = extending
    const mayYield = () => yieldAt === "checkpoint" && Deferred.isDoneUnsafe(term.yieldRequested)

    /** What follows a reply if the lease is lost, by this reply or before. */
    const lossAfter = (reply: ExtendReply): Effect.Effect<never> | undefined => {
      if (reply._tag !== "Done") term.lose(term.refusal(reply))
      return term.loss && noReturn(term)
    }

    /** Lets an operation begin: one of a lost lease does not return, and one after the work's end is a mistake. */
    const whileHeld = <A, E>(operation: () => Effect.Effect<A, E>): Effect.Effect<A, E> =>
      Effect.suspend(() => {
        if (term.ended && term.loss === undefined) {
          return Effect.die(
            new Error(
              `The lease on ${JSON.stringify(term.workId)} was used after its work had ended and it was released`
            )
          )
        }
        return term.loseIfExhausted() ? noReturn(term) : operation()
      })

    const checkpointed = {
      onFailure: (error: BackendError) => term.loseIfExhausted() ? noReturn(term) : Effect.fail(error),
      onSuccess: (reply: ExtendReply) => lossAfter(reply) ?? (mayYield() ? endHere(term, Option.none()) : Effect.void)
    }

    const lease: Lease<any> = {
      [TypeId]: TypeId,
      workId: term.workId,
      token,
      prior,
      window: Effect.sync(() => Duration.millis(term.loss || term.ended ? 0 : Math.max(0, term.remaining))),
      lost: Deferred.await(term.lost),
      guard: (self) =>
        Effect.uninterruptibleMask((restore) =>
          Effect.flatMap(supervise(term, self, restore), (exit) => settleExit(term, exit))
        ),
      yieldRequested: Effect.sync(() => Deferred.isDoneUnsafe(term.yieldRequested)),
      awaitYieldRequest: Deferred.await(term.yieldRequested),
      checkpoint: (state) =>
        whileHeld(() =>
          inTransaction((transaction) => {
            if (Option.isSome(transaction)) {
              const onCommit = () => {
                if (mayYield()) term.handOff(Option.none())
              }
              return Effect.flatMap(
                checkpointJoined(transaction.value, term, state, onCommit),
                (reply) => lossAfter(reply) ?? Effect.void
              )
            }
            if (mayYield()) {
              return Effect.flatMap(term.codec.encode(state), (stored) => endHere(term, Option.some(stored)))
            }
            return checkpointTerm(extending, state, checkpointed)
          })
        ),
      leaveAs: (exit, ...state) =>
        Effect.flatMap(Effect.suspend(() => encodeFinal(term.codec, state)), (state) => {
          const leave = Effect.sync(() => {
            term.leaving = { exit, state }
          })
          // What is rolled back was not achieved.
          return inTransaction(
            Option.match({ onNone: () => leave, onSome: (transaction) => transaction.afterCommit(leave) })
          )
        }),
      handOff: (...state) =>
        whileHeld(() =>
          Effect.flatMap(
            encodeFinal(term.codec, state),
            (state) =>
              inTransaction((transaction): Effect.Effect<never> =>
                Option.isSome(transaction)
                  ? Effect.die(
                    new Error(
                      "handOff inside a transaction would roll it back. Checkpoint inside it, and hand off after it"
                    )
                  )
                  : endHere(term, state)
              )
          )
        )
    }
    return lease
  }

  /** Leaves once, whoever asks for it. */
  const leave = (
    supervised: Supervised,
    exit: Exit.Exit<unknown, unknown>
  ): Effect.Effect<void, LeaseLost | BackendError> =>
    Effect.suspend(() => {
      if (supervised.left !== undefined) return Deferred.await(supervised.left)
      const left = supervised.left = Deferred.makeUnsafe<void, LeaseLost | BackendError>()
      return Effect.onExit(leaveOnce(supervised, exit), (exit) =>
        Effect.sync(() => {
          live.delete(supervised)
          Deferred.doneUnsafe(left, exit)
        }))
    })

  /** The one release of a supervised term, after its work has ended. Fails as its caller should, if the work did not. */
  const leaveOnce = Effect.fnUntraced(function*(
    { term }: Supervised,
    exit: Exit.Exit<unknown, unknown>
  ): Effect.fn.Return<void, LeaseLost | BackendError> {
    // What runs in a guard elsewhere may not outlive the lease.
    term.leave()
    yield* Effect.withFiber((self) =>
      Effect.forEach([...term.running].filter((fiber) => fiber !== self), Fiber.await, {
        concurrency: "unbounded",
        discard: true
      })
    )
    term.ended = true
    term.interrupted()
    yield* keeper.letGo(term)
    term.loseIfExhausted()
    if (term.loss !== undefined) {
      // Whoever was fenced or has expired says nothing more. Who merely ran out of time may still help its successor.
      if (term.loss.reason._tag === "WindowExhausted") {
        yield* Effect.ignoreCause(
          releaseTerm(term, { exit: "abandoned", interrupted: false, state: Option.none() }, () => 0),
          { log: "Debug", message: `Could not release the lost lease on ${JSON.stringify(term.workId)}` }
        )
      }
      return yield* term.loss
    }
    const how = howToLeave(term, exit)
    const inTime = budget(term.policy)
    const reply = yield* Effect.result(releaseTerm(term, {
      exit: how.exit,
      interrupted: how.interrupted,
      state: Option.map(how.state, (state) => ({ sequence: ++term.sequence, state }))
    }, () => Math.min(inTime(), term.remaining)))
    if (reply._tag === "Success") {
      if (reply.success._tag === "Done") return
      term.lose(term.refusal(reply.success))
      return yield* term.loss!
    }
    yield* Effect.logWarning(
      `Could not release the lease on ${
        JSON.stringify(term.workId)
      }; it expires within its ttl: ${reply.failure.message}`
    )
    if (Option.isSome(how.state)) return yield* reply.failure
  })

  /** Interrupts the work and releases, within the time of a cleanup: this fiber cannot wait for work that does not end. */
  const endBeforeClosing = (supervised: Supervised): Effect.Effect<void> =>
    Effect.forkDetach(Effect.exit(leave(supervised, Exit.interrupt())), { startImmediately: true }).pipe(
      Effect.flatMap((fiber) =>
        fiber.pollUnsafe() !== undefined ? Effect.void : Effect.flatMap(
          Effect.forkDetach(Effect.timeoutOption(Fiber.await(fiber), 2 * timeoutOf(supervised.term.policy))),
          Fiber.join
        )
      ),
      Effect.asVoid
    )

  const hold = (work: Work.Input, options?: HoldOptions) =>
    Effect.uninterruptibleMask((restore) =>
      Effect.flatMap(Effect.scope, (scope) =>
        Effect.flatMap(take(work, options, restore), (supervised) =>
          Effect.as(
            Scope.addFinalizerExit(scope, (exit) =>
              Effect.catchCause(leave(supervised, exit), (cause) =>
                Effect.logDebug(
                  `The lease on ${JSON.stringify(supervised.term.workId)} did not end as it should`,
                  cause
                ))),
            supervised.lease
          )))
    )

  const runWork = <A, EX, R>(
    work: Work.Input,
    f: (lease: Lease<any>) => Effect.Effect<A, EX, R>,
    options?: HoldOptions
  ): Effect.Effect<A, EX | TakeError | Yielded, R> =>
    Effect.uninterruptibleMask(Effect.fnUntraced(function*(restore) {
      const supervised = yield* take(work, options, restore)
      const { lease, term } = supervised
      const exit = yield* supervise(term, Effect.suspend(() => f(lease)), restore)
      const left = yield* Effect.exit(leave(supervised, exit))
      if (term.loss !== undefined) return yield* lossOf(term, exit)
      if (Exit.isFailure(left) && (Exit.isSuccess(exit) || term.handedOff !== undefined)) {
        return yield* Effect.failCause(left.cause)
      }
      if (term.handedOff !== undefined || term.overran) return yield* new Yielded({ workId: term.workId })
      return yield* exit
    }))

  // ---------------------------------------------------------------------------
  // single operations
  // ---------------------------------------------------------------------------

  const acquire = (work: Work.Input, options?: AcquireOptions) =>
    Effect.uninterruptibleMask((restore) =>
      Effect.flatMap(
        begin(work, options, restore),
        ({ acquired, term }) =>
          restore(decodePrior(term.codec, acquired.prior)).pipe(
            Effect.flatMap((prior) =>
              term.remaining > 0
                ? Effect.succeed({ token: makeToken(term, acquired.expiresAt), prior })
                : Effect.fail(new WindowExhausted(term))
            ),
            Effect.onError(() => giveBack(term))
          )
      )
    )

  /** Whether the reply takes effect, as the flat errors of the single operations. */
  const settleSingle = (
    term: Term,
    reply: { readonly _tag: "Done" } | { readonly _tag: "Fenced" | "Expired" }
  ): Effect.Effect<void, Fenced | LeaseExpired> =>
    reply._tag === "Done" ? Effect.void : Effect.fail(term.refusal(reply))

  const inspect: Leases["Service"]["inspect"] = Effect.fnUntraced(function*(works, options) {
    // One that is named twice has one record, whatever the backend makes of that.
    const workIds = Array.from(new Set(yield* Effect.forEach(works, validate)))
    if (workIds.length === 0) return []
    return yield* ask("inspect", workIds[0], backend.inspect({ workIds, states: options?.states === true }))
  })

  const holder: Leases["Service"]["holder"] = Effect.fnUntraced(function*(work) {
    const start = Window.now(clock)
    const [record] = yield* inspect([work])
    return Option.filter(record?.term ?? Option.none(), (term) => term.status === "held").pipe(
      Option.map(({ fencingToken, holderId, remaining }) => ({
        holderId,
        fencingToken,
        since: beganAt(fencingToken),
        remaining: Effect.sync(() =>
          Duration.millis(Math.max(0, Duration.toMillis(remaining) - Window.elapsedMillis(clock, start)))
        )
      }))
    )
  })

  return {
    holderId,
    policy: defaultPolicy,
    acquire: acquire as Leases["Service"]["acquire"],
    hold: hold as Leases["Service"]["hold"],
    run: runWork as Leases["Service"]["run"],
    checkpoint: (token, state) =>
      Effect.suspend(() => {
        const term = termOf(token)
        const onSuccess = (reply: ExtendReply) => settleSingle(term, reply)
        return inTransaction((transaction) =>
          Option.isSome(transaction)
            ? Effect.flatMap(checkpointJoined(transaction.value, term, state, () => {}), onSuccess)
            : term.permit.withPermit(
              Effect.suspend(() =>
                checkpointTerm(extendingOf(term, false), state, { onSuccess, onFailure: Effect.fail })
              )
            )
        )
      }),
    readCheckpoint: (token) =>
      Effect.suspend(() => {
        const term = termOf(token)
        return Effect.flatMap(
          single("readCheckpoint", term.workId, term.policy, backend.read(term)),
          (reply): Effect.Effect<Option.Option<any>, Fenced | CheckpointDecodeError> =>
            reply._tag === "Fenced" ? Effect.fail(new Fenced(term)) : decodeState(term.codec, reply.state)
        )
      }),
    renew: (token) =>
      Effect.suspend(() => {
        const term = termOf(token)
        return Effect.andThen(
          refuseInsideExclusive("renew", term.workId),
          term.permit.withPermit(Effect.suspend(() => {
            const { resending, sending } = extendingOf(term, false)
            return resend("renew", renewals.send(renewRequest(term), sending), resending)
          }))
        ).pipe(Effect.flatMap((reply) => settleSingle(term, reply)))
      }),
    release: (token, exit, ...state) =>
      Effect.suspend(() => {
        const term = termOf(token)
        return Effect.andThen(refuseInsideExclusive("release", term.workId), encodeFinal(term.codec, state)).pipe(
          Effect.flatMap((state) =>
            term.permit.withPermit(Effect.suspend(() =>
              releaseTerm(term, {
                exit,
                interrupted: false,
                state: Option.map(state, (state) => ({ sequence: ++term.sequence, state }))
              })
            ))
          ),
          Effect.flatMap((reply) => settleSingle(term, reply))
        )
      }),
    forget: (token) =>
      Effect.suspend(() => {
        const term = termOf(token)
        return Effect.flatMap(
          term.permit.withPermit(single("forget", term.workId, term.policy, backend.forget(term))),
          (reply) => reply._tag === "Fenced" ? Effect.fail(new Fenced(term)) : Effect.void
        )
      }),
    inspect,
    holder,
    requestYield: (work, options) =>
      Effect.gen(function*() {
        const workId = yield* validate(work)
        const deadline = Option.map(
          Option.fromUndefinedOr(options?.deadline),
          (deadline) => Duration.max(Duration.fromInputUnsafe(deadline), Duration.zero)
        ).pipe(Option.filter(Duration.isFinite))
        return yield* ask("requestYield", workId, backend.requestYield({ workId, deadline }))
      }),
    lift: (work) => Effect.flatMap(validate(work), (workId) => ask("lift", workId, backend.lift(workId)))
  }
})
