/**
 * Gathers the operations of concurrent fibers into batches: while statements
 * are in flight, the next batch forms. No batch waits for company, so a lone
 * operation is sent at once.
 *
 * Batches run in fibers that the layer owns, never in the caller's: a caller
 * that is interrupted does not cancel its neighbours' statement, and nothing
 * joins a transaction that a caller happens to have open.
 */

import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Cause from "effect/Cause"
import type * as Clock from "effect/Clock"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import type { Batch } from "../Backend.ts"
import { BackendError, Other, TimedOut } from "../LeaseError.ts"
import type { Deadline, Deadlines, Run } from "./deadlines.ts"
import type { Turn } from "./turn.ts"
import * as Window from "./window.ts"

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

/** How many milliseconds a few wait for the statement of many. */
const patience = 10

/** From how many that wait on an idle system the first batch takes half, so that the other half is not idle meanwhile. */
const worthHalving = 64

/** One operation on its way. */
export interface Entry<out Reply> {
  readonly reply: Effect.Effect<Reply, BackendError>
  /** Takes it back, if it was not sent yet. */
  readonly withdraw: () => boolean
}

export interface Options<in Reply> {
  /** The milliseconds that it may take, from when its turn has come. */
  readonly timeout: number
  /** Whose operations are sent one after the other. */
  readonly turn?: Turn | undefined
  /** Whether it is still to be sent when its place in a batch has come. */
  readonly isWanted?: (() => boolean) | undefined
  /** Notes the reply, with the moment from which it may be counted, before anything follows from it. */
  readonly onReply?: ((reply: Reply, since: Window.Instant) => void) | undefined
  readonly onFailure?: ((error: BackendError) => void) | undefined
}

export interface Gather<in Request, in out Reply> {
  /** Sends one operation, and takes it back when its caller is interrupted before it was sent. */
  readonly send: (request: Request, options: Options<Reply>) => Effect.Effect<Reply, BackendError>
  /** Queues one operation. */
  readonly offer: (request: Request, options: Options<Reply>) => Entry<Reply>
}

class Pending<out Request, in out Reply> {
  readonly request: Request
  readonly options: Options<Reply>
  since: Window.Instant | undefined
  deadline: Deadline | undefined
  sent = false
  answer: Exit.Exit<Reply, BackendError> | undefined
  /** Whoever waits for the answer. */
  resume: ((answer: Exit.Exit<Reply, BackendError>) => void) | undefined

  constructor(request: Request, options: Options<Reply>) {
    this.request = request
    this.options = options
  }
}

