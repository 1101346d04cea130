/**
 * What is known of the pool, from what its members report and from what is done
 * to them: the screen shows it, and the script waits for it.
 */
import { Array as Arr, type Clock } from "effect"
import { seconds } from "../Format.ts"
import { Story } from "../Story.ts"
import type { Report } from "./Partitions.ts"

/** One start of a member. */
export interface Member {
  /** Who it is: the same for the one that replaces it. */
  readonly name: string
  readonly number: number
  readonly holderId: string
  state: "starting" | "working" | "leaving" | "killed" | "left"
  /** When it was there, and when it was gone, in milliseconds since the epoch. */
  startedAt: number
  goneAt: number
  looks: number
  statements: number
}

/** One execution of a partition, by one member. Times are in milliseconds since the epoch. */
export interface Execution {
  readonly member: Member
  readonly token: bigint
  readonly beganAt: number
  readonly offset: number
  /** How the one before had ended. */
  readonly exit: string
  /** How far it has come, by the checkpoints that are stored. */
  stored: number
  isAsked: boolean
  endedAt: number | undefined
}

export interface Partition {
  readonly key: string
  readonly executions: Array<Execution>
}

/** A partition goes on: in another process, or in the one that replaces it. */
export interface Move {
  readonly key: string
  readonly before: Execution
  readonly after: Execution
  /** The time between the two executions, in milliseconds: from the death of one that was killed. */
  readonly gap: number
}

export class Fleet extends Story {
  readonly partitions: ReadonlyArray<Partition>
  readonly members: Array<Member> = []
  private readonly byKey: ReadonlyMap<string, Partition>
  private readonly told = new Set<Execution>()

  constructor(keys: ReadonlyArray<string>, clock: Clock.Clock) {
    super(clock)
    this.partitions = keys.map((key) => ({ key, executions: [] }))
    this.byKey = new Map(this.partitions.map((partition) => [partition.key, partition]))
  }

  /** Those who take part: also who has only been started. */
  get present(): ReadonlyArray<Member> {
    return this.members.filter(({ state }) => state === "starting" || state === "working")
  }

  /** Whether all partitions are at work, and each member has its share. */
  get isBalanced(): boolean {
    const loads = this.present.map((member) => this.heldBy(member).length)
    return this.atWork === this.partitions.length && Math.max(...loads) - Math.min(...loads) <= 1
  }

  get atWork(): number {
    return this.partitions.filter((partition) => runningOf(partition) !== undefined).length
  }

  get statements(): number {
    return this.members.reduce((sum, { statements }) => sum + statements, 0)
  }

  get looks(): number {
    return this.members.reduce((sum, { looks }) => sum + looks, 0)
  }

  get moves(): ReadonlyArray<Move> {
    return this.partitions.flatMap(({ executions, key }) =>
      executions.slice(1).flatMap((after, index) => {
        const before = executions[index]
        return before.endedAt === undefined
          ? []
          : [{ key, before, after, gap: after.beganAt - before.endedAt }]
      })
    )
  }

  heldBy(member: Member): ReadonlyArray<Partition> {
    return this.partitions.filter((partition) => runningOf(partition)?.member === member)
  }

  /** Sees to it that nothing is taken for running in a process that is dead. */
  died(member: Member, at: number): void {
    member.state = "killed"
    member.goneAt = at
    for (const { executions } of this.partitions) {
      for (const execution of executions) {
        if (execution.member === member) execution.endedAt ??= at
      }
    }
  }

  /** Called when a process has ended, and said all that it had to say. */
  ended(member: Member, how: string | undefined): void {
    if (member.state === "killed" || member.state === "left") return
    this.broken = `${member.holderId} ${how ?? "ended by itself"}`
  }

  reported(member: Member, report: Report): void {
    switch (report._tag) {
      case "Started": {
        member.startedAt = report.at
        return
      }
      case "Counted": {
        member.looks = report.looks
        member.statements = report.statements
        return
      }
      case "Left": {
        member.state = "left"
        member.goneAt = report.at
        return
      }
    }
    const { executions, key } = this.byKey.get(report.key)!
    if (report._tag === "Began") {
      if (member.state === "starting") member.state = "working"
      const { at, exit, offset, token } = report
      executions.push({
        member,
        token,
        beganAt: at,
        offset,
        exit,
        stored: offset,
        isAsked: false,
        // It has begun, and died before that was heard.
        endedAt: member.state === "killed" && member.goneAt > 0 ? member.goneAt : undefined
      })
      // Two processes are not heard in the order in which they have spoken.
      executions.sort((a, b) => a.token < b.token ? -1 : 1)
      return
    }
    const execution = executions.find(({ token }) => token === report.token)
    if (execution === undefined) {
      this.problem(`${member.holderId} reports of an execution of ${key} that has not begun`)
    } else if (report._tag === "Asked") execution.isAsked = true
    else if (report._tag === "Advanced") execution.stored = report.offset
    else execution.endedAt = report.at
  }

  /** Tells of what has moved since it told last, in one line for each pair of members. */
  tell(): void {
    const fresh = this.moves.filter(({ after }) => !this.told.has(after))
    const pairs = Arr.groupBy(
      fresh,
      ({ after, before }) => `${before.member.holderId} ${after.member.holderId} ${after.exit}`
    )
    for (const moves of Object.values(pairs)) {
      const [{ after, before }] = moves
      for (const { after } of moves) this.told.add(after)
      const from = `${before.member.holderId}${before.member.state === "killed" ? " killed" : ""} (${after.exit})`
      const keys = moves.map(({ key }) => key).join(" ")
      const longest = Math.max(...moves.map(({ gap }) => gap))
      this.note(
        "takeover",
        `${from} → ${after.member.holderId}  ${keys}  gap ${moves.length > 1 ? "up to " : ""}${gap(longest)}`
      )
    }
  }
}

export const runningOf = ({ executions }: Partition): Execution | undefined => {
  const last = executions.at(-1)
  return last === undefined || last.endedAt !== undefined ? undefined : last
}

/** Unless it has come back to who replaces the one that had it. */
export const goesElsewhere = ({ after, before }: Move): boolean => after.member.name !== before.member.name

/** Gaps are from milliseconds to seconds. */
export const gap = (millis: number): string => millis < 1000 ? `${millis} ms` : seconds(millis)
