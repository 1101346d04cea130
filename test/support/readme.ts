/** What the code of README.md takes for granted: its hidden preludes import it from here. */
import * as Effect from "effect/Effect"
import * as Schema from "effect/Schema"

export class StepError extends Schema.TaggedError<StepError>()("StepError", { step: Schema.String }) {}

/** The steps that ran, in order. */
export const executed: Array<string> = []

/** Steps that fail once, when they run for the first time. */
export const failing = new Set<string>()

const step = (id: string) => ({
  id,
  execute: Effect.suspend(() => {
    executed.push(id)
    return failing.delete(id) ? new StepError({ step: id }) : Effect.void
  })
})

export const steps: ReadonlyArray<{ readonly id: string; readonly execute: Effect.Effect<void, StepError> }> = [
  step("create account"),
  step("charge card"),
  step("send invitation")
]

export const readLines = (file: string): ReadonlyArray<string> => ["a", "b", "c"].map((line) => `${file}: ${line}`)

export const pages = 25

/** An upload that nothing can parse, until an operator has mended it. */
export const upload = { isBroken: true, parsed: 0 }

export const parse = (id: string): Effect.Effect<string, StepError> =>
  Effect.suspend(() => {
    upload.parsed++
    return upload.isBroken ? new StepError({ step: id }) : Effect.succeed(`parsed ${id}`)
  })
