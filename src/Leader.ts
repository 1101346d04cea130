/**
 * Leadership: of all processes that stand for it, one at a time leads and has
 * the duty.
 *
 * `elect` stands for one term. `forever` stands again after each, and `layer`
 * does so for everything that a layer starts. `observe` tells who leads, also
 * to processes that do not stand, and `health` is for a health endpoint.
 *
 * **Details**
 *
 * A leader holds the lease on a work ID while its duty runs. The duty is
 * interrupted, and its finalizers run, when
 *
 * - the lease is lost: fencing and the window work as in `Lease`;
 * - somebody asks for the leadership with `Lease.requestYield`: the duty's
 *   finalizers are its safe point;
 * - it makes no progress for as long as `giveUpAfter.stalledFor` says.
 *
 * The lease is released only after that, so the next leader begins when this
 * one has ended.
 *
 * **Gotchas**
 *
 * A duty that cannot be interrupted keeps the leadership until it ends, or
 * until its lease is lost. `health` tells of the latter.
 *
 * **Example** (A scheduler that runs in one process at a time)
 *
 * ```ts
 * import { Effect, Layer } from "effect"
 * import { Leader, Lease } from "worklease"
 * import * as Memory from "worklease/layers/Memory"
 *
 * const tick = Effect.andThen(Effect.log("only the leader does this"), Leader.progress)
 *
 * const Scheduler = Layer.effectDiscard(
 *   Effect.forkScoped(Effect.forever(Effect.andThen(tick, Effect.sleep("10 seconds"))))
 * ).pipe(Leader.layer("scheduler", { giveUpAfter: { stalledFor: "1 minute" } }))
 *
 * const program = Layer.launch(Scheduler.pipe(Layer.provide(Lease.layer), Layer.provide(Memory.layer)))
 * ```
 *
 * @since 0.1.0
 */

import * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import { dual } from "effect/Function"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as Pull from "effect/Pull"
import * as Queue from "effect/Queue"
import * as Schedule from "effect/Schedule"
import * as Stream from "effect/Stream"
import { type Term, termOf } from "./internal/term.ts"
import * as Window from "./internal/window.ts"
import { validate } from "./internal/workId.ts"
import { type AcquireOptions, CurrentLease, type Lease, Leases } from "./Lease.ts"
import type {
  BackendError,
  InvalidWorkId,
  LeaseHeld,
  LeaseLost,
  LeaseLostReason,
  Quarantined,
  Yielded
} from "./LeaseError.ts"

/**
 * Who leads, as an observer is told.
 *
 * @category models
 * @since 0.1.0
 */
export interface Leader {
  readonly holderId: string
  readonly fencingToken: bigint
  /**
   * When it was elected, in milliseconds since the epoch, by the backend's
   * clock. Late by as much as that clock has been set back before.
   */
  readonly since: number
}

/**
 * What happens to the leadership of this process.
 *
 * **Details**
 *
 * Each `Elected` is followed by exactly one `Lost` or `Relinquished` of the
 * same fencing token, and neither comes without it: a candidate that never was
 * elected loses nothing.
 *
 * - `Elected`: the lease is held, and the duty begins when the notification
 *   has been handled.
 * - `Lost`: the lease was lost, and the duty has ended.
 * - `Relinquished`: the duty has ended, and the lease was released; where the
 *   backend could not be reached for that, it expires by itself. Another process
 *   may be told before this one that it is elected. `why` is
 *   `ended` (the duty succeeded), `failed`, `stalled` (it made no progress),
 *   `yielded` (somebody asked for it), or `interrupted` (as when the process
 *   shuts down).
 *
 * @category models
 * @since 0.1.0
 */
export type Event =
  | { readonly _tag: "Elected"; readonly workId: string; readonly fencingToken: bigint }
  | {
    readonly _tag: "Lost"
    readonly workId: string
    readonly fencingToken: bigint
    readonly reason: LeaseLostReason
  }
  | {
    readonly _tag: "Relinquished"
    readonly workId: string
    readonly fencingToken: bigint
    readonly why: "ended" | "failed" | "stalled" | "yielded" | "interrupted"
  }

