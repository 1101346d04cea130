/**
 * What is known of the run, from what the worker processes report and from
 * what is done to them: the screen shows it, and the trouble waits for it.
 */
import type { Clock } from "effect"
import type { City } from "./Cities.ts"
import { count, seconds } from "./Format.ts"
import type { Report } from "./Import.ts"
import { Story } from "./Story.ts"

/** One holding of a part, as far as it was reported. */
export interface Term {
  readonly part: Part
  readonly worker: Worker
  readonly token: bigint
  /** The first record of its own. */
  readonly from: number
  /** The first record that it has not written. */
  next: number
  /** How it was lost, if it was. */
  lost: string | undefined
}

export interface Part {
  readonly number: number
  readonly workId: string
  readonly cities: ReadonlyArray<City>
  readonly terms: Array<Term>
  /** When the last transaction committed. */
  wroteAt: number | undefined
  /** Says what the latest term took over, as soon as it has made progress. */
  takeover: ((gap: number) => void) | undefined
  finished: boolean
}

export interface Worker {
  readonly holderId: string
  readonly number: number
  /** `marked` is about to be frozen; `woken` has been, and has not yet noticed all that it has lost. */
  state: "starting" | "working" | "marked" | "frozen" | "woken" | "killed" | "ended"
  frozenAt: number
}

export class Run extends Story {
  readonly parts: ReadonlyArray<Part>
  readonly total: number
  readonly workers: Array<Worker> = []
  /** The time from the last progress of one holder to the first of the next, in milliseconds, of each takeover. */
  readonly gaps: Array<number> = []
  readonly kills: Array<Worker> = []
  readonly freezes: Array<{ readonly worker: Worker; readonly millis: number; readonly lost: number }> = []

  constructor(parts: ReadonlyArray<ReadonlyArray<City>>, workIdOf: (part: number) => string, clock: Clock.Clock) {
    super(clock)
    this.parts = parts.map((cities, number) => ({
      number,
      workId: workIdOf(number),
      cities,
      terms: [],
      wroteAt: undefined,
      takeover: undefined,
      finished: false
    }))
    this.total = parts.reduce((total, cities) => total + cities.length, 0)
  }

  get imported(): number {
    return this.parts.reduce((sum, part) => sum + importedOf(part), 0)
  }

  get finished(): boolean {
    return this.parts.every((part) => part.finished)
  }

  /** The terms that a worker would lose if it ended now. */
  heldBy(worker: Worker): ReadonlyArray<Term> {
    return this.parts.filter((part) => !part.finished).map((part) => part.terms.at(-1))
      .filter((term) => term !== undefined)
      .filter((term) => term.worker === worker && term.lost === undefined)
  }

  reported(worker: Worker, report: Report): void {
    const part = this.parts[report.part]
    const term = "token" in report ? part.terms.find((term) => term.token === report.token) : undefined
    switch (report._tag) {
      case "Acquired": {
        if (worker.state === "starting") worker.state = "working"
        const { next, prior, token } = report
        const known = importedOf(part)
        part.terms.push({ part, worker, token, from: next, next, lost: undefined })
        if (next < known) {
          this.problem(`${part.workId}: ${worker.holderId} resumed at record ${next}, but ${known} were written before`)
        }
        if (prior.holderId === null) break
        const state = this.workers.find((worker) => worker.holderId === prior.holderId)?.state
        const left = `${prior.holderId} ${state === "killed" || state === "frozen" ? state : "left"} (${prior.exit})`
        const continues = `${worker.holderId} from record ${count(next)}`
        part.takeover = (gap) => {
          this.gaps.push(gap)
          this.note("takeover", `${part.workId}  ${left} → ${continues}, gap ${seconds(gap)}`)
        }
        break
      }
      case "Wrote": {
        if (term === undefined) break
        term.next = report.next
        this.progressed(part)
        break
      }
      case "Finished": {
        part.finished = true
        this.progressed(part)
        this.note("finish", `${part.workId}  finished by ${worker.holderId}`)
        break
      }
      case "Lost": {
        if (term !== undefined) term.lost = report.why
        if (worker.state !== "woken") {
          this.note("plain", `${part.workId}  lost by ${worker.holderId} (${report.why})`)
        }
        break
      }
      case "Failed": {
        this.note("plain", `${part.workId}  failed in ${worker.holderId}: ${report.why}`)
        break
      }
      case "Stopping": {
        worker.state = "frozen"
        worker.frozenAt = this.now
        break
      }
    }
  }

  private progressed(part: Part): void {
    const takeover = part.takeover
    part.takeover = undefined
    takeover?.(this.now - (part.wroteAt ?? this.now))
    part.wroteAt = this.now
  }
}

/** The records of a part that are in the table, by what was reported. */
export const importedOf = (part: Part): number => part.terms.reduce((next, term) => Math.max(next, term.next), 0)

/** "import:0, 3 and 7". */
export const workIdsOf = (terms: ReadonlyArray<Term>): string => {
  const [first, ...others] = terms.map((term) => term.part)
  return [first.workId, ...others.map((part) => String(part.number))].join(", ").replace(/, (\d+)$/, " and $1")
}
