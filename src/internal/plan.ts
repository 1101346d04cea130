/**
 * Who of a pool's members has which work ID: pure functions of what is stored,
 * so that all members come to the same plan without talking to each other.
 */

import * as Duration from "effect/Duration"
import * as Option from "effect/Option"
import type { ExitMode, LeaseRecord } from "../Backend.ts"

/** One process of a pool. */
export interface Member {
  readonly slot: number
  readonly holderId: string
  /** The holder IDs of its earlier starts, where it has a stable identity. */
  readonly formerly: ReadonlyArray<string>
  /** How many work IDs it has at once at most, and its weight: a positive integer. */
  readonly capacity: number
  /**
   * Who is `absent` may come back soon: it keeps its share of what it had. Who
   * is `leaving` keeps nothing. Neither takes anything.
   */
  readonly presence: "present" | "absent" | "leaving"
}

/** A work ID that somebody has, or should have. */
export interface Item {
  /** Who holds it. */
  readonly holderId: string | undefined
  /** Whose it was, if nobody holds it. */
  readonly lastHolderId: string | undefined
  /** Whether it ended less than one `ttl` ago: for so long it is kept for who is absent. */
  readonly isRecent: boolean
  /** It stays with its holder, whatever the share of that is. */
  readonly isPinned: boolean
}

interface Side {
  readonly member: Member
  /** What it holds, each by its place in the order of the work IDs. */
  readonly pinned: Array<number>
  readonly held: Array<number>
  /** What nobody holds, and was its own. */
  readonly owned: Array<number>
  target: number
}

/** All of it, in the order in which it is kept. */
const hadBy = ({ held, owned, pinned }: Side): ReadonlyArray<number> => [...pinned, ...held, ...owned]

/**
 * Shares `items` among `members`, both in order: these by slot, those by work
 * ID. Answers the member of each item; what exceeds all capacities is
 * nobody's, and what is held by nobody of the pool is left alone.
 *
 * **Details**
 *
 * Each member gets its share by capacity, rounded down or up: up where that
 * saves a move. It keeps of what it has as much as its share is. A plan that
 * has become true does not change by itself, nor does it while it is becoming
 * true.
 */
export const plan = (
  members: ReadonlyArray<Member>,
  items: ReadonlyArray<Item>
): ReadonlyArray<Member | undefined> => {
  const sides = members.map((member): Side => ({ member, pinned: [], held: [], owned: [], target: 0 }))
  const byHolder = new Map<string, Side>()
  for (const side of sides) {
    for (const holderId of side.member.formerly) byHolder.set(holderId, side)
  }
  // What a holder ID means now comes before what it has meant to another.
  for (const side of sides) byHolder.set(side.member.holderId, side)

  const free: Array<number> = []
  let count = 0
  items.forEach((item, index) => {
    const owner = item.holderId ?? item.lastHolderId
    const side = owner === undefined ? undefined : byHolder.get(owner)
    if (item.holderId !== undefined && side === undefined) return
    count++
    if (side === undefined) free.push(index)
    else if (item.holderId !== undefined) (item.isPinned ? side.pinned : side.held).push(index)
    else if (side.member.presence !== "absent" || item.isRecent) side.owned.push(index)
    else free.push(index)
  })

  setTargets(sides, count)

  const assigned = items.map((): Member | undefined => undefined)
  for (const side of sides) {
    hadBy(side).forEach((index, place) => {
      if (place < side.target) assigned[index] = side.member
      else free.push(index)
    })
  }
  free.sort((a, b) => a - b)
  let next = 0
  for (const side of sides) {
    const room = Math.max(0, side.target - hadBy(side).length)
    for (const index of free.slice(next, next + room)) assigned[index] = side.member
    next += room
  }
  return assigned
}

const setTargets = (sides: ReadonlyArray<Side>, count: number): void => {
  const capacity = sides.reduce((sum, { member }) => member.presence === "leaving" ? sum : sum + member.capacity, 0)
  let remaining = count
  for (const side of sides) {
    if (side.member.presence !== "absent") continue
    // Rounded up whatever the others have, so that it does not change while they take what is theirs.
    const share = Math.ceil(side.member.capacity * Math.min(1, count / capacity))
    side.target = Math.min(share, hadBy(side).length, remaining)
    remaining -= side.target
  }
  let sharing = sides.filter(({ member }) => member.presence === "present")
  while (true) {
    share(sharing, remaining)
    // Who has to keep more than its share has that, and the others share what remains.
    const bound = sharing.filter(({ pinned, target }) => pinned.length > target)
    if (bound.length === 0) return
    for (const side of bound) {
      side.target = side.pinned.length
      remaining = Math.max(0, remaining - side.target)
    }
    sharing = sharing.filter((side) => !bound.includes(side))
  }
}

