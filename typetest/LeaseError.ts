import { type Duration, Effect } from "effect"
import { Lease, type Lease as LeaseNs } from "worklease"
import type * as Err from "worklease/LeaseError"
import { check, type E, type Same } from "./assert.ts"
import { type MyErr } from "./fixtures.ts"

declare const body: Effect.Effect<bigint, MyErr, LeaseNs.CurrentLease>
const l1 = body.pipe(Lease.withLease("a"))

// ---- catchReason on a loss does not narrow; unwrapReason gives the three flat tags
const c1 = l1.pipe(Effect.catchReason("LeaseLost", "Fenced", (reason, error) => {
  check<Same<typeof reason, Err.Fenced>>()
  check<Same<typeof error["workId"], string>>()
  return Effect.succeed(0n)
}))
check<Same<E<typeof c1>, E<typeof l1>>>()
const c2 = l1.pipe(Effect.unwrapReason("LeaseLost"))
check<
  Same<
    E<typeof c2>,
    | MyErr
    | Err.LeaseHeld
    | Err.Quarantined
    | Err.InvalidWorkId
    | Err.Fenced
    | Err.LeaseExpired
    | Err.WindowExhausted
    | Err.BackendError
  >
>()
const c3 = l1.pipe(Effect.catchTag("LeaseHeld", (error) => {
  check<Same<typeof error.retryAfter, Duration.Duration>>()
  check<Same<typeof error.holderId, string | undefined>>()
  return Effect.sleep(error.retryAfter)
}))
check<Same<E<typeof c3>, MyErr | Err.Quarantined | Err.InvalidWorkId | Err.LeaseLost | Err.BackendError>>()
const c4 = l1.pipe(
  Effect.catchReason(
    "BackendError",
    "PermissionDenied",
    () => Effect.succeed(0n),
    (_other, error) => Effect.fail(error)
  )
)
// With a handler for the others, it does narrow.
check<
  Same<
    Extract<E<typeof c4>, { readonly _tag: "BackendError" }>["reason"]["_tag"],
    "Unreachable" | "TimedOut" | "SchemaOutdated" | "TokenExhausted" | "Other"
  >
>()

declare const backendError: Err.BackendError
check<Same<typeof backendError.outcome, "rejected" | "unknown">>()
check<
  Same<
    typeof backendError.reason["_tag"],
    "Unreachable" | "TimedOut" | "SchemaOutdated" | "PermissionDenied" | "TokenExhausted" | "Other"
  >
>()
