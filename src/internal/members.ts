/**
 * The members of a pool, and the place of this process among them.
 *
 * Each process holds a lease on a work ID of its own: a slot, numbered from 0.
 * Slots are taken densely, so that all of them are read by name in one
 * statement.
 */

import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import * as Option from "effect/Option"
import * as Random from "effect/Random"
import * as Schema from "effect/Schema"
import * as Scope from "effect/Scope"
import type { LeaseRecord } from "../Backend.ts"
import * as Checkpoint from "../Checkpoint.ts"
import type { Lease, Leases } from "../Lease.ts"
import type {
  BackendError,
  CheckpointDecodeError,
  CheckpointEncodeError,
  CheckpointTooLarge,
  InvalidWorkId,
  LeaseHeld,
  LeaseLost,
  Quarantined
} from "../LeaseError.ts"
import type * as Renewal from "../Renewal.ts"
import * as Work from "../Work.ts"
import type { Member } from "./plan.ts"
import { termOf } from "./term.ts"

const State = Schema.Struct({
  /** Who wrote it. Until a new holder has written, its slot still says what the one before was. */
  holderId: Schema.String,
  capacity: Schema.Int,
  /** A stable identity, if it has one, and the holder IDs of its earlier starts. */
  memberId: Schema.optionalKey(Schema.String),
  formerly: Schema.Array(Schema.String),
  isLeaving: Schema.Boolean,
  /** Tells which work IDs it knows: equal for equal ones. */
  keys: Schema.Int,
  /** Grows whenever the others should look what it has. */
  changes: Schema.Int
})

type State = typeof State.Type

const checkpoint = Checkpoint.make(State)

export const slotsOf = (name: string): Work.Work<State> => Work.make(`${name}/member`, checkpoint)

/** What is read of all members. */
export interface Roll {
  readonly members: ReadonlyArray<Member>
  /** Equal if no member has come, left, or said anything since. */
  readonly fingerprint: string
  /** Equal if the members and their capacities are the same. */
  readonly makeUp: string
  /** Equal if the work IDs that they know are the same, too. */
  readonly makeUpAndKeys: string
  /** Whether all who are present know the same work IDs. */
  readonly isAgreed: boolean
}

export type MembersError =
  | InvalidWorkId
  | Quarantined
  | BackendError
  | LeaseLost
  | CheckpointDecodeError
  | CheckpointEncodeError
  | CheckpointTooLarge

export interface Members {
  /** Whether this process has a place among the members. */
  readonly isJoined: () => boolean
  /**
   * Takes a place among the members. It waits only for the place of an earlier
   * start with the same identity, and tells of that before.
   */
  readonly join: (keys: number) => Effect.Effect<void, MembersError>
  /** Says what the others should know, and makes them look what this one has. */
  readonly say: (what: { readonly isLeaving: boolean; readonly keys: number }) => Effect.Effect<void, MembersError>
  /** Reads all members: in one statement, unless there are many more than before. */
  readonly read: Effect.Effect<Roll, MembersError>
  /** Gives up the place. One with a stable identity may come back to it. */
  readonly leave: Effect.Effect<void>
}

interface Place {
  readonly slot: number
  readonly lease: Lease<State>
  readonly scope: Scope.Closeable
  readonly formerly: ReadonlyArray<string>
}

interface Slot {
  readonly slot: number
  readonly fencingToken: bigint
  readonly status: "held" | "yielded" | "ended"
  readonly sinceEnd: number
  /** None if its holder has not written yet. */
  readonly state: State | undefined
  /** In that case, what is left of the holder before. */
  readonly before: State | undefined
  /** Whether others may not take it: it is held, kept for who may come back to it, or cannot be read. */
  readonly isKept: boolean
}

/** So many slots are read at the least. */
const fewest = 16

/** How often it looks for another place at once where others were faster, and how many milliseconds it waits then. */
const triesAtOnce = 6
const pauseBetweenTries = 200

/** So many starts of a process with a stable identity are remembered. */
const remembered = 4

/** How many slots are read where this one is the highest in use: later ones are taken below that. */
const rangeFor = (highest: number): number => Math.max(fewest, 2 * (highest + 1))

