/**
 * Quarantine: work that has made no progress for too many terms is not taken
 * any more, and whoever wants it is told why.
 */

import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import type * as Backend from "../Backend.ts"
import { InvalidConfig, Quarantined } from "../LeaseError.ts"

/** A mistake of the program, as a duration is that is none. */
export const validate = (terms: number | undefined): Effect.Effect<Option.Option<number>> =>
  terms === undefined || (Number.isSafeInteger(terms) && terms > 0)
    ? Effect.succeed(Option.fromUndefinedOr(terms))
    : Effect.die(
      new InvalidConfig({ field: "quarantineAfter", why: `it must be a positive integer, not ${terms}` })
    )

export const errorOf = (
  workId: string,
  { exit, holderId, termsWithoutProgress }: Extract<Backend.AcquireReply, { readonly _tag: "Quarantined" }>
): Quarantined =>
  new Quarantined({
    workId,
    termsWithoutProgress,
    exit,
    holderId,
    why: whyOf(termsWithoutProgress, exit, holderId)
  })

export const whyOf = (termsWithoutProgress: number, exit: string, holderId: string): string =>
  (termsWithoutProgress === 1
    ? "a term has ended without a new checkpoint"
    : `${termsWithoutProgress} terms in a row have ended without a new checkpoint`) +
  `; the last one ended as ${exit}, held by ${JSON.stringify(holderId)}`