export const make = <Request extends { readonly workId: string }, Reply>(options: {
  readonly operation: string
  readonly send: Batch<Request, Reply>
  readonly run: Run
  readonly clock: Clock.Clock
  readonly deadlines: Deadlines
  /** The bytes that count for a batch's size. */
  readonly sizeOf?: (request: Request) => number
}): Gather<Request, Reply> => {
  const { clock, deadlines, operation, run } = options
  const queue = new Set<Pending<Request, Reply>>()
  /** The sizes of the batches in flight. */
  const inFlight: Array<number> = []
  let scheduled = false
  let impatience: Deadline | undefined

  const failed = (
    workId: string,
    outcome: "rejected" | "unknown",
    reason: BackendError["reason"]
  ): BackendError => new BackendError({ operation, workId, outcome, reason })

  const settle = (entry: Pending<Request, Reply>, answer: Exit.Exit<Reply, BackendError>) => {
    if (entry.answer !== undefined) return
    entry.answer = answer
    if (entry.deadline !== undefined) deadlines.cancel(entry.deadline)
    entry.resume?.(answer)
  }

  const withdraw = (entry: Pending<Request, Reply>): boolean => {
    if (entry.sent) return false
    queue.delete(entry)
    if (entry.deadline !== undefined) deadlines.cancel(entry.deadline)
    return true
  }

  const enqueue = (entry: Pending<Request, Reply>): void => {
    queue.add(entry)
    schedule()
    if (entry.answer !== undefined) return
    entry.deadline = deadlines.set(entry.options.timeout, () => {
      const outcome = withdraw(entry) ? "rejected" : "unknown"
      settle(entry, Exit.fail(failed(entry.request.workId, outcome, new TimedOut({}))))
    })
  }

  const send: Gather<Request, Reply>["send"] = (request, options) =>
    Effect.callback((resume) => {
      const { onFailure, onReply, turn } = options
      const entry = new Pending(request, options)
      const begin = () => {
        const since = entry.since = Window.now(clock)
        entry.resume = (answer) => {
          if (Exit.isSuccess(answer)) onReply?.(answer.value, since)
          else if (onFailure !== undefined) Option.map(Exit.findErrorOption(answer), onFailure)
          turn?.end()
          resume(answer)
        }
        enqueue(entry)
      }
      if (turn === undefined) begin()
      else turn.take(begin)
      return Effect.sync(() => {
        if (entry.since === undefined) return turn!.cancel(begin)
        entry.resume = undefined
        withdraw(entry)
        turn?.end()
      })
    })

  const offer: Gather<Request, Reply>["offer"] = (request, options) => {
    const entry = new Pending(request, options)
    enqueue(entry)
    return {
      withdraw: () => withdraw(entry),
      reply: Effect.callback((resume) => {
        if (entry.answer !== undefined) return resume(entry.answer)
        entry.resume = resume
        return Effect.sync(() => {
          entry.resume = undefined
        })
      })
    }
  }

  const schedule = () => {
    if (scheduled || queue.size === 0) return
    // An idle system sends at once: under TestClock, an operation is then over before the next sleep is due.
    if (inFlight.length === 0) return sendNext()
    if (inFlight.length >= maxInFlight) return
    // As many as are on their way are worth a second statement. Fewer wait for the first one, but not if it hangs.
    if (queue.size < inFlight[0] && impatience === undefined) {
      impatience = deadlines.set(patience, scheduleSecond)
    }
    if (queue.size >= inFlight[0]) scheduleSecond()
  }

  const scheduleSecond = () => {
    becomePatient()
    if (scheduled) return
    scheduled = true
    // Fibers that are ready to run get to add theirs first.
    run(Effect.andThen(
      Effect.yieldNow,
      Effect.sync(() => {
        scheduled = false
        if (inFlight.length < maxInFlight) sendNext()
      })
    ))
  }

  const becomePatient = () => {
    if (impatience !== undefined) deadlines.cancel(impatience)
    impatience = undefined
  }

  const sendNext = () => {
    becomePatient()
    const isWorthHalving = inFlight.length === 0 && queue.size >= worthHalving
    sendUpTo(isWorthHalving ? Math.ceil(queue.size / 2) : queue.size)
    if (isWorthHalving) sendUpTo(queue.size)
  }

  const sendUpTo = (limit: number) => {
    const batch = takeBatch(Math.min(limit, maxBatchSize))
    if (batch === undefined) return
    inFlight.push(batch.length)
    const statement = run(sendBatch(batch))
    if (statement.pollUnsafe() !== undefined) {
      // In a layer that was closed it has not even begun.
      for (const entry of batch) {
        if (entry.answer !== undefined) continue
        const closed = new Other({ why: "the layer of Leases was closed. Close it after the work that uses it" })
        settle(entry, Exit.fail(failed(entry.request.workId, "rejected", closed)))
      }
      return settled(batch.length)
    }
    // A statement that hangs, and perhaps cannot be interrupted, must not keep its place for ever.
    const deadline = deadlines.set(
      batch.reduce((longest, { options }) => Math.max(longest, options.timeout), 0),
      () => {
        unsubscribe()
        settled(batch.length)
        statement.interruptUnsafe()
      }
    )
    const unsubscribe = statement.addObserver(() => {
      deadlines.cancel(deadline)
      // Whatever has happened to it, nobody is left waiting.
      for (const entry of batch) {
        if (entry.answer !== undefined) continue
        settle(entry, Exit.fail(failed(entry.request.workId, "unknown", new TimedOut({}))))
      }
      settled(batch.length)
    })
  }

  const settled = (size: number) => {
    inFlight.splice(inFlight.indexOf(size), 1)
    schedule()
  }

  const takeBatch = (limit: number): NonEmptyReadonlyArray<Pending<Request, Reply>> | undefined => {
    const workIds = new Set<string>()
    const batch: Array<Pending<Request, Reply>> = []
    let bytes = 0
    for (const entry of queue) {
      if (batch.length === limit) break
      if (entry.options.isWanted?.() === false) {
        queue.delete(entry)
        continue
      }
      if (workIds.has(entry.request.workId)) continue
      bytes += options.sizeOf?.(entry.request) ?? 0
      if (batch.length > 0 && bytes > maxBatchBytes) break
      workIds.add(entry.request.workId)
      queue.delete(entry)
      entry.sent = true
      batch.push(entry)
    }
    return batch.length === 0 ? undefined : batch as unknown as NonEmptyReadonlyArray<Pending<Request, Reply>>
  }

  const sendBatch = (batch: NonEmptyReadonlyArray<Pending<Request, Reply>>): Effect.Effect<void> =>
    Effect.flatMap(
      Effect.exit(
        Effect.suspend(() =>
          options.send(batch.map(({ request }) => request) as unknown as NonEmptyReadonlyArray<Request>)
        )
      ),
      (exit) => {
        if (batch.length > 1 && isRefusedWhole(exit)) {
          return Effect.forEach(
            batch.filter((entry) => entry.options.isWanted?.() !== false),
            (entry) => sendBatch([entry]),
            { discard: true }
          )
        }
        for (let i = 0; i < batch.length; i++) settle(batch[i], answer(batch[i].request.workId, exit, i))
        return Effect.void
      }
    )

  const answer = (
    workId: string,
    exit: Exit.Exit<ReadonlyArray<Reply | BackendError>, BackendError>,
    index: number
  ): Exit.Exit<Reply, BackendError> => {
    if (Exit.isSuccess(exit)) {
      const reply = exit.value[index]
      if (reply instanceof BackendError) return Exit.fail(forItem(reply, workId))
      return reply === undefined
        ? Exit.fail(failed(workId, "unknown", new Other({ why: "the backend left an item unanswered" })))
        : Exit.succeed(reply)
    }
    for (const reason of exit.cause.reasons) {
      if (Cause.isFailReason(reason)) return Exit.fail(forItem(reason.error, workId))
      if (Cause.isDieReason(reason)) {
        return Exit.fail(failed(workId, "unknown", new Other({ cause: reason.defect })))
      }
    }
    return Exit.fail(failed(workId, "unknown", new TimedOut({})))
  }

  return { send, offer }
}

/** The whole batch was refused for a reason that may lie with one item: each is then sent by itself. */
const isRefusedWhole = (exit: Exit.Exit<unknown, BackendError>): boolean =>
  Exit.isFailure(exit) &&
  exit.cause.reasons.some((reason) =>
    Cause.isFailReason(reason) && reason.error.outcome === "rejected" && reason.error.reason._tag === "Other"
  )

const forItem = (error: BackendError, workId: string): BackendError =>
  new BackendError({ operation: error.operation, workId, outcome: error.outcome, reason: error.reason })
