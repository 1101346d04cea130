/**
 * The rules for work IDs and holder IDs: 1 to 512 UTF-8 bytes, no NUL, no lone
 * surrogate. Stores order them by their bytes.
 */

import * as Effect from "effect/Effect"
import { InvalidWorkId } from "../LeaseError.ts"
import type * as Work from "../Work.ts"

export const workIdOf = (work: Work.Input): string => typeof work === "string" ? work : work.value

export const validate = (work: Work.Input): Effect.Effect<string, InvalidWorkId> => {
  const workId = workIdOf(work)
  const why = faultOf(workId)
  return why === undefined ? Effect.succeed(workId) : Effect.fail(new InvalidWorkId({ workId, why }))
}

export const maxIdBytes = 512

const utf8Encoder = new TextEncoder()

/** What is wrong with a work ID or a holder ID, if anything is. */
export const faultOf = (id: string): InvalidWorkId["why"] | undefined => {
  if (id.length === 0) return "Empty"
  if (id.includes("\0")) return "ContainsNul"
  if (/\p{Surrogate}/u.test(id)) return "LoneSurrogate"
  // A UTF-16 unit is one to three UTF-8 bytes.
  if (id.length > maxIdBytes) return "TooLong"
  return 3 * id.length > maxIdBytes && utf8Encoder.encode(id).byteLength > maxIdBytes ? "TooLong" : undefined
}

/** Where a code unit of UTF-16 comes among others as UTF-8 orders them: surrogates come last. */
const rank = (unit: number): number => unit < 0xd800 ? unit : unit < 0xe000 ? unit + 0x2000 : unit - 0x800

/** Orders as the bytes of UTF-8 would, without encoding: there may be many to sort. */
export const compareBytes = (a: string, b: string): number => {
  const length = Math.min(a.length, b.length)
  for (let i = 0; i < length; i++) {
    const [left, right] = [a.charCodeAt(i), b.charCodeAt(i)]
    if (left !== right) return rank(left) - rank(right)
  }
  return a.length - b.length
}
