import { assert, describe, it } from "@effect/vitest"
import { Duration, Option, Schema } from "effect"
import type { Backend } from "worklease"
import { type Item, type Member, pauseOf, plan, type Rules, standingOf } from "../src/internal/plan.ts"

/** Draws everything from one number, so that a counterexample is one number. */
const drawing = (seed: number) => {
  let state = seed >>> 0
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0
    let t = state
    t = Math.imul(t ^ (t >>> 15), t | 1)
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61)
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296
  }
  return {
    chance: (p: number) => next() < p,
    below: (n: number) => Math.floor(next() * n)
  }
}

type Drawing = ReturnType<typeof drawing>

const member = (slot: number, options: Partial<Member> = {}): Member => ({
  slot,
  holderId: `m${slot}`,
  formerly: [],
  capacity: 10_000,
  presence: "present",
  ...options
})

const free: Item = { holderId: undefined, lastHolderId: undefined, isRecent: false, isPinned: false }
const heldBy = (holderId: string): Item => ({ ...free, holderId })
const lastHeldBy = (lastHolderId: string): Item => ({ ...free, lastHolderId, isRecent: true })

interface Situation {
  readonly members: ReadonlyArray<Member>
  readonly items: ReadonlyArray<Item>
}

const drawItems = (
  draw: Drawing,
  count: number,
  holders: ReadonlyArray<string>,
  isFull: (holderId: string) => boolean
): ReadonlyArray<Item> => {
  const held = draw.below(101) / 100
  return Array.from({ length: count }, () => {
    const holderId = holders[draw.below(holders.length)]
    if (draw.chance(held) && !isFull(holderId)) return heldBy(holderId)
    return draw.chance(0.5) ? { ...lastHeldBy(holderId), isRecent: draw.chance(0.7) } : free
  })
}

/** A pool at any moment: members with any capacities, and items held, free, or of somebody who is not there. */
const draw = (seed: number, options: { readonly onlyPresent?: boolean } = {}): Situation => {
  const d = drawing(seed)
  const weighted = d.chance(0.5)
  const tight = d.chance(0.2)
  const members = Array.from({ length: 1 + d.below(50) }, (_, index) =>
    member(index * 2, {
      capacity: tight ? 1 + d.below(20) : weighted ? 1 + d.below(1000) : 10_000,
      formerly: d.chance(0.2) ? [`m${index * 2}-before`] : [],
      presence: options.onlyPresent || d.chance(0.85) || index === 0 ? "present" : d.chance(0.5) ? "absent" : "leaving"
    }))
  const sizes = [0, 1, members.length, 100, 1000, 10_000]
  const count = d.below(sizes[d.below(sizes.length)] + 1)
  const load = new Map<string, number>()
  const holders = members.flatMap((_) => [_.holderId, ..._.formerly]).filter(() => d.chance(0.7))
  const items = drawItems(d, count, [...holders, "stranger"], (holderId) => {
    const capacity = members.find((_) => _.holderId === holderId)?.capacity
    if (capacity === undefined) return holderId !== "stranger"
    const before = load.get(holderId) ?? 0
    load.set(holderId, before + 1)
    return before >= capacity
  })
  return { members, items }
}

const isStranger = ({ members }: Situation, { holderId }: Item) =>
  holderId !== undefined && !members.some((_) => _.holderId === holderId || _.formerly.includes(holderId))

const ownerOf = ({ members }: Situation, holderId: string | undefined): Member | undefined =>
  members.find((_) => _.holderId === holderId) ??
    members.find((_) => holderId !== undefined && _.formerly.includes(holderId))

const loadsOf = (members: ReadonlyArray<Member>, assigned: ReadonlyArray<Member | undefined>) => {
  const loads = new Map(members.map((_) => [_, 0]))
  for (const member of assigned) if (member !== undefined) loads.set(member, loads.get(member)! + 1)
  return loads
}