/**
 * Options of one term.
 *
 * @category options
 * @since 0.1.0
 */
export interface ElectOptions<Wait extends boolean = boolean> extends AcquireOptions<Wait> {
  /**
   * Is told when this process is elected, loses the leadership, or relinquishes
   * it. Its defects are logged, and change nothing. Defaults to nothing.
   */
  readonly onEvent?: ((event: Event) => Effect.Effect<void>) | undefined
}

/**
 * Options of `forever` and `layer`.
 *
 * @category options
 * @since 0.1.0
 */
export interface ForeverOptions extends Pick<ElectOptions, "policy" | "onEvent"> {
  /**
   * After how many terms in a row nobody leads any more, until `Lease.lift`: it
   * then stands again as after a failure. A duty makes no checkpoints, so each
   * term counts whose duty failed or stalled, or whose process died, however
   * long it was; a duty that succeeds begins a new row. Defaults to never.
   */
  readonly quarantineAfter?: number | undefined
  /**
   * The pauses before it stands again, and between two runs of a duty that
   * fails. They begin anew after a duty that has run for a minute. A pause lasts
   * at least 100 ms, and after the schedule's end 30 seconds. Defaults to 1
   * second, doubled each time up to 30 seconds, ±20 %.
   */
  readonly retrySchedule?: Schedule.Schedule<unknown> | undefined
  /** When a leader is of no use and stands aside for 5 seconds at least, so that another may try. */
  readonly giveUpAfter?: {
    /**
     * After how many failures of the duty in a row; before that, the leader runs
     * it again. A duty that has made progress, or has run for a minute, begins a
     * new row. Defaults to 3.
     */
    readonly failures?: number | undefined
    /**
     * After how long without {@link progress}, counted from its beginning.
     * Defaults to never: most duties do not tell.
     */
    readonly stalledFor?: Duration.Input | undefined
  } | undefined
}

/**
 * Runs an effect while leading, for one term.
 *
 * **Details**
 *
 * The effect may read its lease from `CurrentLease`. Fails with
 *
 * - `LeaseHeld` while another process leads, unless it waits;
 * - `LeaseLost` when the leadership is lost: the effect is then interrupted;
 * - `Yielded` when somebody asked for the leadership;
 * - `Quarantined` after `quarantineAfter` terms without progress;
 * - `InvalidWorkId` before anything is sent;
 * - `BackendError` when the lease could not be taken;
 *
 * and with the effect's own errors.
 *
 * @category combinators
 * @since 0.1.0
 */
export const elect: {
  <const Wait extends boolean = false>(workId: string, options?: ElectOptions<Wait>): <A, EX, R>(
    self: Effect.Effect<A, EX, R>
  ) => Effect.Effect<
    A,
    EX | InvalidWorkId | Quarantined | BackendError | (Wait extends true ? never : LeaseHeld) | LeaseLost | Yielded,
    Leases | Exclude<R, CurrentLease>
  >
  <A, EX, R, const Wait extends boolean = false>(
    self: Effect.Effect<A, EX, R>,
    workId: string,
    options?: ElectOptions<Wait>
  ): Effect.Effect<
    A,
    EX | InvalidWorkId | Quarantined | BackendError | (Wait extends true ? never : LeaseHeld) | LeaseLost | Yielded,
    Leases | Exclude<R, CurrentLease>
  >
} = dual(
  (args) => Effect.isEffect(args[0]),
  <A, EX, R, const Wait extends boolean = false>(
    self: Effect.Effect<A, EX, R>,
    workId: string,
    options?: ElectOptions<Wait>
  ): Effect.Effect<
    A,
    EX | InvalidWorkId | Quarantined | BackendError | (Wait extends true ? never : LeaseHeld) | LeaseLost | Yielded,
    Leases | Exclude<R, CurrentLease>
  > => Leases.use((leases) => lead(leases, workId, () => self, options))
)

