/** What the compiler has to say of the first screen of README.md: its hidden prelude asks for `true` five times. */
import type { Config } from "effect"
import type { SqlError } from "effect/sql/SqlError"
import type { Lease, LeaseError } from "worklease"
import type { A, E, R, Same } from "./assert.ts"

export type FirstScreen<Onboard, WorkleaseLayer, StepError> = [
  Same<A<Onboard>, void>,
  Same<
    E<Onboard>,
    | StepError
    | LeaseError.LeaseHeld
    | LeaseError.Quarantined
    | LeaseError.InvalidWorkId
    | LeaseError.LeaseLost
    | LeaseError.Yielded
    | LeaseError.CheckpointDecodeError
    | LeaseError.CheckpointEncodeError
    | LeaseError.CheckpointTooLarge
    | LeaseError.BackendError
  >,
  Same<R<Onboard>, Lease.Leases>,
  Same<E<WorkleaseLayer>, LeaseError.BackendError | Config.ConfigError | SqlError>,
  Same<R<WorkleaseLayer>, never>
]
