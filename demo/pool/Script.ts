/**
 * How members come and go: stage by stage, each until all partitions are at
 * work, shared evenly, and nothing has moved for a while.
 *
 * Everything random is drawn beforehand, so that a seed stands for one plan.
 */
import { Clock, Effect, Random } from "effect"
import { plural, seconds } from "../Format.ts"
import { type Fleet, goesElsewhere, type Move } from "./Fleet.ts"
import type { Processes } from "./Processes.ts"

export interface Plan {
  /** Names, from 1. */
  readonly killed: number
  readonly redeployed: number
  /** In which order they leave. */
  readonly order: ReadonlyArray<number>
}

export const plan = (members: number): Effect.Effect<Plan> =>
  Effect.map(
    Random.shuffle(Array.from({ length: members }, (_, index) => index + 1)),
    ([killed, redeployed, ...others]) => ({ killed, redeployed, order: others })
  )

/** How a stage has come out. */
export interface Outcome {
  readonly title: string
  readonly members: number
  /** Of them those that went elsewhere, and how many had to. */
  readonly moves: ReadonlyArray<Move>
  readonly needed: number
  /** How long it took until nothing moved any more, in milliseconds. */
  readonly took: number
  /** The statements of a second once nothing moved any more, of all members, and those of them that look how all stand. */
  readonly statements: number
  readonly looks: number
}

/** Does all that is planned. `pause` is how long nothing may move, in milliseconds. */
export const run = Effect.fnUntraced(function*(
  fleet: Fleet,
  processes: Processes,
  plan: Plan,
  pause: number
) {
  const outcomes: Array<Outcome> = []
  const numbers = [plan.redeployed, plan.killed, ...plan.order].sort((a, b) => a - b)
  const current = (number: number) => [...fleet.members].reverse().find((member) => member.number === number)!

  /** Changes who is there, and waits until that has no more consequences. */
  const stage = Effect.fnUntraced(function*<E, R>(title: string, change: Effect.Effect<unknown, E, R>) {
    fleet.note("stage", title)
    const before = new Map(fleet.members.map((member) => [member, fleet.heldBy(member).length]))
    const startedAt = yield* Clock.currentTimeMillis
    yield* change
    const what = `all are at work, evenly shared, after: ${title}`
    yield* fleet.until(what, () => fleet.isBalanced, 60)
    const settledAt = yield* Clock.currentTimeMillis
    const { looks, statements } = fleet
    yield* Effect.sleep(pause)
    const elapsed = (yield* Clock.currentTimeMillis) - settledAt
    const all = fleet.moves.filter(({ after }) => after.beganAt >= startedAt)
    const late = all.filter(({ after }) => after.beganAt > settledAt)
    if (late.length > 0) fleet.problem(`${plural(late.length, "partition")} moved though all was shared evenly`)
    if (!fleet.isBalanced) fleet.problem(`not all were at work, evenly shared, ${seconds(elapsed)} after they had been`)
    const names = new Set(fleet.present.map(({ name }) => name))
    const outcome: Outcome = {
      title,
      members: fleet.present.length,
      moves: all.filter(goesElsewhere),
      needed: fewestMoves([...before].map(([{ name }, load]) => ({ load, stays: names.has(name) })), names.size),
      took: Math.max(startedAt, ...fleet.partitions.map(({ executions }) => executions.at(-1)!.beganAt)) - startedAt,
      statements: (fleet.statements - statements) / elapsed * 1000,
      looks: (fleet.looks - looks) / elapsed * 1000
    }
    outcomes.push(outcome)
    fleet.tell()
    fleet.note(
      "plain",
      `all ${fleet.partitions.length} at work after ${seconds(outcome.took)}: ${loadsOf(fleet)}; ` +
        `${plural(outcome.moves.length, "move")}, at least ${outcome.needed} were needed`
    )
  })

  yield* Effect.forkScoped(Effect.forever(Effect.andThen(Effect.sleep(300), Effect.sync(() => fleet.tell()))))

  const [first, ...others] = numbers
  const start = (number: number) => processes.start(number, number === plan.redeployed)
  yield* stage("one member", start(first))
  yield* stage(`${plural(numbers.length, "member")}`, Effect.forEach(others, start))
  yield* stage(`m${plan.killed} is killed`, Effect.suspend(() => processes.kill(current(plan.killed))))

  let back: { readonly away: number; readonly before: ReadonlyArray<string> } | undefined
  const redeploy = Effect.gen(function*() {
    const old = current(plan.redeployed)
    const before = fleet.heldBy(old).map(({ key }) => key)
    yield* processes.shutdown(old)
    const fresh = yield* start(plan.redeployed)
    yield* fleet.until(`${fresh.holderId} is there`, () => fresh.startedAt > 0)
    back = { away: fresh.startedAt - old.goneAt, before }
  })
  yield* stage(`m${plan.redeployed} is redeployed`, redeploy)
  const returned = fleet.heldBy(current(plan.redeployed)).map(({ key }) => key)

  yield* stage(
    "one member again",
    Effect.suspend(() =>
      Effect.forEach(plan.order, (number) => processes.shutdown(current(number)), { concurrency: "unbounded" })
    )
  )
  fleet.note("stage", "the last one leaves")
  yield* processes.shutdown(current(plan.redeployed))
  fleet.tell()
  return {
    outcomes,
    redeployed: `m${plan.redeployed}`,
    away: back!.away,
    hasAllBack: back!.before.join() === returned.join(),
    returned: returned.length
  }
})

/** What those have who leave must move, and what exceeds the share of those who stay: those who have most keep one more. */
const fewestMoves = (
  members: ReadonlyArray<{ readonly load: number; readonly stays: boolean }>,
  count: number
): number => {
  const loads = members.filter(({ stays }) => stays).map(({ load }) => load).sort((a, b) => b - a)
  const total = members.reduce((sum, { load }) => sum + load, 0)
  const kept = loads.reduce(
    (sum, load, place) => sum + Math.min(load, Math.floor(total / count) + (place < total % count ? 1 : 0)),
    0
  )
  return total - kept
}

const loadsOf = (fleet: Fleet): string =>
  fleet.present.map((member) => `${member.holderId} has ${fleet.heldBy(member).length}`).join(", ")
