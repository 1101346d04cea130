/**
 * Says what is being measured, on standard error: in a terminal in one line
 * that changes, elsewhere in a line now and then.
 */
import { Effect, Schedule, type Scope } from "effect"
import { elapsed } from "./Format.ts"

export interface Progress {
  /** What is done as a whole. */
  readonly begin: (title: string) => Effect.Effect<void>
  readonly say: (text: string) => Effect.Effect<void>
  /** Ends what was begun, with a line that stays. */
  readonly end: (text: string) => Effect.Effect<void>
}

/** Elsewhere than in a terminal, not more than one line in so many milliseconds. */
const quiet = 5000

export const make: Effect.Effect<Progress, never, Scope.Scope> = Effect.gen(function*() {
  const isLive = process.stderr.isTTY === true && process.env.TERM !== "dumb"
  const startedAt = performance.now()
  let title = ""
  let text = ""
  let shown = ""
  let shownAt = -Infinity

  const line = () => `${elapsed(performance.now() - startedAt).padStart(5)}  ${title}${text === "" ? "" : `: ${text}`}`
  const write = (output: string) => {
    process.stderr.write(output)
  }
  const show = Effect.sync(() => {
    if (title === "") return
    if (isLive) {
      write(`\r${line().slice(0, (process.stderr.columns ?? 80) - 1)}\x1b[K`)
    } else if (`${title}${text}` !== shown && performance.now() - shownAt >= quiet) {
      shown = `${title}${text}`
      shownAt = performance.now()
      write(`${line()}\n`)
    }
  })
  yield* Effect.forkScoped(Effect.repeat(show, Schedule.spaced(500)))
  yield* Effect.addFinalizer(() => Effect.sync(() => isLive && title !== "" ? write("\r\x1b[K") : undefined))

  return {
    begin: (next) =>
      Effect.suspend(() => {
        title = next
        text = ""
        shownAt = -Infinity
        return show
      }),
    say: (next) =>
      Effect.suspend(() => {
        text = next
        return isLive ? Effect.void : show
      }),
    end: (result) =>
      Effect.sync(() => {
        text = result
        write(isLive ? `\r${line()}\x1b[K\n` : `${line()}\n`)
        title = ""
      })
  }
})
