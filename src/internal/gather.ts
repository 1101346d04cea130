/**
 * Gathers the operations of concurrent fibers into batches: while statements
 * are in flight, the next batch forms. An idle system sends at once, so a lone
 * operation pays nothing; a few wait a moment for the statement of many.
 *
 * Batches run in fibers that the layer owns, never in the caller's: a caller
 * that is interrupted does not cancel its neighbours' statement, and nothing
 * joins a transaction that a caller happens to have open.
 *
 * What every operation passes through has to be garbage as soon as it is over.
 * V8 comes to allocate object literals that have outlived a collection, and
 * always allocates closures in them, among the old objects, and a `Set` or `Map`
 * leaves the tables behind there that it has outgrown. Until the next major
 * collection, each keeps alive what it refers to, which here is whole batches.
 * Hence classes and arrays, and whoever observes a fiber lets go of the batch.
 */

import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Cause from "effect/Cause"
import type * as Clock from "effect/Clock"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import type * as Fiber from "effect/Fiber"
import * as Option from "effect/Option"
import type { Batch } from "../Backend.ts"
import { BackendError, type BackendErrorReason, Other, TimedOut } from "../LeaseError.ts"
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

export interface Options<in Request, in Reply> {
  /** The milliseconds that it may take, from when its turn has come. */
  readonly timeout: number
  /** Whose operations are sent one after the other. */
  readonly turn?: Turn | undefined
  /** Whether it is still to be sent when its place in a batch has come. */
  readonly isWanted?: ((now: Window.Instant) => boolean) | undefined
  /** Notes the reply, with the moment from which it may be counted, before anything follows from it. */
  readonly onReply?: ((reply: Reply, since: Window.Instant, request: Request) => void) | undefined
  readonly onFailure?: ((error: BackendError, request: Request) => void) | undefined
  /** Notes that its caller does not wait any more for the reply to what was sent. */
  readonly onLeft?: ((request: Request) => void) | undefined
}

export interface Gather<in out Request, in out Reply> {
  /** Sends one operation, and takes it back when its caller is interrupted before it was sent. */
  readonly send: (request: Request, options: Options<Request, Reply>) => Effect.Effect<Reply, BackendError>
  /** Sends one operation. What follows its answer belongs to it, so that both take one step. */
  readonly sendThen: <A, E>(
    request: Request,
    options: Options<Request, Reply>,
    then: (answer: Exit.Exit<Reply, BackendError>) => Effect.Effect<A, E>
  ) => Effect.Effect<A, E>
  /** Sends one operation without a fiber that waits for it. Returns how to take it back, after which nothing is answered. */
  readonly call: (
    request: Request,
    options: Options<Request, Reply>,
    onAnswer: (answer: Exit.Exit<Reply, BackendError>) => void
  ) => () => void
  /** Queues one operation. */
  readonly offer: (request: Request, options: Options<Request, Reply>) => Entry<Reply>
  /** Sends what a function sends together, once it has returned. */
  readonly together: (f: () => void) => void
}

type Resume<Reply> = (answer: Exit.Exit<Reply, BackendError>) => void

class Pending<in out Request, in out Reply> {
  readonly request: Request
  readonly options: Options<Request, Reply>
  /** When it was queued. */
  readonly since: Window.Instant
  /** Until when it may take. */
  readonly dueAt: number
  state: "queued" | "withdrawn" | "sent" = "queued"
  answer: Exit.Exit<Reply, BackendError> | undefined = undefined
  /** Resumes whoever waits for the answer. */
  resume: Resume<Reply> | undefined

  constructor(
    request: Request,
    options: Options<Request, Reply>,
    since: Window.Instant,
    dueAt: number,
    resume: Resume<Reply> | undefined
  ) {
    this.request = request
    this.options = options
    this.since = since
    this.dueAt = dueAt
    this.resume = resume
  }
}

type Entries<Request, Reply> = NonEmptyReadonlyArray<Pending<Request, Reply>>