/**
 * Runs an effect whenever this process leads, and stands again after each
 * term.
 *
 * **Details**
 *
 * It ends only when it is interrupted, which releases the leadership, or with
 * `InvalidWorkId` before anything is sent. Whatever else fails is logged: it
 * stands again after a pause, also while the backend is out of reach. A duty
 * that succeeds ends its term, too.
 *
 * @category combinators
 * @since 0.1.0
 */
export const forever: {
  (workId: string, options?: ForeverOptions): <A, EX, R>(
    self: Effect.Effect<A, EX, R>
  ) => Effect.Effect<never, InvalidWorkId, Leases | Exclude<R, CurrentLease>>
  <A, EX, R>(
    self: Effect.Effect<A, EX, R>,
    workId: string,
    options?: ForeverOptions
  ): Effect.Effect<never, InvalidWorkId, Leases | Exclude<R, CurrentLease>>
} = dual(
  (args) => Effect.isEffect(args[0]),
  <A, EX, R>(
    self: Effect.Effect<A, EX, R>,
    workId: string,
    options?: ForeverOptions
  ): Effect.Effect<never, InvalidWorkId, Leases | Exclude<R, CurrentLease>> =>
    Leases.use((leases) => Effect.andThen(validate(workId), standForever(leases, self, workId, options)))
)

/**
 * Builds a layer when this process is elected, tears it down when it no longer
 * leads, and stands again.
 *
 * **Details**
 *
 * It provides nothing, because services that were handed out cannot be taken
 * back: it is for what a layer starts. A layer that fails to be built is a duty
 * that fails. Each term builds it anew, with everything that was not provided
 * from outside.
 *
 * Fails with `InvalidWorkId` before anything is sent. It is built at once,
 * elected or not, and closing its scope releases the leadership.
 *
 * **Gotchas**
 *
 * A fiber that the layer has started and that ends by itself is no failure of
 * the layer. Where that may happen, let the fiber call {@link progress}, and
 * set `giveUpAfter.stalledFor`.
 *
 * @category combinators
 * @since 0.1.0
 */
export const layer: {
  (workId: string, options?: ForeverOptions): <A, EX, R>(
    self: Layer.Layer<A, EX, R>
  ) => Layer.Layer<never, InvalidWorkId, Leases | Exclude<R, CurrentLease>>
  <A, EX, R>(
    self: Layer.Layer<A, EX, R>,
    workId: string,
    options?: ForeverOptions
  ): Layer.Layer<never, InvalidWorkId, Leases | Exclude<R, CurrentLease>>
} = dual(
  (args) => Layer.isLayer(args[0]),
  <A, EX, R>(
    self: Layer.Layer<A, EX, R>,
    workId: string,
    options?: ForeverOptions
  ): Layer.Layer<never, InvalidWorkId, Leases | Exclude<R, CurrentLease>> =>
    Layer.effectDiscard(Effect.gen(function*() {
      yield* validate(workId)
      const duty = Effect.scopedWith((scope) =>
        // In a memo map of its own: what is built elsewhere is not torn down when the leadership ends.
        Effect.andThen(Layer.buildWithMemoMap(self, Layer.makeMemoMapUnsafe(), scope), Effect.never)
      )
      yield* forever(duty, workId, options).pipe(
        Effect.tapCause((cause) =>
          // Nobody else hears of it.
          Cause.hasInterruptsOnly(cause) ? Effect.void : annotated(Effect.logError(
            `The standing for the leadership of ${JSON.stringify(workId)} has ended`,
            cause
          ))
        ),
        Effect.forkScoped
      )
    }))
)

/**
 * Tells that the duty of the running leader makes progress, so that it is not
 * given up by `giveUpAfter`. Sends nothing; outside of a duty it does nothing.
 *
 * @category combinators
 * @since 0.1.0
 */
