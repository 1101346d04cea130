/**
 * The contract suite: what every backend has to do, as tests.
 *
 * Write a backend, and call `suite` in a test file of it. The suite has two
 * parts. The first goes through `Backend` itself: every invariant that shows
 * there, and every cell of the semantics table. The second goes through
 * `Lease` and `Worker` over the backend, as an application does.
 *
 * It needs `vitest` and `@effect/vitest`, which is why `worklease/testing`
 * does not export it again: import it from `worklease/testing/BackendContract`.
 *
 * **Details**
 *
 * Groups name the invariants that they are about. Tests run one after the
 * other, over one build of the layer, under
 * `TestClock`. Each uses work IDs of its own. What a test needs beyond the
 * backend itself is an option, and without that option it is left out.
 *
 * **Example** (The suite over the memory backend)
 *
 * ```ts
 * import { Effect } from "effect"
 * import * as Memory from "worklease/layers/Memory"
 * import * as BackendContract from "worklease/testing/BackendContract"
 *
 * BackendContract.suite("Memory", {
 *   layer: Memory.layer,
 *   // Its clock is Effect's, which the suite moves itself.
 *   advance: () => Effect.void,
 *   standsStill: true
 * })
 * ```
 *
 * @stability unstable
 * @since 0.1.0
 */

import { describe, it } from "@effect/vitest"
import type * as Duration from "effect/Duration"
import type * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import type * as Scope from "effect/Scope"
import type * as Backend from "../Backend.ts"
import * as Leases from "./internal/leases.ts"
import { makeRules, storeLayer } from "./internal/rules.ts"
import * as StoragePort from "./internal/storagePort.ts"

/**
 * The backend under test, and what the suite may do to its store.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options<R = never, E = never> {
  /** The backend, over a store that nothing else uses meanwhile. */
  readonly layer: Layer.Layer<Backend.Backend | R, E>

  /**
   * Moves the store's clock on, relative to what it stores: either the clock
   * itself, or every stored time the other way. A backend on Effect's Clock has
   * nothing to do here, because the suite moves that too.
   *
   * Without it, the suite really waits. It then takes minutes rather than
   * seconds, wants a short `ttl`, and leaves out what takes hours.
   */
  readonly advance?: ((duration: Duration.Duration) => Effect.Effect<unknown, unknown, Backend.Backend | R>) | undefined

  /** Whether the store's clock moves by `advance` only, so that instants can be tested. Defaults to `false`. */
  readonly standsStill?: boolean | undefined

  /** Sets the store's clock back, and leaves what it stores as it is. */
  readonly setBack?: ((duration: Duration.Duration) => Effect.Effect<unknown, unknown, Backend.Backend | R>) | undefined

  /** Raises the stored fencing token of a work ID that is free to a larger one. */
  readonly raiseToken?:
    | ((workId: string, fencingToken: bigint) => Effect.Effect<unknown, unknown, Backend.Backend | R>)
    | undefined

  /** Has somebody else lock what is stored for a work ID, for as long as the scope is open. */
  readonly lock?: ((workId: string) => Effect.Effect<unknown, unknown, Backend.Backend | R | Scope.Scope>) | undefined

  /** How long the leases of the suite last. Defaults to 30 seconds, or to 1 second where the suite really waits. */
  readonly ttl?: Duration.Input | undefined
}

/**
 * Defines the tests of a backend. Call it at the top level of a test file.
 *
 * @category constructors
 * @since 0.1.0
 */
export const suite = <R, E>(name: string, options: Options<R, E>): void => {
  it.layer(Layer.provideMerge(storeLayer(options), options.layer), { timeout: "2 minutes" })(name, (it) => {
    const rules = makeRules(it, options)
    describe("The storage port", () => {
      describe("taking a lease (I1, I10)", () => StoragePort.taking(rules))
      describe("fencing tokens (I2)", () => StoragePort.fencingTokens(rules))
      describe("attempts (I9)", () => StoragePort.attempts(rules))
      describe("operations of a term (I3)", () => StoragePort.operationsOfTerm(rules))
      describe("what the operations of a term do", () => StoragePort.effectsOfOperations(rules))
      describe("checkpoints (I4)", () => StoragePort.checkpoints(rules))
      describe("releases (I5, I9)", () => StoragePort.releases(rules))
      describe("giving back (I6)", () => StoragePort.givingBack(rules))
      describe("forgetting", () => StoragePort.forgetting(rules))
      describe("the prior (I6)", () => StoragePort.priors(rules))
      describe("terms without progress", () => StoragePort.termsWithoutProgress(rules))
      describe("quarantines", () => StoragePort.quarantines(rules))
      describe("lifts", () => StoragePort.lifts(rules))
      describe("requests to yield", () => StoragePort.yieldRequests(rules))
      describe("batches", () => StoragePort.batches(rules))
      describe("names and bytes", () => StoragePort.namesAndBytes(rules))
      describe("lists", () => StoragePort.lists(rules))
      if (options.advance !== undefined) {
        describe("sweeps (I2)", () => StoragePort.sweeps(rules))
      }
      describe("wake-ups", () => StoragePort.wakeups(rules))
      if (options.lock !== undefined) {
        describe("rows that somebody else has locked (I10)", () => StoragePort.locks(rules))
      }
    })
    describe("Leases over it", () => {
      describe("acquire", () => Leases.acquires(rules))
      describe("operations on a token", () => Leases.operationsOnToken(rules))
      describe("how work ends", () => Leases.outcomes(rules))
      describe("how a lease is lost", () => Leases.losses(rules))
      describe("handing over on request", () => Leases.handovers(rules))
      describe("quarantine", () => Leases.quarantine(rules))
      describe("states", () => Leases.states(rules))
    })
  })
}
