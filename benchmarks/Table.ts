/**
 * Tables: with lines of text for the terminal, and for Markdown.
 */

export interface Column {
  readonly title: string
  readonly align?: "left" | "right"
  /** The most characters in one line of a cell, in the terminal. Longer text continues below. */
  readonly width?: number
}

/** One table as lines of text. A rule is drawn above each row whose first cell is not empty. */
export const text = (columns: ReadonlyArray<Column>, rows: ReadonlyArray<ReadonlyArray<string>>): string => {
  const cells = [columns.map(({ title }) => title), ...rows].map((row) =>
    columns.map(({ width }, index) => wrap(row[index] ?? "", width ?? Infinity))
  )
  const widths = columns.map((_, index) => Math.max(...cells.flatMap((row) => row[index].map(({ length }) => length))))
  const rule = widths.map((width) => "─".repeat(width)).join("──")
  const lines = cells.flatMap((row, number) => {
    const height = Math.max(...row.map(({ length }) => length))
    const lines = Array.from({ length: height }, (_, line) =>
      widths.map((width, index) => {
        const cell = row[index][line] ?? ""
        return columns[index].align === "right" ? cell.padStart(width) : cell.padEnd(width)
      }).join("  ").trimEnd())
    return number > 0 && (number === 1 || rows[number - 1][0] !== "") ? [rule, ...lines] : lines
  })
  return lines.join("\n")
}

export const markdown = (columns: ReadonlyArray<Column>, rows: ReadonlyArray<ReadonlyArray<string>>): string =>
  [
    columns.map(({ title }) => title),
    columns.map(({ align }) => align === "right" ? "--:" : "---"),
    ...rows.map((row) => columns.map((_, index) => escaped(row[index] ?? "")))
  ].map((cells) => `| ${cells.join(" | ")} |`).join("\n")

const escaped = (cell: string): string =>
  cell.replaceAll("\\", "\\\\").replaceAll("|", "\\|").replaceAll("<", "&lt;").replaceAll("\n", "<br>")

const wrap = (text: string, width: number): ReadonlyArray<string> => {
  const lines: Array<string> = []
  for (const paragraph of text.split("\n")) {
    let line = ""
    for (const word of paragraph.split(" ")) {
      if (line !== "" && line.length + 1 + word.length > width) {
        lines.push(line)
        line = word
      } else {
        line = line === "" ? word : `${line} ${word}`
      }
    }
    lines.push(line)
  }
  return lines
}