export const progress: Effect.Effect<void> = Effect.suspend(() => Effect.flatMap(Progress, (note) => Effect.sync(note)))

/**
 * Options of an observer.
 *
 * @category options
 * @since 0.1.0
 */
export interface ObserveOptions {
  /** How often it looks, while it can reach the backend. Defaults to 1 second. */
  readonly pollInterval?: Duration.Input | undefined
}

/**
 * Tells who leads: first what it finds, and then every change. Takes no part
 * in the election.
 *
 * **Details**
 *
 * A leader is reported up to the expiry that was read last, counted from
 * before that was read, so that nobody is reported who may have been succeeded
 * unseen. While the backend is out of reach, that is nobody after a while. Who
 * consumes slowly skips changes, and gets the latest.
 *
 * Fails with `InvalidWorkId` before anything is sent, and with `BackendError`
 * when the backend refuses to answer, which is not when it is out of reach:
 * then it looks again.
 *
 * @category constructors
 * @since 0.1.0
 */
export const observe = (
  workId: string,
  options?: ObserveOptions
): Stream.Stream<Option.Option<Leader>, InvalidWorkId | BackendError, Leases> =>
  Stream.callback<Option.Option<Leader>, InvalidWorkId | BackendError, Leases>(
    (queue) => Leases.use((leases) => observing(leases, workId, options, queue)),
    { bufferSize: 1, strategy: "sliding" }
  )

/**
 * How the leadership of this process is.
 *
 * @category models
 * @since 0.1.0
 */
export interface Health {
  /** False only if this process leads, and its last renewal is too old. */
  readonly healthy: boolean
  /** Whether its duty runs or winds down. */
  readonly leading: boolean
  /** How long ago the last operation was sent that extended the lease. None unless it leads. */
  readonly renewedAgo: Option.Option<Duration.Duration>
}

/**
 * The leadership of this process, for a health endpoint. Asks nothing of the
 * backend.
 *
 * **Details**
 *
 * A renewal is too old after `maxAge`, which defaults to the window: `ttl` −
 * `safetyMargin`. Then the duty has been interrupted, so a process that stays
 * unhealthy has a duty which does not end: restart it. A process that does not
 * lead is healthy.
 *
 * It knows of the duties that run over the same `Leases`.
 *
 * @category constructors
 * @since 0.1.0
 */
export const health = (
  workId: string,
  options?: { readonly maxAge?: Duration.Input | undefined }
): Effect.Effect<Health, never, Leases> =>
  Leases.use((leases) =>
    Effect.sync(() => {
      const terms = [...leading.get(leases)?.get(workId) ?? []]
      const maxAge = options?.maxAge === undefined
        ? undefined
        : Duration.toMillis(Duration.fromInputUnsafe(options.maxAge))
      return {
        healthy: terms.every((term) => term.sinceConfirmed < (maxAge ?? Window.windowMillis(term.policy))),
        leading: terms.length > 0,
        renewedAgo: terms.length === 0
          ? Option.none()
          : Option.some(Duration.millis(Math.max(...terms.map((term) => term.sinceConfirmed))))
      }
    })
  )

// -----------------------------------------------------------------------------
// internal
// -----------------------------------------------------------------------------

/** How a duty tells of its progress. A reference, so that what it calls needs no other service for that. */
const Progress = Context.Reference<() => void>("worklease/Leader/Progress", { defaultValue: () => () => {} })

/** The terms of each process in which it leads. A lost one stays until its duty has ended. */
const leading = new WeakMap<Leases["Service"], Map<string, Set<Term>>>()

const begin = (leases: Leases["Service"], term: Term): void => {
  const byWorkId = leading.get(leases) ?? new Map<string, Set<Term>>()
  leading.set(leases, byWorkId)
  byWorkId.set(term.workId, (byWorkId.get(term.workId) ?? new Set()).add(term))
}

