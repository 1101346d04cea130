/**
 * What one target is: something that is promised, measured, and judged.
 */
import type { Effect, Scope } from "effect"
import type { ChildProcessSpawner } from "effect/process"
import type { Bench } from "./Bench.ts"
import type { Panel } from "./Chart.ts"

/** How much is measured: `tiny` only shows that everything works. */
export type SizeName = "full" | "quick" | "tiny"

export type Verdict = "pass" | "fall short"

/** One line of the table. */
export interface Row {
  readonly what: string
  readonly ours: string
  /** What it is compared with, measured in the same run. Empty where it is a count. */
  readonly compared?: string
  readonly ratio?: string
  /** Empty where the row is there to be looked at only. */
  readonly target?: string
  readonly verdict?: Verdict
}

/** A figure that another target shows beside one of its own. */
export interface Figure {
  readonly label: string
  readonly text: string
}

export interface Outcome {
  readonly rows: ReadonlyArray<Row>
  /** What has to be said about the figures. */
  readonly notes?: ReadonlyArray<string>
  /** What is too long for the terminal, and stands in the documentation only. */
  readonly remarks?: ReadonlyArray<string>
  readonly panels?: ReadonlyArray<Panel>
  readonly figures?: Readonly<Record<string, Figure>>
}

/** What a target may use. */
export type Services = Bench | ChildProcessSpawner.ChildProcessSpawner | Scope.Scope

export interface Target {
  readonly number: number
  readonly name: string
  /** What is measured, and how, for the documentation. */
  readonly method: string
  /** What the size says, in words. */
  readonly describe: (size: SizeName) => string
  readonly run: (size: SizeName) => Effect.Effect<Outcome, unknown, Services>
}

export const make = <S>(options: {
  readonly number: number
  readonly name: string
  readonly method: string
  readonly sizes: Readonly<Record<SizeName, S>>
  readonly describe: (size: S) => string
  readonly run: (size: S, name: SizeName) => Effect.Effect<Outcome, unknown, Services>
}): Target => ({
  number: options.number,
  name: options.name,
  method: options.method,
  describe: (size) => options.describe(options.sizes[size]),
  run: (size) => options.run(options.sizes[size], size)
})

export const verdict = (met: boolean): Verdict => met ? "pass" : "fall short"

/** What came of one target. */
export interface Result {
  readonly target: Target
  readonly size: string
  readonly seconds: number
  readonly outcome: Outcome | {
    /** Why, in one line. */
    readonly failed: string
    readonly details: string
  }
}

/** A target as a whole passes if each of its rows that is judged does. */
export const verdictOf = ({ outcome }: Result): Verdict | "failed" => {
  if ("failed" in outcome) return "failed"
  return verdict(outcome.rows.every((row) => row.verdict !== "fall short"))
}
