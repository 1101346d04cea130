import type { Config, Duration, Effect } from "effect"
import { Renewal } from "worklease"
import type * as Err from "worklease/LeaseError"
import { check, type Same } from "./assert.ts"

const made = Renewal.make({ ttl: "5 minutes", renewEvery: 1000 })
check<Same<typeof made, Effect.Effect<Renewal.Policy, Err.InvalidConfig>>>()
const unsafe = Renewal.makeUnsafe()
check<Same<typeof unsafe, Renewal.Policy>>()
check<Same<typeof unsafe.ttl, Duration.Duration>>()
const config = Renewal.config()
check<Same<typeof config, Config.Config<Renewal.Policy>>>()
// @ts-expect-error  a policy comes from its constructors, which validate it
const policy: Renewal.Policy = {
  ttl: unsafe.ttl,
  renewEvery: unsafe.ttl,
  safetyMargin: unsafe.ttl,
  operationTimeout: unsafe.ttl
}
void policy
