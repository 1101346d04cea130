/**
 * Gathers the operations of concurrent fibers into batches: while statements
 * are in flight, the next batch forms. There are no timers, so a lone
 * operation is sent at once.
 *
 * Batches run in fibers that the layer owns, never in the caller's: a caller
 * that is interrupted does not cancel its neighbours' statement, and nothing
 * joins a transaction that a caller happens to have open.
 */

import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Cause from "effect/Cause"
import * as Deferred from "effect/Deferred"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type * as Fiber from "effect/Fiber"
import type { Batch } from "../Backend.ts"
import { BackendError, Other, TimedOut } from "../LeaseError.ts"

/** The most items in one batch. Larger ones make heap-only updates rarer on PostgreSQL. */
const maxBatchSize = 500

/** The most bytes of states in one batch, unless one state alone has more. More would only be waited for longer. */
const maxBatchBytes = 2 * 1024 * 1024

/**
 * The most batches of one operation in flight: two, so that one that hangs
 * does not hold up everybody. Each further one would keep PostgreSQL from
 * cleaning up after the others, and make heap-only updates rarer.
 */
const maxInFlight = 2

/** Runs an effect in a fiber that the layer owns. */
export type Run = (effect: Effect.Effect<void>) => Fiber.Fiber<void>

/** One operation on its way. */
export interface Entry<out Reply> {
  readonly reply: Effect.Effect<Reply, BackendError>
  /** Takes it back, if it was not sent yet. */
  readonly withdraw: () => boolean
}

export interface Gather<in Request, out Reply> {
  /**
   * Queues one operation, which may take `timeout` milliseconds from now. One
   * that is no longer wanted when its turn comes is dropped.
   */
  readonly offer: (request: Request, timeout: number, isWanted?: () => boolean) => Entry<Reply>
}

interface Pending<Request, Reply> extends Entry<Reply> {
  readonly request: Request
  readonly timeout: number
  readonly isWanted: (() => boolean) | undefined
  readonly deferred: Deferred.Deferred<Reply, BackendError>
  sent: boolean
}