/** How many items have to move, computed in another way: by trying which of the shares are rounded up. */
const fewestMoves = (held: ReadonlyArray<number>, capacities: ReadonlyArray<number>, count: number): number => {
  const capacity = capacities.reduce((a, b) => a + b, 0)
  if (count >= capacity) return held.reduce((sum, load, i) => sum + Math.max(0, load - capacities[i]), 0)
  // best[r]: the fewest moves of the members so far, if r of their shares were rounded up.
  let best = [0]
  for (let i = 0; i < held.length; i++) {
    const floor = Math.floor(count * capacities[i] / capacity)
    const ceil = Math.ceil(count * capacities[i] / capacity)
    const next = Array.from({ length: best.length + 1 }, () => Infinity)
    best.forEach((moves, r) => {
      next[r] = Math.min(next[r], moves + Math.max(0, held[i] - floor))
      if (ceil > floor) next[r + 1] = Math.min(next[r + 1], moves + Math.max(0, held[i] - ceil))
    })
    best = next
  }
  const floors = capacities.reduce((sum, c) => sum + Math.floor(count * c / capacity), 0)
  return best[count - floors]
}

const Seed = Schema.Int.check(Schema.isBetween({ minimum: 0, maximum: 2 ** 31 - 1 }))
const runs = { arbitrary: { runs: 300 } }

