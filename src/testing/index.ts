/**
 * What users need to test their own code.
 *
 * To test one's own backend, import the contract suite by itself, from
 * `worklease/testing/BackendContract`: it needs `vitest` and `@effect/vitest`,
 * and nothing here does.
 *
 * @since 0.1.0
 */

export * as TestBackend from "./TestBackend.ts"
