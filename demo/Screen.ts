/**
 * The picture of an import: its parts, and the workers.
 */
import { count, plural, seconds } from "./Format.ts"
import { importedOf, type Part, type Run, type Worker } from "./Run.ts"
import { colours, hasColours, type Line, type Piece, show as showIn, type Style, timed } from "./Terminal.ts"

/** Shows the run until the scope is closed. */
export const show = (run: Run) =>
  showIn(run, { lines: (columns) => pictureOf(run, columns), summary: () => summaryOf(run) })

const pictureOf = (run: Run, columns: number): ReadonlyArray<Line> => [
  [],
  ...run.parts.map((part) => partLine(part, columns)),
  [],
  workersLine(run),
  timed(run.now, summaryOf(run))
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

const colourOf = (worker: Worker): Style => colours[(worker.number - 1) % colours.length]

const styleOf = (worker: Worker): ReadonlyArray<Style> =>
  worker.state === "killed"
    ? ["red"]
    : worker.state === "frozen"
    ? ["inverse", colourOf(worker)]
    : ["bold", colourOf(worker)]

const summaryOf = (run: Run): Line => [
  [`${Math.floor(100 * run.imported / run.total)} %`.padEnd(6), "bold"],
  [
    `${count(run.imported)} records, ${plural(run.kills.length, "kill")}, ${plural(run.gaps.length, "takeover")}` +
    (run.gaps.length === 0 ? "" : `, longest gap ${seconds(Math.max(...run.gaps))}`)
  ]
]
