/**
 * Options that are refused at the door, by their names.
 */

import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Option from "effect/Option"
import { InvalidConfig } from "../LeaseError.ts"
import { faultOf, maxIdBytes } from "./workId.ts"

/** Whether an option can name a process, as a holder ID does. */
export const validateId = (field: string, id: string): Effect.Effect<void, InvalidConfig> =>
  faultOf(id) === undefined ? Effect.void : Effect.fail(
    new InvalidConfig({ field, why: `it must be 1 to ${maxIdBytes} UTF-8 bytes, without NUL and lone surrogates` })
  )

/** The milliseconds of a positive duration. */
export const positiveMillis = (
  field: string,
  input: Duration.Input,
  isFinite = true
): Effect.Effect<number, InvalidConfig> => {
  const millis = Option.match(Duration.fromInput(input), { onNone: () => NaN, onSome: Duration.toMillis })
  return millis > 0 && (Number.isFinite(millis) || !isFinite) ? Effect.succeed(millis) : Effect.fail(
    new InvalidConfig({ field, why: `it must be a positive${isFinite ? " and finite" : ""} duration` })
  )
}
