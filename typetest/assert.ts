/** What the type tests assert with. They are compiled, and never run. */
import type { Effect, Layer } from "effect"

export type IsAny<T> = 0 extends 1 & T ? true : false

/** Compares unions as sets: each side has to be assignable to the other, and neither may be `any`. */
export type Same<A, B> = IsAny<A> extends true ? false
  : IsAny<B> extends true ? false
  : [A] extends [B] ? [B] extends [A] ? true : { missing: Exclude<B, A> }
  : { extra: Exclude<A, B>; missing: Exclude<B, A> }

export declare const check: <T extends true>() => T

/** What an effect succeeds with. */
export type A<T> = T extends Effect.Effect<infer X, infer _E, infer _R> ? X : never

/** What an effect or a layer fails with. */
export type E<T> = T extends Effect.Effect<infer _A, infer X, infer _R> ? X
  : T extends Layer.Layer<infer _A, infer X, infer _R> ? X
  : never

/** What an effect or a layer needs. */
export type R<T> = T extends Effect.Effect<infer _A, infer _E, infer X> ? X
  : T extends Layer.Layer<infer _A, infer _E, infer X> ? X
  : never
