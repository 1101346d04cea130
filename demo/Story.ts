/**
 * What happens in a demo, and what went wrong: told by whoever does it, shown
 * by the terminal, waited for by the script.
 */
import { type Clock, Data, Effect } from "effect"

export interface Event {
  readonly at: number
  readonly kind: "plain" | "stage" | "kill" | "freeze" | "takeover" | "finish" | "problem"
  readonly text: string
}

/** The demo cannot go on. */
export class Stuck extends Data.TaggedError("Stuck")<{ readonly message: string }> {}

export class Story {
  readonly events: Array<Event> = []
  /** What must not be: any of them fails the demo. */
  readonly problems: Array<string> = []
  /** Why it cannot go on, if it cannot. */
  broken: string | undefined
  private readonly clock: Clock.Clock
  private readonly startedAt: number

  constructor(clock: Clock.Clock) {
    this.clock = clock
    this.startedAt = clock.currentTimeMillisUnsafe()
  }

  /** The milliseconds since the start. */
  get now(): number {
    return this.clock.currentTimeMillisUnsafe() - this.startedAt
  }

  note(kind: Event["kind"], text: string): void {
    for (const line of text.split("\n")) this.events.push({ at: this.now, kind, text: line })
  }

  problem(text: string): void {
    this.problems.push(text)
    this.note("problem", text)
  }

  /** Waits until something is so. Fails if it takes too long, or the demo is broken. */
  until(what: string, condition: () => boolean, seconds = 90): Effect.Effect<void, Stuck> {
    return Effect.suspend(() => {
      const deadline = this.now + seconds * 1000
      const wait: Effect.Effect<void, Stuck> = Effect.suspend(() => {
        if (this.broken !== undefined) return Effect.fail(new Stuck({ message: this.broken }))
        if (condition()) return Effect.void
        return this.now > deadline
          ? Effect.fail(new Stuck({ message: `Waited for ${seconds} s in vain: ${what}` }))
          : Effect.andThen(Effect.sleep(20), wait)
      })
      return wait
    })
  }
}