/** Sets shares that differ from the exact ones by less than one. */
const share = (sides: ReadonlyArray<Side>, count: number): void => {
  const capacity = sides.reduce((sum, { member }) => sum + member.capacity, 0)
  if (count >= capacity) {
    for (const side of sides) side.target = side.member.capacity
    return
  }
  let rest = count
  for (const side of sides) {
    side.target = Math.floor(count * side.member.capacity / capacity)
    rest -= side.target
  }
  /** The larger, the more it is lost by rounding down: first something that is held, then something that was owned. */
  const loss = (side: Side): number =>
    side.pinned.length + side.held.length > side.target ? 2 : hadBy(side).length > side.target ? 1 : 0
  const fraction = ({ member }: Side): number => count * member.capacity % capacity
  sides
    .filter((side) => fraction(side) > 0)
    .map((side) => ({ side, loss: loss(side), fraction: fraction(side) }))
    // Of equals, the one in the lower slot comes first.
    .sort((a, b) => b.loss - a.loss || b.fraction - a.fraction || a.side.member.slot - b.side.member.slot)
    .slice(0, rest)
    .forEach(({ side }) => side.target++)
}

// -----------------------------------------------------------------------------
// standing
// -----------------------------------------------------------------------------

/** What decides whether a work ID may be taken. Durations are in milliseconds. */
export interface Rules {
  readonly ttl: number
  /** After so many terms without progress it is quarantined. */
  readonly quarantineAfter: number
  /** After so long it runs again when it has finished; infinite if it does not. */
  readonly rerunAfter: number
  /** For so long before it runs again it keeps its place. */
  readonly idleGrace: number
}

/**
 * How a work ID stands.
 *
 * **Details**
 *
 * `Held` and `Free` are shared among the members. `Free` may be taken in
 * `after` milliseconds. `Idle` runs again, and is shared again in `after`
 * milliseconds. The others are nobody's.
 */
export type Standing =
  | { readonly _tag: "Held"; readonly holderId: string; readonly fencingToken: bigint; readonly remaining: number }
  | {
    readonly _tag: "Free"
    readonly after: number
    readonly lastHolderId: string | undefined
    readonly sinceEnd: number
    readonly hasFinished: boolean
  }
  | { readonly _tag: "Idle"; readonly after: number }
  | { readonly _tag: "Finished" | "Retired" }
  | { readonly _tag: "Quarantined"; readonly exit: ExitMode | "expired"; readonly lastHolderId: string }

const untouched: Standing = { _tag: "Free", after: 0, lastHolderId: undefined, sinceEnd: 0, hasFinished: false }

/** Tells it from the record alone, so that all members agree. */
export const standingOf = (record: LeaseRecord | undefined, rules: Rules): Standing => {
  if (record === undefined || Option.isNone(record.term)) return untouched
  const { termsWithoutProgress } = record
  const { fencingToken, holderId, remaining, status, ...term } = record.term.value
  if (status === "held") return { _tag: "Held", holderId, fencingToken, remaining: Duration.toMillis(remaining) }
  if (status === "retired") return { _tag: "Retired" }
  if (termsWithoutProgress >= rules.quarantineAfter) {
    return { _tag: "Quarantined", exit: status, lastHolderId: holderId }
  }
  const sinceEnd = Duration.toMillis(term.sinceEnd)
  const hasFinished = status === "finished"
  if (hasFinished && rules.rerunAfter === Infinity) return { _tag: "Finished" }
  const pause = hasFinished
    ? rules.rerunAfter
    : status === "yielded" || (status === "expired" && termsWithoutProgress <= 1)
    ? 0
    : pauseOf(termsWithoutProgress, Number(fencingToken % 1000n) / 1000)
  const after = Math.max(0, pause - sinceEnd)
  return hasFinished && after > rules.idleGrace
    ? { _tag: "Idle", after: after - rules.idleGrace }
    : { _tag: "Free", after, lastHolderId: holderId, sinceEnd, hasFinished }
}

const shortestPause = 1000
/** In milliseconds, as the shortest. */
export const longestPause = 60_000

/**
 * The milliseconds before work that has failed `times` in a row is tried
 * again: one second, doubled each time up to one minute, ±20 % by `jitter`,
 * which is between 0 and 1.
 */
export const pauseOf = (times: number, jitter: number): number =>
  Math.min(longestPause, shortestPause * 2 ** Math.max(0, times - 1)) * (4 + 2 * jitter) / 5