export const make = (leases: Leases["Service"], options: {
  readonly name: string
  readonly memberId: string | undefined
  readonly capacity: number
  readonly policy: Renewal.Policy
  readonly onWait: (workId: string, holderId: string) => Effect.Effect<void>
}): Members => {
  const { capacity, memberId, policy } = options
  const { holderId } = leases
  const work = slotsOf(options.name)
  const grace = Duration.toMillis(policy.ttl)
  let range = fewest
  let place: Place | undefined
  let said = { isLeaving: false, keys: 0, changes: 0 }

  // ---------------------------------------------------------------------------
  // reading
  // ---------------------------------------------------------------------------

  const decoded = new Map<string, { readonly bytes: Uint8Array; readonly state: State | undefined }>()

  const slotOf = Effect.fnUntraced(function*(record: LeaseRecord): Effect.fn.Return<Slot | undefined> {
    if (Option.isNone(record.term)) return undefined
    const { term: { value: term }, workId } = record
    const stored = Option.getOrUndefined(record.state)
    let known = decoded.get(workId)
    if (stored !== undefined && (known === undefined || !isSame(known.bytes, stored.bytes))) {
      const state = yield* Effect.option(checkpoint.decode(workId, stored))
      known = { bytes: stored.bytes, state: Option.getOrUndefined(state) }
      decoded.set(workId, known)
    }
    const sinceEnd = Duration.toMillis(term.sinceEnd)
    const last = stored === undefined ? undefined : known?.state
    const isOwn = last?.holderId === term.holderId
    // What another version has written cannot be read by who would take it either.
    const isReadable = stored === undefined || last !== undefined
    return {
      slot: Number(workId.slice(work.name.length + 1)),
      fencingToken: term.fencingToken,
      status: term.status === "held" || term.status === "yielded" ? term.status : "ended",
      sinceEnd,
      state: isOwn ? last : undefined,
      before: isOwn ? undefined : last,
      isKept: term.status === "held" || !isReadable || (isOwn && last?.memberId !== undefined && sinceEnd < grace)
    }
  })

  const readSlots = Effect.gen(function*(): Effect.fn.Return<ReadonlyArray<Slot>, MembersError> {
    while (true) {
      const reading = Math.max(range, place === undefined ? 0 : place.slot + 1)
      const ids = Array.from({ length: reading }, (_, slot) => work.id(`${slot}`))
      const slots: Array<Slot> = []
      for (const record of yield* leases.inspect(ids, { states: true })) {
        const slot = yield* slotOf(record)
        if (slot !== undefined) slots.push(slot)
      }
      slots.sort((a, b) => a.slot - b.slot)
      range = rangeFor(
        slots.reduce((highest, { isKept, slot, status }) => status === "ended" && !isKept ? highest : slot, -1)
      )
      if (range <= reading) return slots
    }
  })

  const read: Members["read"] = Effect.suspend(() =>
    Effect.flatMap(readSlots, (slots): Effect.Effect<Roll, MembersError> => {
      if (place !== undefined) {
        // Who has stayed in a high slot when those below have left would not be read by the others.
        const { slot } = place
        const below = slots.filter((_) => _.slot < slot && _.isKept).length
        if (slot >= Math.max(fewest, 2 * below)) return Effect.andThen(moveDown, read)
      }
      return Effect.succeed(rollOf(slots))
    })
  )

  const rollOf = (slots: ReadonlyArray<Slot>): Roll => {
    const members: Array<Member> = []
    const makeUp: Array<string> = []
    const makeUpAndKeys: Array<string> = []
    const digests = new Set<number>()
    const present = new Set(slots.filter(({ status }) => status === "held").map(({ state }) => state?.memberId))
    for (const { before, sinceEnd, slot, state: own, status } of slots) {
      // Who comes back has taken its place before it can say who it is: until then it is as absent as it was.
      const isBack = own === undefined && status === "held" && before?.memberId !== undefined
      const state = isBack ? before : own
      if (state === undefined || members.some((_) => _.holderId === state.holderId)) continue
      const { capacity, formerly, holderId, isLeaving, keys, memberId } = state
      const mayComeBack = memberId !== undefined
      const isAbsent = mayComeBack && !present.has(memberId) && (isBack || (status === "yielded" && sinceEnd < grace))
      if ((isBack || status !== "held") && !isAbsent) continue
      const presence = isAbsent || (isLeaving && mayComeBack) ? "absent" : isLeaving ? "leaving" : "present"
      members.push({ slot, holderId, formerly, capacity, presence })
      const entry = `${slot} ${holderId} ${capacity} ${presence}`
      makeUp.push(entry)
      makeUpAndKeys.push(`${entry} ${keys}`)
      if (presence === "present") digests.add(keys)
    }
    return {
      members,
      makeUp: makeUp.join(),
      makeUpAndKeys: makeUpAndKeys.join(),
      isAgreed: digests.size <= 1,
      fingerprint: makeUpAndKeys.join() +
        slots.map(({ fencingToken, state }) => `${fencingToken} ${state?.changes}`).join()
    }
  }

  // ---------------------------------------------------------------------------
  // the own place
  // ---------------------------------------------------------------------------

  const say: Members["say"] = (what) =>
    Effect.suspend(() => {
      if (place === undefined) return Effect.void
      said = { ...what, changes: said.changes + 1 }
      const { formerly, lease } = place
      return Effect.raceFirst(
        lease.checkpoint({ holderId, capacity, ...(memberId === undefined ? {} : { memberId }), formerly, ...said }),
        // An operation of a lost lease does not return.
        lease.lost
      )
    })

  const take = <const Wait extends boolean>(
    slot: number,
    wait: Wait
  ): Effect.Effect<Place, MembersError | (Wait extends true ? never : LeaseHeld)> =>
    Effect.uninterruptibleMask((restore) =>
      Effect.gen(function*() {
        const scope = Scope.makeUnsafe()
        const lease = yield* restore(
          leases.hold(work.id(`${slot}`), { wait, policy, yieldAt: "handOff" }).pipe(Scope.provide(scope))
        ).pipe(Effect.onError((cause) => Scope.close(scope, Exit.failCause(cause))))
        const before = Option.getOrUndefined(lease.prior.state)
        const formerly = memberId === undefined || before?.memberId !== memberId
          ? []
          : [before.holderId, ...before.formerly].filter((_) => _ !== holderId).slice(0, remembered)
        return { slot, lease, scope, formerly }
      })
    )

  const giveUp = ({ lease, scope }: Place, exit: "retired" | "yielded"): Effect.Effect<void> =>
    Effect.suspend(() => {
      const term = termOf(lease.token)
      if (exit === "yielded") term.handOff(Option.none())
      else term.leaving = { exit, state: Option.none() }
      return Scope.close(scope, Exit.void)
    })

  const takeFree = Effect.fnUntraced(function*(
    first: ReadonlyArray<Slot>
  ): Effect.fn.Return<Place, MembersError> {
    let slots = first
    for (let tries = 0;; tries++) {
      const taken = new Set(
        slots.filter(({ isKept, state, status }) =>
          isKept && (status === "held" || state === undefined || state.memberId !== memberId)
        ).map(({ slot }) => slot)
      )
      const free = Array.from({ length: range }, (_, slot) => slot).filter((slot) => !taken.has(slot))
      // The lowest one, unless many want to have it.
      const among = Math.min(2 ** tries, free.length)
      const attempt = take(free[yield* Random.nextIntBetween(0, among, { halfOpen: true })], false)
      const place = yield* Effect.catchTag(attempt, "LeaseHeld", () => Effect.undefined)
      if (place !== undefined) return place
      if (tries >= triesAtOnce) yield* Effect.sleep((yield* Random.next) * pauseBetweenTries)
      slots = yield* readSlots
    }
  })

  const takePlace = Effect.gen(function*(): Effect.fn.Return<Place, MembersError> {
    const slots = yield* readSlots
    const own = memberId === undefined ? undefined : slots
      .filter(({ state }) => state?.memberId === memberId)
      .sort((a, b) => a.fencingToken < b.fencingToken ? 1 : -1)[0]
    if (own === undefined) return yield* takeFree(slots)
    if (own.status === "held") yield* options.onWait(work.id(`${own.slot}`).value, own.state!.holderId)
    return yield* take(own.slot, true)
  })

  /** Takes a place, and leaves the one before only then. */
  const changePlace = (taking: Effect.Effect<Place, MembersError>, what: () => Omit<typeof said, "changes">) =>
    Effect.uninterruptibleMask((restore) =>
      Effect.gen(function*() {
        const before = place
        const taken = yield* restore(taking)
        place = { ...taken, formerly: before === undefined ? taken.formerly : before.formerly }
        if (before !== undefined) yield* giveUp(before, "retired")
        yield* restore(say(what()))
      })
    )

  const moveDown = Effect.suspend(() => changePlace(Effect.flatMap(readSlots, takeFree), () => said))

  const leave: Members["leave"] = Effect.suspend(() => {
    if (place === undefined) return Effect.void
    const left = place
    place = undefined
    return giveUp(left, memberId === undefined ? "retired" : "yielded")
  })

  return {
    isJoined: () => place !== undefined && !termOf(place.lease.token).loseIfExhausted(),
    join: (keys) => Effect.andThen(leave, changePlace(takePlace, () => ({ isLeaving: false, keys }))),
    say,
    read,
    leave
  }
}

const isSame = (a: Uint8Array, b: Uint8Array): boolean =>
  a.byteLength === b.byteLength && a.every((byte, index) => byte === b[index])
