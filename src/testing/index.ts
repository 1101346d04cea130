/**
 * What users need to test their own code, and their own backends.
 *
 * @since 0.1.0
 */
export * as TestBackend from "./TestBackend.ts"