export const make = <Request extends { readonly workId: string }, Reply>(options: {
  readonly operation: string
  readonly send: Batch<Request, Reply>
  readonly run: Run
  /** The bytes that count for a batch's size. */
  readonly sizeOf?: (request: Request) => number
}): Gather<Request, Reply> => {
  const { operation, run } = options
  let queue: Array<Pending<Request, Reply>> = []
  let inFlight = 0
  let scheduled = false

  const failed = (
    workId: string,
    outcome: "rejected" | "unknown",
    reason: BackendError["reason"]
  ): BackendError => new BackendError({ operation, workId, outcome, reason })

  const offer: Gather<Request, Reply>["offer"] = (request, timeout, isWanted) => {
    const deferred = Deferred.makeUnsafe<Reply, BackendError>()
    const entry: Pending<Request, Reply> = {
      request,
      timeout,
      isWanted,
      deferred,
      sent: false,
      reply: Effect.timeoutOrElse(Deferred.await(deferred), {
        duration: timeout,
        orElse: () => Effect.fail(failed(request.workId, entry.withdraw() ? "rejected" : "unknown", new TimedOut({})))
      }),
      withdraw: () => {
        if (entry.sent) return false
        const index = queue.indexOf(entry)
        if (index >= 0) queue.splice(index, 1)
        return true
      }
    }
    queue.push(entry)
    schedule()
    return entry
  }

  const schedule = () => {
    if (scheduled || queue.length === 0 || inFlight >= maxInFlight) return
    // An idle system sends at once: under TestClock, an operation is then over before the next sleep is due.
    if (inFlight === 0) return sendNext()
    scheduled = true
    // Fibers that are ready to run get to add theirs first.
    run(Effect.andThen(
      Effect.yieldNow,
      Effect.sync(() => {
        scheduled = false
        sendNext()
      })
    ))
  }

  const sendNext = () => {
    const batch = takeBatch()
    if (batch === undefined) return
    inFlight++
    const statement = run(sendBatch(batch))
    if (statement.pollUnsafe() !== undefined) {
      // In a layer that was closed it has not even begun.
      for (const { deferred, request } of batch) {
        const closed = new Other({ why: "the layer of Leases was closed. Close it after the work that uses it" })
        Deferred.doneUnsafe(deferred, Effect.fail(failed(request.workId, "rejected", closed)))
      }
      return settled()
    }
    // A statement that hangs, and perhaps cannot be interrupted, must not keep its place for ever.
    const timeout = run(Effect.andThen(
      Effect.sleep(Math.max(...batch.map((entry) => entry.timeout))),
      Effect.sync(() => {
        settled()
        unsubscribe()
        statement.interruptUnsafe()
      })
    ))
    const unsubscribe = statement.addObserver(() => {
      timeout.interruptUnsafe()
      settled()
    })
  }

  const settled = () => {
    inFlight--
    schedule()
  }

  const takeBatch = (): NonEmptyReadonlyArray<Pending<Request, Reply>> | undefined => {
    const workIds = new Set<string>()
    const batch: Array<Pending<Request, Reply>> = []
    const rest: Array<Pending<Request, Reply>> = []
    let bytes = 0
    for (const entry of queue) {
      if (entry.isWanted !== undefined && !entry.isWanted()) continue
      const size = options.sizeOf?.(entry.request) ?? 0
      const fits = batch.length === 0 || (batch.length < maxBatchSize && bytes + size <= maxBatchBytes)
      if (fits && !workIds.has(entry.request.workId)) {
        workIds.add(entry.request.workId)
        bytes += size
        entry.sent = true
        batch.push(entry)
      } else {
        rest.push(entry)
      }
    }
    queue = rest
    return batch.length === 0 ? undefined : batch as unknown as NonEmptyReadonlyArray<Pending<Request, Reply>>
  }

  const sendBatch = (batch: NonEmptyReadonlyArray<Pending<Request, Reply>>): Effect.Effect<void> =>
    Effect.suspend(() => options.send(batch.map((entry) => entry.request) as unknown as NonEmptyReadonlyArray<Request>))
      .pipe(
        Effect.exit,
        Effect.flatMap((exit) => {
          if (batch.length > 1 && isRefusedWhole(exit)) {
            return Effect.forEach(
              batch.filter(({ isWanted }) => isWanted === undefined || isWanted()),
              (entry) => sendBatch([entry]),
              { discard: true }
            )
          }
          for (let i = 0; i < batch.length; i++) {
            Deferred.doneUnsafe(batch[i].deferred, answer(batch[i].request.workId, exit, i))
          }
          return Effect.void
        }),
        // Whatever happens to this fiber, nobody is left waiting.
        Effect.onInterrupt(() =>
          Effect.sync(() => {
            for (const entry of batch) {
              Deferred.doneUnsafe(
                entry.deferred,
                Effect.fail(failed(entry.request.workId, "unknown", new TimedOut({})))
              )
            }
          })
        )
      )

  const answer = (
    workId: string,
    exit: Exit.Exit<ReadonlyArray<Reply | BackendError>, BackendError>,
    index: number
  ): Effect.Effect<Reply, BackendError> => {
    if (Exit.isSuccess(exit)) {
      const reply = exit.value[index]
      if (reply instanceof BackendError) return Effect.fail(forItem(reply, workId))
      return reply === undefined
        ? Effect.fail(failed(workId, "unknown", new Other({ why: "the backend left an item unanswered" })))
        : Effect.succeed(reply)
    }
    for (const reason of exit.cause.reasons) {
      if (Cause.isFailReason(reason)) return Effect.fail(forItem(reason.error, workId))
      if (Cause.isDieReason(reason)) {
        return Effect.fail(failed(workId, "unknown", new Other({ cause: reason.defect })))
      }
    }
    return Effect.fail(failed(workId, "unknown", new TimedOut({})))
  }

  return { offer }
}

/** The whole batch was refused for a reason that may lie with one item: each is then sent by itself. */
const isRefusedWhole = (exit: Exit.Exit<unknown, BackendError>): boolean =>
  Exit.isFailure(exit) &&
  exit.cause.reasons.some((reason) =>
    Cause.isFailReason(reason) && reason.error.outcome === "rejected" && reason.error.reason._tag === "Other"
  )

const forItem = (error: BackendError, workId: string): BackendError =>
  new BackendError({ operation: error.operation, workId, outcome: error.outcome, reason: error.reason })
