/**
 * A chart of bars as SVG, which is readable on a light and on a dark page.
 */

export interface Bar {
  readonly label: string
  /** Zero or more. One that is not finite is drawn as none. */
  readonly value: number
  /** How the value is written beside the bar. */
  readonly text: string
  readonly kind: "ours" | "compared"
}

/** Bars that share one scale. */
export interface Panel {
  readonly title: string
  readonly bars: ReadonlyArray<Bar>
}

const width = 760
const margin = 20
const labelWidth = 250
const valueWidth = 90
const barHeight = 16
const step = 22
const titleHeight = 34

export const svg = (title: string, panels: ReadonlyArray<Panel>): string => {
  let y = margin + 22
  const parts: Array<string> = [
    `<text class="heading" x="${margin}" y="${margin + 6}">${escaped(title)}</text>`
  ]
  for (const panel of panels) {
    y += titleHeight
    parts.push(`<text class="title" x="${margin}" y="${y - 10}">${escaped(panel.title)}</text>`)
    const longest = Math.max(...panel.bars.map(({ value }) => finite(value)), Number.MIN_VALUE)
    for (const bar of panel.bars) {
      const length = Math.max(1, finite(bar.value) / longest * (width - 2 * margin - labelWidth - valueWidth))
      const x = margin + labelWidth
      parts.push(
        `<text class="label" x="${x - 8}" y="${y + 12}">${escaped(bar.label)}</text>`,
        `<rect class="${bar.kind}" x="${x}" y="${y}" width="${length.toFixed(1)}" height="${barHeight}" rx="2"/>`,
        `<text class="value" x="${(x + length + 6).toFixed(1)}" y="${y + 12}">${escaped(bar.text)}</text>`
      )
      y += step
    }
  }
  const height = y + margin - 4
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" role="img" aria-label="${
    escaped(title)
  }">
<style>
  text { font: 12px system-ui, sans-serif; fill: #24292f }
  .heading { font-size: 15px; font-weight: 600 }
  .title { font-weight: 600 }
  .label { text-anchor: end }
  .background { fill: #ffffff }
  .ours { fill: #0a7d6c }
  .compared { fill: #9aa4af }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 }
    .background { fill: #0d1117 }
    .ours { fill: #2fbfa7 }
    .compared { fill: #6e7781 }
  }
</style>
<rect class="background" width="${width}" height="${height}"/>
${parts.join("\n")}
</svg>
`
}

const finite = (value: number): number => Number.isFinite(value) ? Math.max(0, value) : 0

const escaped = (text: string): string =>
  text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll("\"", "&quot;")
