/**
 * How the work IDs of a pool stand, as its status tells it: from what was read
 * of them last, and from what this process does about them.
 */

import * as Option from "effect/Option"
import type { Status } from "../Pool.ts"
import type { Known } from "./keys.ts"
import type { Standing } from "./plan.ts"
import * as Quarantine from "./quarantine.ts"
import type { Run } from "./runs.ts"
import { beganAt } from "./term.ts"

/** How a work ID stood when it was read last. */
export interface View extends Known {
  readonly standing: Standing
  readonly termsWithoutProgress: number
}

export const statusOf = (
  { key, workId }: Known,
  view: View | undefined,
  run: Run | undefined,
  holderId: string
): Status => {
  const termsWithoutProgress = view?.termsWithoutProgress ?? 0
  const status = (
    state: Status["state"],
    holder?: { readonly holderId: string; readonly fencingToken: bigint },
    why?: string
  ): Status => ({
    key,
    workId,
    state,
    holderId: Option.fromUndefinedOr(holder?.holderId),
    since: Option.map(Option.fromUndefinedOr(holder), ({ fencingToken }) => beganAt(fencingToken)),
    termsWithoutProgress,
    why: Option.fromUndefinedOr(why)
  })
  if (run?.term !== undefined) return status(run.isYielding ? "yielding" : "running", run.term)
  const standing = view?.standing
  switch (standing?._tag) {
    case "Held":
      // Its own has ended since.
      return standing.holderId === holderId ? status("waiting") : status("running", standing)
    case "Free":
      return status(standing.hasFinished && standing.after > 0 ? "idle" : "waiting")
    case "Idle":
      return status("idle")
    case "Finished":
      return status("finished")
    case "Retired":
      return status("retired")
    case "Quarantined":
      return status(
        "quarantined",
        undefined,
        Quarantine.whyOf(termsWithoutProgress, standing.exit, standing.lastHolderId)
      )
    case undefined:
      return status("waiting")
  }
}

export const isSame = (before: ReadonlyArray<Status>, after: ReadonlyArray<Status>): boolean =>
  before.length === after.length && before.every((a, index) => {
    const b = after[index]
    return a.workId === b.workId && a.state === b.state && a.termsWithoutProgress === b.termsWithoutProgress &&
      Option.getOrUndefined(a.holderId) === Option.getOrUndefined(b.holderId) &&
      Option.getOrUndefined(a.since) === Option.getOrUndefined(b.since) &&
      Option.getOrUndefined(a.why) === Option.getOrUndefined(b.why)
  })
