/**
 * Work that changes hands without losing its place.
 *
 * @since 0.1.0
 */

export * as Backend from "./Backend.ts"
export * as Checkpoint from "./Checkpoint.ts"
export * as Fence from "./Fence.ts"
export * as Leader from "./Leader.ts"
export * as Lease from "./Lease.ts"
export * as LeaseError from "./LeaseError.ts"
export * as Pool from "./Pool.ts"
export * as Renewal from "./Renewal.ts"
export * as Work from "./Work.ts"
export * as Worker from "./Worker.ts"
