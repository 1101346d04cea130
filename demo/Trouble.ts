/**
 * The trouble that the import survives: worker processes that are killed, and
 * one that is frozen until its leases have expired, and then woken.
 *
 * Everything random is drawn beforehand, so that a seed stands for one plan.
 */
import { Effect, Random } from "effect"
import { count, seconds } from "./Format.ts"
import type { Processes } from "./Processes.ts"
import { type Run, type Term, workIdsOf } from "./Run.ts"
import * as Store from "./Store.ts"

interface Blow {
  /** The share of the records that are imported when it falls. */
  readonly at: number
  /** A time after that, in milliseconds: anywhere in what a worker does over and over. */
  readonly delay: number
  /** Which of the workers it hits, from 0 to 1. */
  readonly victim: number
  /** How long a replacement takes to be started, in milliseconds. */
  readonly pause: number
}

export interface Plan {
  readonly kills: ReadonlyArray<Blow>
  readonly freeze: Blow
}

/** Kills all along the way, and a freeze somewhere in the first half. */
export const plan = (kills: number): Effect.Effect<Plan> => {
  const blow = (from: number, to: number) =>
    Effect.all({
      at: Random.nextBetween(from, to),
      delay: Random.nextBetween(0, 400),
      victim: Random.next,
      pause: Random.nextBetween(100, 700)
    })
  const stretch = 0.65 / Math.max(1, kills)
  return Effect.all({
    freeze: blow(0.1, 0.4),
    kills: Effect.forEach(
      Array.from({ length: kills }, (_, index) => 0.08 + index * stretch),
      (from) => blow(from, from + 0.8 * stretch)
    )
  })
}

/** Does all that is planned. */
export const make = (run: Run, processes: Processes, plan: Plan) =>
  Effect.all([
    Effect.forEach(plan.kills, (blow) => kill(run, processes, blow), { discard: true }),
    freeze(run, processes, plan.freeze)
  ], { concurrency: "unbounded", discard: true })

const kill = Effect.fnUntraced(function*(run: Run, processes: Processes, blow: Blow) {
  const victim = yield* choose(run, blow)
  if (victim === undefined) return run.problem(tooShort)
  const held = run.heldBy(victim)
  yield* processes.kill(victim)
  run.kills.push(victim)
  run.note("kill", `${victim.holderId} killed with SIGKILL; it held ${workIdsOf(held)}`)
  yield* Effect.sleep(blow.pause)
  yield* processes.start
})

const freeze = Effect.fnUntraced(function*(run: Run, processes: Processes, blow: Blow) {
  const victim = yield* choose(run, blow)
  if (victim === undefined) return run.problem(tooShort)
  const { holderId } = victim
  victim.state = "marked"
  yield* processes.freeze(victim)
  const isFrozen = () => victim.state === "frozen"
  yield* run.until(`${holderId} stops in its next write`, () => isFrozen() || run.finished)
  if (!isFrozen()) return run.problem(tooShort)
  const held = run.heldBy(victim)
  const workIds = workIdsOf(held)
  run.note("freeze", `${holderId} frozen with SIGSTOP in mid-write; it holds ${workIds}`)
  yield* Effect.sleep(blow.pause)
  yield* processes.start

  yield* run.until(
    `others continue ${workIds}`,
    () => held.every((term) => term.part.terms.at(-1) !== term && term.part.takeover === undefined)
  )
  yield* Effect.sleep(blow.pause)
  const before = yield* rowsUnder(held)
  const millis = run.now - victim.frozenAt
  victim.state = "woken"
  yield* processes.wake(victim)
  run.note("freeze", `${holderId} woken with SIGCONT after ${seconds(millis)}, when others had continued ${workIds}`)
  yield* run.until(
    `${holderId} notices that it has lost ${workIds}`,
    () => held.every((term) => term.lost !== undefined)
  )
  victim.state = "working"
  const wrote = (yield* rowsUnder(held)) - before
  run.freezes.push({ worker: victim, millis, lost: held.length })
  const reasons = [...new Set(held.map((term) => term.lost))].join(" or ")
  if (wrote === 0) run.note("freeze", `${holderId} lost ${workIds} (${reasons}) and wrote nothing`)
  else run.problem(`zombie write: ${holderId} wrote ${count(wrote)} records of ${workIds} after it had lost them`)
})

const tooShort = "The import was over before all the trouble was made: give it more records"

/** Waits for the moment, and then for somebody who is in the middle of real work. Nobody if it is all over. */
const choose = Effect.fnUntraced(function*(run: Run, blow: Blow) {
  yield* run.until("the import goes on", () => run.imported >= blow.at * run.total)
  yield* Effect.sleep(blow.delay)
  const candidates = () =>
    run.workers.filter((worker) =>
      worker.state === "working" && run.heldBy(worker).some((term) => term.next > term.from)
    )
  yield* run.until("a worker that makes progress", () => candidates().length > 0 || run.finished)
  const all = candidates()
  return all.length === 0 ? undefined : all[Math.floor(blow.victim * all.length)]
})

const rowsUnder = Effect.fnUntraced(function*(held: ReadonlyArray<Term>) {
  const records = yield* Store.Records
  let rows = 0
  for (const { part, token } of held) {
    rows += (yield* records.read(part.number)).filter((row) => row.token === token).length
  }
  return rows
})