const end = (leases: Leases["Service"], term: Term): void => {
  const byWorkId = leading.get(leases)
  const terms = byWorkId?.get(term.workId)
  terms?.delete(term)
  if (terms?.size === 0) byWorkId?.delete(term.workId)
}

const defaultPacing = Schedule.min([Schedule.exponential("1 second"), Schedule.spaced("30 seconds")]).pipe(
  Schedule.jittered
)

/** After the end of a schedule. */
const lastPause = Duration.seconds(30)

/** Whatever the schedule says, it does not spin. */
const shortestPause = Duration.millis(100)

/** Longer than those who wait take to notice, unless they poll very seldom. */
const standAside = Duration.seconds(5)

/** A duty that has run for so long was of use. */
const settledAfter = Duration.minutes(1)

/** Ends a duty that makes no progress. Nobody but this module sees it. */
class Stalled {
  readonly _tag = "Stalled"
}

/** Runs the duty for one term, and tells of its beginning and its end. */
const lead = <A, EX, R, const Wait extends boolean = false>(
  leases: Leases["Service"],
  workId: string,
  duty: (lease: Lease) => Effect.Effect<A, EX, R>,
  options?: ElectOptions<Wait>
) =>
  Effect.suspend(() => {
    let elected: Term | undefined
    const notify = (event: Event): Effect.Effect<void> =>
      options?.onEvent === undefined ? Effect.void : Effect.ignoreCause(
        Effect.suspend(() => options.onEvent!(event)),
        { log: "Error", message: `Could not tell that ${JSON.stringify(workId)} was ${event._tag}` }
      )
    return leases.run(
      workId,
      (lease): Effect.Effect<A, EX, Exclude<R, CurrentLease>> => {
        const { fencingToken } = lease.token
        const term = elected = termOf(lease.token)
        begin(leases, term)
        return notify({ _tag: "Elected", workId, fencingToken }).pipe(
          // Ends with the duty.
          Effect.andThen(Effect.forkChild(Effect.andThen(lease.awaitYieldRequest, lease.handOff()))),
          Effect.andThen(Effect.suspend(() => duty(lease))),
          Effect.provideService(CurrentLease, lease)
        )
      },
      options
    ).pipe(
      Effect.onExit((exit) => {
        if (elected === undefined) return Effect.void
        end(leases, elected)
        return notify(ending(elected, exit))
      })
    )
  })

const ending = (term: Term, exit: Exit.Exit<unknown, unknown>): Event => {
  const { fencingToken, workId } = term
  return term.loss === undefined
    ? { _tag: "Relinquished", workId, fencingToken, why: whyOf(term, exit) }
    : { _tag: "Lost", workId, fencingToken, reason: term.loss.reason }
}

const whyOf = (
  term: Term,
  exit: Exit.Exit<unknown, unknown>
): Extract<Event, { readonly _tag: "Relinquished" }>["why"] => {
  if (term.handedOff !== undefined || term.overran) return "yielded"
  if (Exit.isSuccess(exit)) return "ended"
  if (isStalled(exit.cause)) return "stalled"
  return Cause.hasInterruptsOnly(exit.cause) ? "interrupted" : "failed"
}

const isStalled = (cause: Cause.Cause<unknown>): boolean =>
  cause.reasons.some((reason) => Cause.isFailReason(reason) && reason.error instanceof Stalled)

/** Pauses that grow until they begin anew. */
const makePauses = (schedule: Schedule.Schedule<unknown>) => {
  let step: Effect.Success<ReturnType<typeof Schedule.toStep<unknown, unknown, never, never>>> | undefined
  return {
    beginAnew: () => {
      step = undefined
    },
    pause: Effect.fnUntraced(function*(atLeast: Duration.Duration): Effect.fn.Return<void> {
      step ??= yield* Schedule.toStep(schedule)
      const delay = yield* step(yield* Clock.currentTimeMillis, undefined).pipe(
        Effect.map(([, delay]) => delay),
        Pull.catchDone(() => Effect.succeed(lastPause))
      )
      yield* Effect.sleep(Duration.max(delay, atLeast))
    })
  }
}