describe("plan", () => {
  it.prop("gives every work ID to somebody, as far as the capacities go, and no member more than its capacity", [
    Seed
  ], ([seed]) => {
    const situation = draw(seed)
    const assigned = plan(situation.members, situation.items)
    assert.strictEqual(assigned.length, situation.items.length)
    const shared = situation.items.filter((item) => !isStranger(situation, item)).length
    const loads = loadsOf(situation.members, assigned)
    for (const [{ capacity }, load] of loads) assert.isAtMost(load, capacity)
    const given = assigned.filter((_) => _ !== undefined).length
    const kept = [...loads].reduce((sum, [{ presence }, load]) => sum + (presence === "absent" ? load : 0), 0)
    const present = situation.members.filter((_) => _.presence === "present").reduce((sum, _) => sum + _.capacity, 0)
    assert.strictEqual(given, Math.min(shared, kept + present))
    situation.items.forEach((item, index) => {
      if (isStranger(situation, item)) assert.isUndefined(assigned[index])
    })
  }, runs)

  it.prop("gives every member its share by capacity, rounded down or up", [Seed], ([seed]) => {
    const situation = draw(seed, { onlyPresent: true })
    const { members } = situation
    const shared = situation.items.filter((item) => !isStranger(situation, item)).length
    const capacity = members.reduce((sum, _) => sum + _.capacity, 0)
    for (const [member, load] of loadsOf(members, plan(members, situation.items))) {
      const share = Math.min(member.capacity, shared * member.capacity / capacity)
      assert.isAtLeast(load, Math.floor(share))
      assert.isAtMost(load, Math.ceil(share))
    }
  }, runs)

  it.prop("moves as few as can be, and of each holder only what exceeds its share", [Seed], ([seed]) => {
    const situation = draw(seed, { onlyPresent: true })
    const { items, members } = situation
    const assigned = plan(members, items)
    const moves = items.filter(({ holderId }, index) =>
      holderId !== undefined && ownerOf(situation, holderId) !== undefined &&
      assigned[index] !== ownerOf(situation, holderId)
    )
    const held = members.map((member) => items.filter((_) => ownerOf(situation, _.holderId) === member).length)
    const shared = items.filter((item) => !isStranger(situation, item)).length
    assert.strictEqual(moves.length, fewestMoves(held, members.map((_) => _.capacity), shared))
  }, runs)

  it.prop("a plan that has become true stays", [Seed], ([seed]) => {
    const { items, members } = draw(seed)
    const first = plan(members, items)
    const become = items.map((item, index) =>
      first[index]?.presence === "present" ? heldBy(first[index].holderId) : item
    )
    assert.deepStrictEqual(plan(members, become), first)
  }, runs)

  it.prop("does not change while it is becoming true, in whatever order that happens", [Seed], ([seed]) => {
    const { items, members } = draw(seed)
    const d = drawing(seed + 1)
    const first = plan(members, items)
    let now = items
    for (let step = 0; step < 4; step++) {
      now = now.map((item, index) => {
        const by = first[index]
        if (by === undefined || by.presence !== "present" || item.holderId === by.holderId || d.chance(0.6)) return item
        // Given up, and not taken yet.
        if (item.holderId !== undefined && d.chance(0.5)) return lastHeldBy(item.holderId)
        return heldBy(by.holderId)
      })
      assert.deepStrictEqual(plan(members, now).map((_) => _?.slot), first.map((_) => _?.slot))
    }
  }, runs)

  it.prop("who is absent keeps of its own at most, who is leaving nothing, and neither takes anything", [
    Seed
  ], ([seed]) => {
    const situation = draw(seed)
    const assigned = plan(situation.members, situation.items)
    situation.items.forEach((item, index) => {
      const to = assigned[index]
      assert.notStrictEqual(to?.presence, "leaving")
      if (to?.presence === "absent") {
        assert.strictEqual(ownerOf(situation, item.holderId ?? item.lastHolderId), to)
        assert.isTrue(item.holderId !== undefined || item.isRecent)
      }
    })
  }, runs)

  it("five members with eight each: a sixth gets six, and nothing else moves", () => {
    const members = Array.from({ length: 6 }, (_, slot) => member(slot))
    const items = Array.from({ length: 40 }, (_, index) => heldBy(`m${index % 5}`))
    const assigned = plan(members, items)
    assert.strictEqual(assigned.filter((_) => _!.slot === 5).length, 6)
    assert.strictEqual(items.filter((item, index) => item.holderId !== assigned[index]!.holderId).length, 6)
  })

  it("who comes back gets what it had, and nobody else's", () => {
    const members = [member(0), member(1, { formerly: ["m1-before"] }), member(2)]
    const items = [
      ...Array.from({ length: 10 }, () => heldBy("m0")),
      ...Array.from({ length: 10 }, () => heldBy("m2")),
      ...Array.from({ length: 10 }, () => lastHeldBy("m1-before"))
    ]
    assert.deepStrictEqual(plan(members, items).map((_) => _!.slot), [
      ...Array.from({ length: 10 }, () => 0),
      ...Array.from({ length: 10 }, () => 2),
      ...Array.from({ length: 10 }, () => 1)
    ])
  })

  it("what an absent member had is kept for it while it is recent, and shared afterwards", () => {
    const members = [member(0), member(1, { presence: "absent" })]
    const items = [
      ...Array.from({ length: 4 }, () => heldBy("m0")),
      ...Array.from({ length: 4 }, () => lastHeldBy("m1"))
    ]
    assert.deepStrictEqual(plan(members, items).map((_) => _!.slot), [0, 0, 0, 0, 1, 1, 1, 1])
    assert.isTrue(plan(members, items.map((_) => ({ ..._, isRecent: false }))).every((_) => _!.slot === 0))
  })

  it("what a leaving member still holds is planned for those who stay", () => {
    const members = [member(0), member(1, { presence: "leaving" }), member(2)]
    const items = Array.from({ length: 6 }, () => heldBy("m1"))
    assert.deepStrictEqual(plan(members, items).map((_) => _!.slot), [0, 0, 0, 2, 2, 2])
  })

  it("work that is new is spread in order: neighbours come together", () => {
    const members = [member(0), member(1, { capacity: 20_000 })]
    assert.deepStrictEqual(plan(members, Array.from({ length: 6 }, () => free)).map((_) => _!.slot), [0, 0, 1, 1, 1, 1])
  })

  it("what is pinned stays, also beyond its holder's share", () => {
    const members = [member(0), member(1)]
    const items = Array.from({ length: 6 }, (_, index) => ({ ...heldBy("m0"), isPinned: index >= 2 }))
    assert.deepStrictEqual(plan(members, items).map((_) => _!.slot), [1, 1, 0, 0, 0, 0])
  })

  it("without members, nothing is anybody's", () => {
    assert.deepStrictEqual(plan([], [free, heldBy("m0")]), [undefined, undefined])
  })
})

