/**
 * The members as processes: starts them, and ends them in both ways.
 */
import { Clock, Effect, type PlatformError, Scope } from "effect"
import { ChildProcessSpawner } from "effect/process"
import * as Child from "../Child.ts"
import type { Stuck } from "../Story.ts"
import type { Fleet, Member } from "./Fleet.ts"
import { ReportLine, Settings } from "./Partitions.ts"

export interface Processes {
  /** Starts a process. One that is stable has the same member ID each time. It ends with the scope. */
  readonly start: (number: number, isStable: boolean) => Effect.Effect<Member, PlatformError.PlatformError>
  /** SIGKILL: returns when it is dead. */
  readonly kill: (member: Member) => Effect.Effect<void, PlatformError.PlatformError>
  /** SIGTERM: returns when it has handed over all that it had. */
  readonly shutdown: (member: Member) => Effect.Effect<void, Stuck>
}

export const make = Effect.fnUntraced(function*(
  fleet: Fleet,
  settings: Pick<typeof Settings.Type, "backend" | "url" | "keys">
): Effect.fn.Return<Processes, never, ChildProcessSpawner.ChildProcessSpawner | Scope.Scope> {
  const spawner = yield* ChildProcessSpawner.ChildProcessSpawner
  const scope = yield* Effect.scope
  const handles = new Map<Member, ChildProcessSpawner.ChildProcessHandle>()

  const start = Effect.fnUntraced(function*(number: number, isStable: boolean) {
    const name = `m${number}`
    const starts = fleet.members.filter((member) => member.name === name).length
    const holderId = starts === 0 ? name : `${name}.${starts + 1}`
    const member: Member = {
      name,
      number,
      holderId,
      state: "starting",
      startedAt: 0,
      goneAt: 0,
      looks: 0,
      statements: 0
    }
    fleet.members.push(member)
    const handle = yield* Child.start({
      script: new URL("member.ts", import.meta.url),
      Settings,
      settings: { ...settings, holderId, ...(isStable ? { memberId: name } : {}) },
      Report: ReportLine,
      onReport: (report) => fleet.reported(member, report),
      onEnd: (how) => fleet.ended(member, how)
    })
    handles.set(member, handle)
    return member
  }, (self) =>
    self.pipe(
      Effect.provideService(ChildProcessSpawner.ChildProcessSpawner, spawner),
      Effect.provideService(Scope.Scope, scope)
    ))

  return {
    start,
    kill: Effect.fnUntraced(function*(member) {
      const held = fleet.heldBy(member).length
      // What it says from now on it does not say any more.
      member.state = "killed"
      yield* handles.get(member)!.kill({ killSignal: "SIGKILL" })
      fleet.died(member, yield* Clock.currentTimeMillis)
      fleet.note("kill", `${member.holderId} killed with SIGKILL; it had ${held}`)
    }),
    shutdown: Effect.fnUntraced(function*(member) {
      fleet.note("plain", `${member.holderId} is told to end (SIGTERM); it has ${fleet.heldBy(member).length}`)
      member.state = "leaving"
      const startedAt = fleet.now
      yield* Effect.sync(() => process.kill(handles.get(member)!.pid, "SIGTERM"))
      yield* fleet.until(`${member.holderId} has ended`, () => member.state as Member["state"] === "left", 60)
      fleet.note("plain", `${member.holderId} has handed over all, and left, after ${fleet.now - startedAt} ms`)
    })
  }
})