const standForever = <A, EX, R>(
  leases: Leases["Service"],
  self: Effect.Effect<A, EX, R>,
  workId: string,
  options: ForeverOptions | undefined
): Effect.Effect<never, never, Exclude<R, CurrentLease>> =>
  Effect.gen(function*() {
    const clock = yield* Clock.Clock
    const schedule = options?.retrySchedule ?? defaultPacing
    const standing = makePauses(schedule)
    const failures = options?.giveUpAfter?.failures ?? 3
    const stalledFor = Option.fromUndefinedOr(options?.giveUpAfter?.stalledFor).pipe(
      Option.map((input) => Duration.toMillis(Duration.fromInputUnsafe(input)))
    )
    /** Whether the last duty was of use. */
    let isOfUse = false

    /** Runs the duty until it ends, fails, or stalls. */
    const runOnce = Effect.suspend(() => {
      const begun = Window.now(clock)
      let progressed = begun
      isOfUse = false
      const duty = Effect.provideService(self, Progress, () => {
        progressed = Window.now(clock)
        isOfUse = true
      })
      const watched = Option.match(stalledFor, {
        onNone: () => duty as Effect.Effect<A, EX | Stalled, R>,
        onSome: (millis) => {
          const watch: Effect.Effect<never, Stalled> = Effect.suspend(() => {
            const left = millis - Window.elapsedMillis(clock, progressed)
            return left <= 0 ? Effect.fail(new Stalled()) : Effect.andThen(Effect.sleep(left), watch)
          })
          return Effect.raceFirst(duty, watch)
        }
      })
      return Effect.ensuring(
        watched,
        Effect.sync(() => {
          if (Window.elapsedMillis(clock, begun) >= Duration.toMillis(settledAfter)) isOfUse = true
        })
      )
    })

    /** Runs it again while it may still be of use to. */
    const duty = Effect.suspend(() => {
      const pauses = makePauses(schedule)
      let inARow = 0
      const run: Effect.Effect<A, EX | Stalled, R> = Effect.catchCause(runOnce, (cause) => {
        if (isOfUse) {
          inARow = 0
          pauses.beginAnew()
        }
        inARow++
        return isStalled(cause) || inARow >= failures ? Effect.failCause(cause) : Effect.andThen(
          warn(`The duty of the leader of ${JSON.stringify(workId)} failed, and is run again`, cause),
          Effect.andThen(pauses.pause(shortestPause), run)
        )
      })
      return run
    })

    /** Why it could not stand, as it was told last. */
    let trouble: string | undefined

    while (true) {
      let ended: Event | undefined
      isOfUse = false
      const exit = yield* Effect.exit(lead(leases, workId, () => duty, {
        wait: true,
        policy: options?.policy,
        quarantineAfter: options?.quarantineAfter,
        onEvent: (event) => {
          ended = event
          const told = options?.onEvent?.(event) ?? Effect.void
          if (trouble === undefined) return told
          trouble = undefined
          return Effect.andThen(inform(`Leads after all: ${JSON.stringify(workId)}`), told)
        }
      }))
      const why = ended?._tag === "Relinquished" ? ended.why : undefined
      if (isOfUse || why === "yielded") standing.beginAnew()
      if (Exit.isFailure(exit) && why !== "yielded") {
        if (ended !== undefined) yield* logEnd(workId, ended, exit.cause)
        else {
          const before = trouble
          trouble = troubleOf(exit.cause)
          if (trouble !== before) {
            yield* warn(
              `Could not stand for the leadership of ${JSON.stringify(workId)}, and goes on to try: ${trouble}`
            )
          }
        }
      }
      yield* standing.pause(why === undefined || why === "ended" ? shortestPause : standAside)
    }
  }) as Effect.Effect<never, never, Exclude<R, CurrentLease>>

