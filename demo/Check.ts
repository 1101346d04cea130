/**
 * What was written against the source.
 */
import { Effect } from "effect"
import type { City } from "./Cities.ts"
import * as Store from "./Store.ts"

/** Numbers of rows, and of records of the source. */
export interface Findings {
  readonly rows: number
  readonly missing: number
  readonly repeated: number
  readonly different: number
  /** Written under a fencing token after a later one had written. */
  readonly zombies: number
}

/** Reads the records in the order in which they were written, and compares each record with its source. */
export const check = Effect.fnUntraced(function*(parts: ReadonlyArray<ReadonlyArray<City>>) {
  const records = yield* Store.Records
  const findings = { rows: 0, missing: 0, repeated: 0, different: 0, zombies: 0 }
  for (const [part, cities] of parts.entries()) {
    const rows = yield* records.read(part)
    const times = cities.map(() => 0)
    let latest = 0n
    for (const row of rows) {
      const city = cities[row.record]
      if (city === undefined || fields.some((field) => row[field] !== city[field])) findings.different++
      if (city !== undefined) times[row.record]++
      if (row.token < latest) findings.zombies++
      else latest = row.token
    }
    findings.rows += rows.length
    findings.missing += times.filter((times) => times === 0).length
    findings.repeated += times.filter((times) => times > 1).length
  }
  return findings
})

const fields: ReadonlyArray<keyof City> = [
  "id",
  "name",
  "alternative",
  "country",
  "feature",
  "admin",
  "municipality",
  "district",
  "population",
  "longitude",
  "latitude"
]
