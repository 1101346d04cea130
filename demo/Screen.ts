/**
 * Shows a run: in a terminal, events that scroll by above a live picture of
 * the parts and the workers; elsewhere, plain lines.
 */
import { Effect, Schedule } from "effect"
import { styleText } from "node:util"
import { count, type Event, importedOf, type Part, plural, type Run, seconds, type Worker } from "./Run.ts"

/** Prints lines that stay. */
export const print = (lines: ReadonlyArray<Line>): Effect.Effect<void> =>
  Effect.sync(() => write(lines.map((line) => `${styled(line, Infinity)}\n`).join("")))

/** A piece of text, and how it looks. */
export type Piece = readonly [text: string, ...style: ReadonlyArray<Style>]

export type Line = ReadonlyArray<Piece>

type Style = Extract<Parameters<typeof styleText>[0], string>

/** Shows the run until the scope is closed. */
export const show = (run: Run) => isLive() ? live(run) : plain(run)

const isLive = (): boolean => process.stdout.isTTY && process.env.TERM !== "dumb"

const write = (text: string): void => {
  process.stdout.write(text)
}

// -----------------------------------------------------------------------------
// plain lines
// -----------------------------------------------------------------------------

const plain = Effect.fnUntraced(function*(run: Run) {
  let shown = 0
  let summaryAt = 0
  const lines = Effect.sync(() => {
    const fresh: Array<Line> = run.events.slice(shown).map(eventLine)
    shown = run.events.length
    if (run.now >= summaryAt) {
      fresh.push(summaryLine(run))
      summaryAt = run.now + 2000
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

const live = Effect.fnUntraced(function*(run: Run) {
  let shown = 0
  let height = 0
  let resized = false
  const frame = Effect.sync(() => {
    const { columns = 80, rows = 24 } = process.stdout
    const picture = pictureOf(run, columns).slice(0, rows - 1)
    // What was on the screen is lost with its size.
    if (resized) shown = Math.max(0, run.events.length - Math.max(0, rows - 1 - picture.length))
    const lines = [...run.events.slice(shown).map(eventLine), ...picture]
    write(
      escape.beginFrame + (resized ? escape.eraseAll : escape.up(height)) +
        lines.map((line) => `${styled(line, columns)}${escape.eraseLine}\n`).join("") +
        escape.eraseBelow + escape.endFrame
    )
    shown = run.events.length
    height = picture.length
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

const pictureOf = (run: Run, columns: number): ReadonlyArray<Line> => [
  [],
  ...run.parts.map((part) => partLine(part, columns)),
  [],
  workersLine(run),
  summaryLine(run)
]

const partLine = (part: Part, columns: number): Line => {
  const term = part.terms.at(-1)
  const imported = importedOf(part)
  const cells = Math.max(10, Math.min(72, columns - 56))
  const city = part.cities[Math.max(0, imported - 1)]
  return [
    [` ${part.workId}  `],
    term === undefined
      ? ["     "]
      : [`${term.worker.holderId}${markOf(term.worker, part)}`.padEnd(5), ...styleOf(term.worker)],
    ...barOf(part, cells),
    [` ${count(imported).padStart(6)}`],
    [` of ${count(part.cities.length)} `, "dim"],
    part.finished ? ["finished", "green"] : [imported === 0 ? "" : `${city.country} ${city.name}`, "dim"]
  ]
}

const markOf = (worker: Worker, part: Part): string =>
  part.finished ? "" : worker.state === "killed" ? "✗" : worker.state === "frozen" ? "‖" : ""

const hasColours = styleText("red", " ") !== " "

/** Each stretch in the colour of the worker that wrote it, or, without colours, set off from the one before. */
const barOf = (part: Part, cells: number): Line =>
  Array.from({ length: cells }, (_, cell): Piece => {
    const record = (cell + 0.5) * part.cities.length / cells
    // The last one that says so: without a fence, there may be several.
    const index = part.terms.reduce((last, term, index) => term.from <= record && record < term.next ? index : last, -1)
    return index < 0 ? ["░", "dim"] : [hasColours || index % 2 === 0 ? "█" : "▓", colourOf(part.terms[index].worker)]
  })

const workersLine = (run: Run): Line => {
  const present = run.workers.filter((worker) => worker.state !== "killed")
  return [
    [" workers    "],
    ...present.flatMap((worker): Line => [
      [worker.holderId, ...styleOf(worker)],
      [` ${stateOf(run, worker)}  `]
    ]),
    run.kills.length === 0 ? [""] : [run.kills.map((worker) => `${worker.holderId}✗`).join(" "), "red"]
  ]
}

const stateOf = (run: Run, worker: Worker): string => {
  if (worker.state === "starting") return "starts"
  if (worker.state === "frozen") return `frozen ${seconds(run.now - worker.frozenAt)}`
  if (worker.state === "woken") return "wakes up"
  if (worker.state === "ended") return "done"
  const held = run.heldBy(worker).length
  return held === 0 ? "waits" : "▪".repeat(held)
}

const colours = ["cyan", "magenta", "yellow", "blue", "green", "white"] as const

const colourOf = (worker: Worker): Style => colours[(worker.number - 1) % colours.length]

const styleOf = (worker: Worker): ReadonlyArray<Style> =>
  worker.state === "killed"
    ? ["red"]
    : worker.state === "frozen"
    ? ["inverse", colourOf(worker)]
    : ["bold", colourOf(worker)]

// -----------------------------------------------------------------------------
// both
// -----------------------------------------------------------------------------

const eventLine = ({ at, kind, text }: Event): Line => [
  [`${seconds(at).padStart(7)}  `, "dim"],
  [text, ...eventStyles[kind]]
]

const eventStyles: Record<Event["kind"], ReadonlyArray<Style>> = {
  plain: [],
  kill: ["red"],
  freeze: ["cyan", "bold"],
  takeover: ["yellow"],
  finish: ["green"],
  problem: ["bgRed", "bold"]
}

const summaryLine = (run: Run): Line => [
  [`${seconds(run.now).padStart(7)}  `, "dim"],
  [`${Math.floor(100 * run.imported / run.total)} %`.padEnd(6), "bold"],
  [
    `${count(run.imported)} records, ${plural(run.kills.length, "kill")}, ${plural(run.gaps.length, "takeover")}` +
    (run.gaps.length === 0 ? "" : `, longest gap ${seconds(Math.max(...run.gaps))}`)
  ]
]

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
