/**
 * A pool as one of its members runs it: round by round it reads how the work
 * IDs stand, plans who has which, and does its own part of that.
 */

import type * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import type * as Context from "effect/Context"
import * as Deferred from "effect/Deferred"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Queue from "effect/Queue"
import * as Random from "effect/Random"
import * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import { Leases } from "../Lease.ts"
import { BackendError, InvalidConfig, TimedOut } from "../LeaseError.ts"
import type { Options, Pool } from "../Pool.ts"
import type * as Work from "../Work.ts"
import * as Keys from "./keys.ts"
import type { Known } from "./keys.ts"
import * as Members from "./members.ts"
import { positiveMillis, validateId } from "./options.ts"
import { type Item, type Member, plan, type Rules, standingOf } from "./plan.ts"
import * as Quarantine from "./quarantine.ts"
import * as Runs from "./runs.ts"
import * as Statuses from "./status.ts"
import type { View } from "./status.ts"
import * as Window from "./window.ts"
import { faultOf } from "./workId.ts"

export const TypeId = "~worklease/Pool"

type AnyOptions = Options<Work.Any, unknown, unknown, any, unknown, any>

/** Every so many rounds it reads how all stand, whether or not anything seems to have changed. */
const lookEvery = 10

/** So many times it sees that another does not take what is its own before it takes it itself. */
const patience = 3

/** The pools of each process: two of one name would be one member, and run twice its share. */
const pools = new WeakMap<Leases["Service"], Set<string>>()

const reportEvery = Duration.seconds(5)

const annotated = <A, E, R>(self: Effect.Effect<A, E, R>): Effect.Effect<A, E, R> =>
  Effect.annotateLogs(self, { module: "worklease/Pool" })

const positiveInteger = (field: string, value: number, most: number): Effect.Effect<number, InvalidConfig> =>
  Number.isInteger(value) && value >= 1 && value <= most ? Effect.succeed(value) : Effect.fail(
    new InvalidConfig({ field, why: `it must be an integer from 1 to ${most}, not ${value}` })
  )

