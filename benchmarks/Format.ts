/**
 * How numbers are written.
 */
import type { Spread } from "./Statistics.ts"

type Format = (value: number) => string

const digits = (value: number): number => value < 10 ? 2 : value < 100 ? 1 : 0

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 })

export const count: Format = (value) => grouped.format(value)

/** Three significant digits, thousands as `k`. */
export const rate: Format = (value) =>
  value >= 1000 ? `${(value / 1000).toFixed(digits(value / 1000))}k/s` : `${value.toFixed(digits(value))}/s`

export const millis: Format = (value) => `${value.toFixed(value < 0 ? 2 : digits(value))} ms`

export const ratio: Format = (value) => `${value.toFixed(digits(value))}×`

export const percent: Format = (value) => `${value.toFixed(digits(value))} %`

/** In decimal units, as the targets are. */
export const bytes: Format = (value) =>
  value < 1000
    ? `${Math.round(value)} B`
    : value < 1_000_000
    ? `${(value / 1000).toFixed(digits(value / 1000))} kB`
    : value < 1_000_000_000
    ? `${(value / 1_000_000).toFixed(digits(value / 1_000_000))} MB`
    : `${(value / 1_000_000_000).toFixed(digits(value / 1_000_000_000))} GB`

export const seconds: Format = (value) => `${Number(value.toFixed(value < 10 ? 1 : 0))} s`

/** `1:05`, for a time that passes. */
export const elapsed: Format = (millis) => {
  const whole = Math.floor(millis / 1000)
  return `${Math.floor(whole / 60)}:${String(whole % 60).padStart(2, "0")}`
}

/** The median, and from where to where the rounds reached. One round has no spread. */
export const spread = (format: Format, { max, median, min }: Spread): string =>
  min === max ? format(median) : `${format(median)} (${range(format, min, max)})`

const range = (format: Format, min: number, max: number): string => {
  const [from, to] = [format(min), format(max)]
  const unit = /[^\d.,-].*$/.exec(to)?.[0] ?? ""
  return unit !== "" && from.endsWith(unit) ? `${from.slice(0, -unit.length)}–${to}` : `${from}–${to}`
}

export const plural = (value: number, noun: string): string =>
  `${count(value)} ${noun}${value === 1 ? "" : noun.endsWith("s") || noun.endsWith("ch") ? "es" : "s"}`