class InFlight<Request, Reply> {
  /** None once it has landed: an array in which a fiber kept its observer may be old, and keeps alive what that refers to. */
  batch: ReadonlyArray<Pending<Request, Reply>>
  readonly dueAt: number
  hasBegun = false
  statement: Fiber.Fiber<void> | undefined = undefined

  constructor(batch: Entries<Request, Reply>, dueAt: number) {
    this.batch = batch
    this.dueAt = dueAt
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
  let queue: Array<Pending<Request, Reply>> = []
  /** How many of the queue were not withdrawn. */
  let waiting = 0
  /** What was not wanted any more when its turn came. */
  const dropped = new Set<Pending<Request, Reply>>()
  const inFlight: Array<InFlight<Request, Reply>> = []
  let scheduled = false
  let isGatheringNow = false
  let impatience: Deadline | undefined
  /** The earliest moment at which anything may be late. One for all: hardly anything ever is. */
  let lateness: Deadline | undefined

  const failed = (workId: string, outcome: BackendError["outcome"], reason: BackendErrorReason): BackendError =>
    new BackendError({ operation, workId, outcome, reason })

  const unanswered = (workId: string) => failed(workId, "unknown", new TimedOut({}))

  const settle = (entry: Pending<Request, Reply>, answer: Exit.Exit<Reply, BackendError>) => {
    if (entry.answer !== undefined) return
    entry.answer = answer
    const { options, resume } = entry
    if (resume === undefined) return
    if (Exit.isSuccess(answer)) options.onReply?.(answer.value, entry.since, entry.request)
    else {
      Option.map(Exit.findErrorOption(answer), (error) => options.onFailure?.(error, entry.request))
    }
    // First what follows from it: the next operation must not begin on a term that this answer ends.
    resume(answer)
    options.turn?.end()
  }

  /** Whatever has happened to their statement, nobody is left waiting. */
  const settleRest = (batch: ReadonlyArray<Pending<Request, Reply>>, failure: (workId: string) => BackendError) => {
    for (const entry of batch) {
      if (entry.answer === undefined) settle(entry, Exit.fail(failure(entry.request.workId)))
    }
  }

  const withdraw = (entry: Pending<Request, Reply>): boolean => {
    if (entry.state === "sent") return false
    if (entry.state === "queued" && !dropped.delete(entry)) waiting--
    entry.state = "withdrawn"
    if (waiting === 0) queue = []
    return true
  }

  const enqueue = (
    request: Request,
    options: Options<Request, Reply>,
    resume?: Resume<Reply>
  ): Pending<Request, Reply> => {
    const since = Window.now(clock)
    const dueAt = deadlines.timeOf(since) + options.timeout
    const entry = new Pending(request, options, since, dueAt, resume)
    if (!isGatheringNow && waiting === 0 && inFlight.length === 0 && options.isWanted?.(since) !== false) {
      // An idle system sends at once: under TestClock, an operation is then over before the next sleep is due.
      entry.state = "sent"
      dispatch([entry], since)
    } else {
      queue.push(entry)
      waiting++
      schedule()
    }
    if (entry.answer === undefined) expectBy(dueAt)
    return entry
  }

  const expectBy = (dueAt: number) => {
    if (lateness !== undefined && lateness.at <= dueAt) return
    if (lateness !== undefined) deadlines.cancel(lateness)
    lateness = deadlines.setAt(dueAt, () => {
      lateness = undefined
      const dueUntil = deadlines.dueUntil()
      const isLate = ({ dueAt }: { readonly dueAt: number }) => {
        if (dueAt <= dueUntil) return true
        expectBy(dueAt)
        return false
      }
      for (const entry of [...queue, ...dropped, ...inFlight.flatMap(({ batch }) => batch)]) {
        if (entry.state === "withdrawn" || entry.answer !== undefined || !isLate(entry)) continue
        const outcome = withdraw(entry) ? "rejected" : "unknown"
        settle(entry, Exit.fail(failed(entry.request.workId, outcome, new TimedOut({}))))
      }
      for (const flight of inFlight.filter(isLate)) giveUp(flight)
    })
  }

  const call: Gather<Request, Reply>["call"] = (request, options, onAnswer) => {
    const { turn } = options
    if (turn !== undefined && !turn.take()) return callInTurn(turn, request, options, onAnswer)
    const entry = enqueue(request, options, onAnswer)
    return () => takeBack(entry)
  }

  const callInTurn = (turn: Turn, ...[request, options, onAnswer]: Parameters<Gather<Request, Reply>["call"]>) => {
    let entry: Pending<Request, Reply> | undefined
    let isCancelled = false
    const begin = () => {
      entry = enqueue(request, options, onAnswer)
      if (isCancelled) takeBack(entry)
    }
    turn.wait(begin)
    return () => {
      isCancelled = true
      if (entry === undefined) turn.cancel(begin)
      else takeBack(entry)
    }
  }

  const takeBack = (entry: Pending<Request, Reply>) => {
    if (entry.answer !== undefined || entry.resume === undefined) return
    entry.resume = undefined
    if (!withdraw(entry)) entry.options.onLeft?.(entry.request)
    entry.options.turn?.end()
  }

  const sendThen: Gather<Request, Reply>["sendThen"] = (request, options, then) =>
    Effect.callback((resume) => {
      const cancel = call(request, options, (answer) => resume(then(answer)))
      return Effect.sync(cancel)
    })

  const send: Gather<Request, Reply>["send"] = (request, options) => sendThen(request, options, (answer) => answer)

  const offer: Gather<Request, Reply>["offer"] = (request, options) => {
    const entry = enqueue(request, options)
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

  const together: Gather<Request, Reply>["together"] = (f) => {
    isGatheringNow = true
    try {
      f()
    } finally {
      isGatheringNow = false
      schedule()
    }
  }

  const schedule = () => {
    if (scheduled || isGatheringNow || waiting === 0) return
    if (inFlight.length === 0) return sendNext()
    if (inFlight.length >= maxInFlight) return
    // As many as are on their way are worth a second statement. Fewer wait for the first one, but not if it hangs.
    for (const { batch } of inFlight) {
      if (waiting >= batch.length) return scheduleSecond()
    }
    impatience ??= deadlines.set(patience, scheduleSecond)
  }

  const scheduleSecond = () => {
    becomePatient()
    if (scheduled) return
    scheduled = true
    // Fibers that are ready to run get to add theirs first.
    run(Effect.yieldNow).addObserver(() => {
      scheduled = false
      if (inFlight.length < maxInFlight) sendNext()
    })
  }

  const becomePatient = () => {
    if (impatience !== undefined) deadlines.cancel(impatience)
    impatience = undefined
  }

  const sendNext = () => {
    becomePatient()
    if (inFlight.length > 0 || waiting < worthHalving) return sendUpTo(waiting)
    together(() => {
      sendUpTo(Math.ceil(waiting / 2))
      sendUpTo(waiting)
    })
  }

  const sendUpTo = (limit: number) => {
    const now = Window.now(clock)
    const batch = takeBatch(Math.min(limit, maxBatchSize), now)
    if (batch !== undefined) dispatch(batch, now)
  }

  const dispatch = (batch: Entries<Request, Reply>, now: Window.Instant) => {
    let longest = 0
    for (const { options } of batch) longest = Math.max(longest, options.timeout)
    const flight = new InFlight(batch, deadlines.timeOf(now) + longest)
    inFlight.push(flight)
    const statement = run(sendBatch(batch, flight))
    if (statement.pollUnsafe() === undefined) return watch(flight, statement)
    // In a layer that was closed it has not even begun.
    const why = "the layer of Leases was closed. Close it after the work that uses it"
    settleRest(batch, (workId) => failed(workId, flight.hasBegun ? "unknown" : "rejected", new Other({ why })))
    land(flight)
  }

  const watch = (flight: InFlight<Request, Reply>, statement: Fiber.Fiber<void>) => {
    flight.statement = statement
    statement.addObserver(() => end(flight))
  }

  /** A statement that hangs, and perhaps cannot be interrupted, must not keep its place for ever. */
  const giveUp = (flight: InFlight<Request, Reply>) => {
    end(flight)
    flight.statement?.interruptUnsafe()
  }

  const end = (flight: InFlight<Request, Reply>) => {
    settleRest(flight.batch, unanswered)
    land(flight)
  }

  const land = (flight: InFlight<Request, Reply>) => {
    const index = inFlight.indexOf(flight)
    // It was given up.
    if (index < 0) return
    inFlight.splice(index, 1)
    flight.batch = []
    schedule()
    if (lateness === undefined || inFlight.length + waiting + dropped.size > 0) return
    deadlines.cancel(lateness)
    lateness = undefined
  }

  const takeBatch = (limit: number, now: Window.Instant): Entries<Request, Reply> | undefined => {
    const workIds = new Set<string>()
    const batch: Array<Pending<Request, Reply>> = []
    const skipped: Array<Pending<Request, Reply>> = []
    const entries = queue
    queue = []
    let bytes = 0
    let index = 0
    for (; index < entries.length && batch.length < limit; index++) {
      const entry = entries[index]
      // Whoever finds out here that its lease is lost may withdraw it.
      const isWanted = entry.options.isWanted?.(now) !== false
      if (entry.state === "withdrawn") continue
      if (!isWanted) {
        dropped.add(entry)
        waiting--
        continue
      }
      if (workIds.has(entry.request.workId)) {
        skipped.push(entry)
        continue
      }
      bytes += options.sizeOf?.(entry.request) ?? 0
      if (batch.length > 0 && bytes > maxBatchBytes) break
      workIds.add(entry.request.workId)
      entry.state = "sent"
      batch.push(entry)
      waiting--
    }
    queue = skipped.concat(entries.slice(index), queue)
    return batch.length === 0 ? undefined : batch as unknown as Entries<Request, Reply>
  }

  const sendBatch = (batch: Entries<Request, Reply>, flight: InFlight<Request, Reply>): Effect.Effect<void> =>
    Effect.flatMap(
      Effect.exit(Effect.suspend(() => {
        flight.hasBegun = true
        return options.send(batch.map(({ request }) => request) as unknown as NonEmptyReadonlyArray<Request>)
      })),
      (exit) => {
        if (Exit.isSuccess(exit)) {
          for (let i = 0; i < batch.length; i++) {
            settle(batch[i], replyOf(batch[i].request.workId, exit.value[i]))
          }
          return Effect.void
        }
        const { cause } = exit
        const isDivisible = cause.reasons.some((_) => Cause.isFailReason(_) && mayBeOneItem(_.error))
        if (batch.length > 1 && isDivisible) {
          return Effect.forEach(
            batch.filter((entry) => entry.options.isWanted?.(Window.now(clock)) !== false),
            (entry) => sendBatch([entry], flight),
            { discard: true }
          )
        }
        for (const entry of batch) settle(entry, Exit.fail(failureOf(entry.request.workId, cause)))
        return Effect.void
      }
    )

  const replyOf = (workId: string, reply: Reply | BackendError | undefined): Exit.Exit<Reply, BackendError> => {
    if (reply instanceof BackendError) return Exit.fail(forItem(reply, workId))
    return reply === undefined
      ? Exit.fail(failed(workId, "unknown", new Other({ why: "the backend left an item unanswered" })))
      : Exit.succeed(reply)
  }

  const failureOf = (workId: string, cause: Cause.Cause<BackendError>): BackendError => {
    for (const reason of cause.reasons) {
      if (Cause.isFailReason(reason)) return forItem(reason.error, workId)
      if (Cause.isDieReason(reason)) return failed(workId, "unknown", new Other({ cause: reason.defect }))
    }
    return unanswered(workId)
  }

  return { call, send, sendThen, offer, together }
}

/** Whether a batch was refused as a whole for a reason that may lie with one item: each is then sent by itself. */
export const mayBeOneItem = (error: BackendError): boolean =>
  error.outcome === "rejected" && error.reason._tag === "Other"

/** The same error, of one of the work IDs that it was for. */
export const forItem = (error: BackendError, workId: string): BackendError =>
  new BackendError({ operation: error.operation, workId, outcome: error.outcome, reason: error.reason })