export const make = Effect.fnUntraced(function*(
  options: AnyOptions
): Effect.fn.Return<Pool, InvalidConfig, Scope.Scope | Leases> {
  const leases = yield* Leases
  const clock = yield* Clock.Clock
  const context = (yield* Effect.context()) as Context.Context<any>
  const { holderId } = leases
  const policy = options.policy ?? leases.policy
  const ttl = Duration.toMillis(policy.ttl)
  const work = options.work as Work.Work<any>
  const name = options.name ?? work.name
  if (faultOf(Members.slotsOf(name).id("999999").value) !== undefined) {
    return yield* new InvalidConfig({
      field: "name",
      why: "it must be 1 to 498 UTF-8 bytes, without NUL and lone surrogates"
    })
  }
  if (options.memberId !== undefined) yield* validateId("memberId", options.memberId)
  const capacity = yield* positiveInteger("capacity", options.capacity ?? 10_000, 1_000_000)
  const interval = yield* positiveMillis("interval", options.interval ?? ttl / 10)
  const handoffTimeout = yield* positiveMillis("handoffTimeout", options.handoffTimeout ?? "30 seconds")
  const quarantineAfter = options.quarantineAfter === Infinity
    ? undefined
    : yield* positiveInteger("quarantineAfter", options.quarantineAfter ?? 5, 1_000_000)
  const rules: Rules = {
    ttl,
    quarantineAfter: quarantineAfter ?? Infinity,
    rerunAfter: options.rerunAfter === undefined ? Infinity : yield* positiveMillis("rerunAfter", options.rerunAfter),
    idleGrace: yield* positiveMillis("idleGrace", options.idleGrace ?? "1 minute", false)
  }

  const names = pools.get(leases) ?? new Set()
  pools.set(leases, names)
  if (names.has(name)) {
    return yield* new InvalidConfig({
      field: "name",
      why: `this process is already a member of the pool ${JSON.stringify(name)}`
    })
  }
  names.add(name)
  const stopped = Deferred.makeUnsafe<void>()
  const isStopped = () => Deferred.isDoneUnsafe(stopped)
  yield* Effect.addFinalizer(() => Effect.sync(() => isStopped() || names.delete(name)))

  const title = `Pool ${JSON.stringify(name)}`
  const warn = (message: string, ...cause: ReadonlyArray<Cause.Cause<unknown>>): Effect.Effect<void> =>
    annotated(Effect.logWarning(`${title}: ${message}`, ...cause))
  const inform = (message: string): Effect.Effect<void> => annotated(Effect.logInfo(`${title}: ${message}`))

  /** Waits for an answer for as long as this pool's policy says, which may be shorter than that of the layer. */
  const inspect: Leases["Service"]["inspect"] = (works, inspecting) =>
    Effect.timeoutOrElse(leases.inspect(works, inspecting), {
      duration: Duration.times(policy.operationTimeout, 2),
      orElse: () =>
        Effect.fail(new BackendError({ operation: "inspect", outcome: "unknown", reason: new TimedOut({}) }))
    })

  const members = Members.make({ ...leases, inspect }, {
    name,
    memberId: options.memberId,
    capacity,
    policy,
    onWait: (workId, by) =>
      warn(
        `member ${JSON.stringify(options.memberId)} waits for its place ${JSON.stringify(workId)}, which ${
          JSON.stringify(by)
        } holds: an earlier start that has crashed, whose lease expires, or another process with the same memberId`
      )
  })

  // ---------------------------------------------------------------------------
  // what is known
  // ---------------------------------------------------------------------------

  const readKeys = yield* Keys.make({ work, keys: options.keys, timeout: ttl, patience: interval, warn }).pipe(
    Effect.provideContext(context)
  )
  /** In the order of the work IDs. */
  let known: ReadonlyArray<Known> = []
  let knownDigest = 0
  let views = new Map<string, View>()
  let viewedAt = Window.now(clock)
  /** How often another was seen not to take what is its own, and since when. */
  let untaken = new Map<string, { readonly times: number; readonly since: Window.Instant }>()
  /** Which it has said are quarantined. */
  let quarantined = new Set<string>()
  let isStopping = false
  /** Whether anything has changed that the others should know, or look at. */
  let unsaid = true

  const observers = new Set<Queue.Queue<void, Cause.Done>>()
  const changed = () => {
    for (const observer of observers) Queue.offerUnsafe(observer, undefined)
  }

  const scope = Scope.makeUnsafe("parallel")
  const { all: runs, end, pauseLeft, retain, start, tellTroubles } = yield* Runs.make({
    leases,
    work,
    run: options.run,
    policy,
    quarantineAfter,
    handoffTimeout,
    context,
    scope,
    warn,
    onTurn: () => {
      unsaid = true
      changed()
    }
  })

  // ---------------------------------------------------------------------------
  // rounds
  // ---------------------------------------------------------------------------

  let seen = { fingerprint: "", makeUp: "", makeUpAndKeys: "" }
  let roundsSinceLook = 0
  /** When something changes by itself, in milliseconds from the last look: at once while not all is as planned. */
  let changesIn = 0
  const lookWithin = (millis: number): void => {
    changesIn = Math.min(changesIn, millis)
  }

  /** What changes meanwhile is said next time. */
  const saying = <E>(self: Effect.Effect<void, E>): Effect.Effect<void, E> =>
    Effect.suspend(() => {
      unsaid = false
      return Effect.onError(self, () =>
        Effect.sync(() => {
          unsaid = true
        }))
    })

  const round = Effect.gen(function*() {
    const keys = yield* readKeys
    // Who knows none would be given a share that it cannot take.
    if (keys === undefined) return
    if (learn(keys)) unsaid = true
    const isNew = !members.isJoined()
    if (isNew) {
      yield* saying(members.join(knownDigest))
      // Others may start at the same time. What the first of them took it would have to hand over at once.
      yield* Effect.sleep(interval / 10)
    }
    if (unsaid) {
      yield* saying(members.say({ isLeaving: false, keys: knownDigest }))
      lookWithin(0)
    }
    const roll = yield* members.read
    roundsSinceLook++
    const mustLook = isNew || roll.fingerprint !== seen.fingerprint || roundsSinceLook >= lookEvery ||
      Window.elapsedMillis(clock, viewedAt) >= changesIn
    if (!mustLook) return
    const sentAt = Window.now(clock)
    const records = new Map((yield* inspect(known.map(({ workId }) => workId))).map((_) => [_.workId, _]))
    viewedAt = sentAt
    roundsSinceLook = 0
    views = new Map(known.map(({ key, workId }) => {
      const record = records.get(workId)
      const termsWithoutProgress = record?.termsWithoutProgress ?? 0
      return [workId, { key, workId, standing: standingOf(record, rules), termsWithoutProgress }]
    }))
    // Whoever did not take it may be gone, or know it by now.
    if (seen.makeUp !== roll.makeUp || (seen.makeUpAndKeys !== roll.makeUpAndKeys && roll.isAgreed)) {
      for (const run of runs.values()) run.isAdopted = run.isAdopted && run.term === undefined
    }
    if (seen.makeUp !== roll.makeUp) untaken.clear()
    seen = roll
    yield* tellQuarantined
    yield* act(roll.members)
    changed()
  })

  /** Once for each, by the member that has had it last. */
  const tellQuarantined = Effect.suspend(() => {
    const before = quarantined
    quarantined = new Set()
    const found: Array<string> = []
    for (const { standing, termsWithoutProgress, workId } of views.values()) {
      if (standing._tag !== "Quarantined" || standing.lastHolderId !== holderId) continue
      quarantined.add(workId)
      if (before.has(workId)) continue
      const why = Quarantine.whyOf(termsWithoutProgress, standing.exit, standing.lastHolderId)
      found.push(`${JSON.stringify(workId)} is quarantined: ${why}. Lease.lift lets it go again`)
    }
    return Effect.forEach(found, (message) => warn(message), { discard: true })
  })

  /** Takes over the keys, and tells whether they are others than before. */
  const learn = (keys: ReadonlyArray<Known>): boolean => {
    if (keys === known) return false
    known = keys
    knownDigest = Keys.digestOf(known)
    retain(new Set(known.map(({ workId }) => workId)))
    return true
  }

  let isFull = false
  const tellRoom = (waiting: number): Effect.Effect<void> =>
    Effect.suspend(() => {
      if (isFull === waiting > 0) return Effect.void
      isFull = waiting > 0
      return isFull
        ? warn(`no member has room for ${waiting} work IDs, which wait. Add members, or raise their capacity`)
        : inform("the members have room for all work IDs again")
    })

  /** Does this process's part of the plan. */
  const act = Effect.fnUntraced(function*(all: ReadonlyArray<Member>) {
    const self = all.find((member) => member.holderId === holderId)
    if (self === undefined) return
    const holders = new Set(all.map((member) => member.holderId))
    const shared = [...views.values()].filter((view): view is View & { standing: { _tag: "Held" | "Free" } } =>
      view.standing._tag === "Held" || view.standing._tag === "Free"
    )
    const assigned = plan(
      all,
      shared.map(({ standing, workId }): Item =>
        standing._tag === "Held"
          ? {
            holderId: standing.holderId,
            lastHolderId: undefined,
            isRecent: false,
            isPinned: standing.holderId === holderId && runs.get(workId)?.isAdopted === true
          }
          : {
            holderId: undefined,
            lastHolderId: standing.lastHolderId,
            isRecent: standing.sinceEnd < ttl,
            isPinned: false
          }
      )
    )
    yield* tellRoom(assigned.reduce(
      (count, to, index) => to === undefined && shared[index].standing._tag === "Free" ? count + 1 : count,
      0
    ))
    changesIn = Infinity
    for (const { standing } of views.values()) {
      if (standing._tag === "Idle") lookWithin(standing.after)
    }
    const wanted = new Set<string>()
    const starting: Array<readonly [View, number]> = []
    const others: Array<readonly [View, Member]> = []
    shared.forEach((view, index) => {
      const { standing, workId } = view
      const to = assigned[index]
      if (to === self) {
        wanted.add(workId)
        if (standing._tag === "Free") {
          if (standing.after === 0) lookWithin(0)
          if (!runs.has(workId)) starting.push([view, Math.max(standing.after, pauseLeft(workId))])
        } else if (standing.holderId !== holderId) {
          lookWithin(0)
          if (!runs.has(workId)) starting.push([view, 0])
        } else if (!runs.has(workId)) {
          // It has ended since it was read, which is said, could not be released, or is not the pool's.
          lookWithin(standing.remaining)
        }
      } else if (standing._tag === "Held") {
        // What is held by nobody of the pool may expire.
        if (!holders.has(standing.holderId)) lookWithin(standing.remaining)
        else if (to?.holderId !== standing.holderId) lookWithin(0)
      } else if (to?.presence === "absent") lookWithin(ttl - standing.sinceEnd)
      else if (to !== undefined) {
        if (standing.after > 0) lookWithin(standing.after + interval)
        else {
          lookWithin(0)
          others.push([view, to])
        }
      }
    })
    for (const run of runs.values()) {
      if (wanted.has(run.workId)) continue
      const standing = views.get(run.workId)?.standing
      const mayGoOn = run.term === undefined
        // An attempt to take what another does not take ends by itself.
        ? run.isAdopted
        // It has begun, or another term of it, since it was read.
        : standing !== undefined && !(standing._tag === "Held" && standing.fencingToken === run.term.fencingToken)
      if (!mayGoOn) end(run)
    }
    for (const [view, pause] of starting) {
      if (runs.size >= capacity) break
      yield* start(view, pause)
    }
    yield* adopt(self, all, others)
  })

  /** Takes what another does not take, who may not know it, or be stuck: each look more members try it. */
  const adopt = Effect.fnUntraced(function*(
    self: Member,
    all: ReadonlyArray<Member>,
    others: ReadonlyArray<readonly [View, Member]>
  ) {
    const present = all.filter(({ presence }) => presence === "present")
    const place = present.indexOf(self)
    const before = untaken
    untaken = new Map()
    for (const [index, [view, to]] of others.entries()) {
      const { since, times } = before.get(view.workId) ?? { since: viewedAt, times: 0 }
      untaken.set(view.workId, { since, times: times + 1 })
      const exceeds = times + 1 - patience
      if (exceeds < 0 || Window.elapsedMillis(clock, since) < ttl / 5) continue
      const distance = (place - present.indexOf(to) - 1 - index) % present.length
      if ((distance + present.length) % present.length >= 2 ** exceeds) continue
      if (place >= 0 && !runs.has(view.workId) && runs.size < capacity && pauseLeft(view.workId) === 0) {
        yield* start(view, 0, true)
      }
    }
  })

  let isFailing = false
  const rounds = Effect.gen(function*() {
    while (true) {
      yield* tellTroubles
      const exit = yield* Effect.exit(round)
      if (isStopping) return
      if (Exit.isFailure(exit) !== isFailing) {
        isFailing = Exit.isFailure(exit)
        yield* Exit.isFailure(exit)
          ? warn("a round failed; what runs goes on", exit.cause)
          : inform("rounds succeed again")
      }
      yield* Effect.sleep(interval * (yield* Random.nextBetween(0.9, 1.1)))
    }
  })

  // ---------------------------------------------------------------------------
  // shutdown
  // ---------------------------------------------------------------------------

  let loop: Fiber.Fiber<void> | undefined

  const stop = Effect.gen(function*() {
    if (loop !== undefined) yield* Fiber.interrupt(loop)
    const running = [...runs.values()].filter(({ term }) => term !== undefined)
    const waiting = [...runs.values()].filter(({ term }) => term === undefined)
    if (running.length > 0) yield* inform(`shutting down: ${running.length} at work are asked to hand over`)
    for (const run of [...waiting, ...running]) end(run)
    changed()
    // So that the others do not wait for what this one does not take any more.
    const said = yield* Effect.forkIn(
      Effect.ignore(members.say({ isLeaving: true, keys: knownDigest })),
      scope,
      { startImmediately: true }
    )
    const report = Effect.suspend(() => inform(`shutting down: ${runs.size} still at work`)).pipe(
      Effect.delay(reportEvery),
      Effect.forever
    )
    const reporting = yield* Effect.forkIn(report, scope)
    for (const { fiber } of runs.values()) if (fiber !== undefined) yield* Fiber.await(fiber)
    yield* Fiber.interrupt(reporting)
    yield* Fiber.interrupt(said)
    yield* members.leave
    yield* Scope.close(scope, Exit.void)
    yield* tellTroubles
    if (running.length > 0) yield* inform("shut down: nothing is at work any more")
    changed()
  })

  const stopWith = (exit: Exit.Exit<void>): void => {
    names.delete(name)
    Deferred.doneUnsafe(stopped, exit)
    for (const observer of observers) Queue.endUnsafe(observer)
  }

  // It goes on when who waits for it is interrupted, as work of this pool is that has asked for it.
  const shutdown = Effect.uninterruptibleMask((restore) =>
    Effect.suspend(() => {
      const awaiting = restore(Deferred.await(stopped))
      if (isStopping) return awaiting
      isStopping = true
      return Effect.andThen(
        Effect.forkDetach(Effect.onExit(stop, (exit) => Effect.sync(() => stopWith(exit))), { startImmediately: true }),
        awaiting
      )
    })
  )
  yield* Effect.addFinalizer(() => shutdown)
  loop = yield* Effect.forkIn(rounds, scope)

  // ---------------------------------------------------------------------------
  // status
  // ---------------------------------------------------------------------------

  const status = Stream.callback<void>(
    (queue) =>
      Effect.acquireRelease(
        Effect.sync(() => {
          observers.add(queue)
          Queue.offerUnsafe(queue, undefined)
          if (isStopped()) Queue.endUnsafe(queue)
        }),
        () => Effect.sync(() => observers.delete(queue))
      ),
    { bufferSize: 1, strategy: "sliding" }
  ).pipe(
    // Made when it is consumed, so that a slow consumer gets the latest, and none costs nothing.
    Stream.map(() => known.map((_) => Statuses.statusOf(_, views.get(_.workId), runs.get(_.workId), holderId))),
    Stream.changesWith(Statuses.isSame)
  )

  return { [TypeId]: TypeId, status, shutdown }
})