describe("standingOf", () => {
  const rules: Rules = { ttl: 30_000, quarantineAfter: 5, rerunAfter: Infinity, idleGrace: 60_000 }
  type Status = Option.Option.Value<Backend.LeaseRecord["term"]>["status"]
  const record = (status: Status, options: { sinceEnd?: number; termsWithoutProgress?: number } = {}) => ({
    workId: "w",
    term: Option.some({
      holderId: "m0",
      fencingToken: 500n,
      status,
      expiresAt: 0,
      remaining: Duration.seconds(status === "held" ? 10 : 0),
      sinceEnd: Duration.millis(options.sinceEnd ?? 0)
    }),
    state: Option.none(),
    termsWithoutProgress: options.termsWithoutProgress ?? 0
  })
  const standing = (...args: Parameters<typeof record>) => standingOf(record(...args), rules)
  const afterOf = (...args: Parameters<typeof record>) => {
    const found = standing(...args)
    return found._tag === "Free" ? found.after : undefined
  }

  it("may be taken at once: what nobody had yet, what was handed over, and what a crash has left", () => {
    const untouched = standingOf(undefined, rules)
    assert.isTrue(untouched._tag === "Free" && untouched.after === 0)
    assert.strictEqual(afterOf("yielded", { termsWithoutProgress: 3 }), 0)
    assert.strictEqual(afterOf("expired"), 0)
    assert.strictEqual(afterOf("expired", { termsWithoutProgress: 1 }), 0)
  })

  it("pauses after a failure, and longer after each one without progress, up to a minute", () => {
    assert.strictEqual(afterOf("abandoned"), 1000)
    assert.strictEqual(afterOf("abandoned", { sinceEnd: 400 }), 600)
    assert.strictEqual(afterOf("abandoned", { sinceEnd: 5000 }), 0)
    assert.strictEqual(afterOf("abandoned", { termsWithoutProgress: 3 }), 4000)
    assert.strictEqual(afterOf("expired", { termsWithoutProgress: 2 }), 2000)
    assert.strictEqual(pauseOf(100, 0.5), 60_000)
    assert.strictEqual(pauseOf(1, 0), 800)
    assert.strictEqual(pauseOf(1, 1), 1200)
  })

  it("carries no load: what is finished, retired or quarantined", () => {
    assert.strictEqual(standing("finished")._tag, "Finished")
    assert.strictEqual(standing("retired", { termsWithoutProgress: 9 })._tag, "Retired")
    assert.strictEqual(standing("expired", { termsWithoutProgress: 5 })._tag, "Quarantined")
    assert.strictEqual(standing("abandoned", { termsWithoutProgress: 4 })._tag, "Free")
    assert.strictEqual(standing("held", { termsWithoutProgress: 5 })._tag, "Held")
  })

  it("what runs again keeps its place from its grace on", () => {
    const again = (sinceEnd: number) => standingOf(record("finished", { sinceEnd }), { ...rules, rerunAfter: 100_000 })
    assert.deepStrictEqual(again(10_000), { _tag: "Idle", after: 30_000 })
    const soon = again(50_000)
    assert.isTrue(soon._tag === "Free" && soon.after === 50_000 && soon.lastHolderId === "m0")
    const now = again(200_000)
    assert.isTrue(now._tag === "Free" && now.after === 0)
  })
})
