/**
 * Shows a story: in a terminal, events that scroll by above a live picture;
 * elsewhere, plain lines.
 */
import { Effect, Schedule } from "effect"
import { styleText } from "node:util"
import { seconds } from "./Format.ts"
import type { Event, Story } from "./Story.ts"

/** Prints lines that stay. */
export const print = (lines: ReadonlyArray<Line>): Effect.Effect<void> =>
  Effect.sync(() => write(lines.map((line) => `${styled(line, Infinity)}\n`).join("")))

/** A piece of text, and how it looks. */
export type Piece = readonly [text: string, ...style: ReadonlyArray<Style>]

export type Line = ReadonlyArray<Piece>

export type Style = Extract<Parameters<typeof styleText>[0], string>

/** What there is to see beside the events. */
export interface Picture {
  /** Where it is live: as it is now, for a terminal of so many columns. */
  readonly lines: (columns: number) => ReadonlyArray<Line>
  /** Elsewhere: every two seconds. */
  readonly summary: () => ReadonlyArray<Piece>
}

/** Shows the story until the scope is closed. */
export const show = (story: Story, picture: Picture) => isLive() ? live(story, picture) : plain(story, picture)

/** A line that begins with the time. */
export const timed = (millis: number, line: Line): Line => [[`${seconds(millis).padStart(7)}  `, "dim"], ...line]

/** Whether styles show. */
export const hasColours = styleText("red", " ") !== " "

export const colours = ["cyan", "magenta", "yellow", "blue", "green", "white"] as const

const isLive = (): boolean => process.stdout.isTTY && process.env.TERM !== "dumb"

const write = (text: string): void => {
  process.stdout.write(text)
}

// -----------------------------------------------------------------------------
// plain lines
// -----------------------------------------------------------------------------

const plain = Effect.fnUntraced(function*(story: Story, picture: Picture) {
  let shown = 0
  let summaryAt = 0
  const lines = Effect.sync(() => {
    const fresh: Array<Line> = story.events.slice(shown).map(eventLine)
    shown = story.events.length
    if (story.now >= summaryAt) {
      fresh.push(timed(story.now, picture.summary()))
      summaryAt = story.now + 2000
    }
    write(fresh.map((line) => `${styled(line, Infinity)}\n`).join(""))
  })
  yield* Effect.addFinalizer(() => lines)
  yield* Effect.forkScoped(Effect.repeat(lines, Schedule.spaced(100)))
})

// -----------------------------------------------------------------------------
// a terminal
// -----------------------------------------------------------------------------

const escape = {
  // A terminal that knows it shows each frame as a whole; the others ignore it.
  beginFrame: "\x1b[?2026h",
  endFrame: "\x1b[?2026l",
  hideCursor: "\x1b[?25l",
  showCursor: "\x1b[?25h",
  noWrap: "\x1b[?7l",
  wrap: "\x1b[?7h",
  up: (lines: number) => lines === 0 ? "\r" : `\r\x1b[${lines}A`,
  eraseLine: "\x1b[K",
  eraseBelow: "\x1b[J",
  eraseAll: "\x1b[2J\x1b[H"
}

const live = Effect.fnUntraced(function*(story: Story, picture: Picture) {
  let shown = 0
  let height = 0
  let resized = false
  const frame = Effect.sync(() => {
    const { columns = 80, rows = 24 } = process.stdout
    const below = picture.lines(columns).slice(0, rows - 1)
    // What was on the screen is lost with its size.
    if (resized) shown = Math.max(0, story.events.length - Math.max(0, rows - 1 - below.length))
    const lines = [...story.events.slice(shown).map(eventLine), ...below]
    write(
      escape.beginFrame + (resized ? escape.eraseAll : escape.up(height)) +
        lines.map((line) => `${styled(line, columns)}${escape.eraseLine}\n`).join("") +
        escape.eraseBelow + escape.endFrame
    )
    shown = story.events.length
    height = below.length
    resized = false
  })
  const onResize = () => {
    resized = true
  }
  yield* Effect.acquireRelease(
    Effect.sync(() => {
      process.stdout.on("resize", onResize)
      write(escape.hideCursor + escape.noWrap)
    }),
    () =>
      Effect.andThen(
        frame,
        Effect.sync(() => {
          process.stdout.off("resize", onResize)
          write(escape.wrap + escape.showCursor)
        })
      )
  )
  yield* Effect.forkScoped(Effect.repeat(frame, Schedule.spaced(100)))
})

// -----------------------------------------------------------------------------
// both
// -----------------------------------------------------------------------------

const eventLine = ({ at, kind, text }: Event): Line => timed(at, [[text, ...eventStyles[kind]]])

const eventStyles: Record<Event["kind"], ReadonlyArray<Style>> = {
  plain: [],
  stage: ["bold"],
  kill: ["red"],
  freeze: ["cyan", "bold"],
  takeover: ["yellow"],
  finish: ["green"],
  problem: ["bgRed", "bold"]
}

/** The line as the terminal wants it, cut at its right edge. `styleText` heeds NO_COLOR and where the output goes. */
const styled = (line: Line, columns: number): string => {
  let left = columns
  return line.map(([text, ...style]) => {
    const characters = [...text].slice(0, Math.max(0, left))
    left -= characters.length
    const shown = characters.join("")
    return style.length === 0 || shown === "" ? shown : styleText(style, shown)
  }).join("")
}