/** What the operator reads: the library's own errors say what to do, and their stacks say nothing. */
const troubleOf = (cause: Cause.Cause<unknown>): string => {
  const error = Option.getOrUndefined(Cause.findErrorOption(cause))
  return error instanceof Error ? error.message : Cause.pretty(cause)
}

const logEnd = (workId: string, ended: Event, cause: Cause.Cause<unknown>): Effect.Effect<void> => {
  const quoted = JSON.stringify(workId)
  if (ended._tag === "Lost") return warn(`The leadership of ${quoted} was lost`, cause)
  return isStalled(cause)
    ? warn(`The leader of ${quoted} made no progress, and gives up`)
    : warn(`The duty of the leader of ${quoted} failed, and it gives up`, cause)
}

/** What the duty itself logs is its own. */
const annotated = <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, E, R> =>
  Effect.annotateLogs(self, { module: "worklease/Leader" })

const warn = (...message: ReadonlyArray<unknown>): Effect.Effect<void> => annotated(Effect.logWarning(...message))

const inform = (message: string): Effect.Effect<void> => annotated(Effect.logInfo(message))

const observing = Effect.fnUntraced(function*(
  leases: Leases["Service"],
  workId: string,
  options: ObserveOptions | undefined,
  queue: Queue.Enqueue<Option.Option<Leader>, InvalidWorkId | BackendError>
): Effect.fn.Return<never, InvalidWorkId | BackendError> {
  const pollInterval = Duration.max(Duration.fromInputUnsafe(options?.pollInterval ?? "1 second"), shortestPause)
  let reported: Option.Option<Leader> | undefined
  let remaining: Effect.Effect<Duration.Duration> = Effect.succeed(Duration.zero)

  const report = (leader: Option.Option<Leader>) =>
    Effect.suspend(() => {
      const before = reported
      reported = leader
      const isSame = before !== undefined &&
        Option.getOrUndefined(before)?.fencingToken === Option.getOrUndefined(leader)?.fencingToken
      return isSame ? Effect.void : Queue.offer(queue, leader)
    })

  const expiry: Effect.Effect<void> = Effect.suspend(() =>
    reported === undefined || Option.isNone(reported) ? Effect.never : Effect.flatMap(
      remaining,
      (left) =>
        Duration.isZero(left)
          ? report(Option.none())
          // The clock that timers follow may stand still.
          : Effect.andThen(Effect.sleep(Duration.min(left, Duration.seconds(1))), expiry)
    )
  )

  /** Does not report a leader for longer than it was read to lead, however long the effect takes. */
  const whileReported = <A, E>(effect: Effect.Effect<A, E>): Effect.Effect<A, E> =>
    Effect.scoped(Effect.andThen(Effect.forkScoped(expiry, { startImmediately: true }), effect))

  let isOutOfReach = false
  while (true) {
    const read = yield* whileReported(Effect.exit(leases.holder(workId)))
    if (Exit.isSuccess(read)) {
      isOutOfReach = false
      const leader = read.value
      if (Option.isSome(leader)) remaining = leader.value.remaining
      const isOver = Option.isNone(leader) || Duration.isZero(yield* leader.value.remaining)
      yield* report(
        isOver ? Option.none() : Option.map(leader, ({ fencingToken, holderId, since }) => ({
          holderId,
          fencingToken,
          since
        }))
      )
    } else {
      const error = Cause.findErrorOption(read.cause)
      if (Option.isNone(error) || !isTransient(error.value)) return yield* Effect.failCause(read.cause)
      if (!isOutOfReach) {
        yield* warn(`Could not read who leads ${JSON.stringify(workId)}`, read.cause)
      }
      isOutOfReach = true
      if (reported === undefined) yield* report(Option.none())
    }
    yield* whileReported(Effect.sleep(pollInterval))
  }
})

const isTransient = (error: InvalidWorkId | BackendError): boolean =>
  error._tag === "BackendError" && (error.reason._tag === "Unreachable" || error.reason._tag === "TimedOut")
