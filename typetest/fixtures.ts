/** Works, errors and services that the type tests share. */
import { Context, Effect, Schema, SchemaGetter } from "effect"
import { Checkpoint, Work } from "worklease"

export class Dec extends Context.Service<Dec, { readonly d: string }>()("typetest/Dec") {}

export class Enc extends Context.Service<Enc, { readonly e: string }>()("typetest/Enc") {}

/** Its codec needs services, and other ones each way. */
export const Secret = Schema.String.pipe(Schema.decodeTo(Schema.String, {
  decode: SchemaGetter.transformEffect((s: string) => Effect.map(Dec, (_) => s + _.d)),
  encode: SchemaGetter.transformEffect((s: string) => Effect.map(Enc, (_) => s + _.e))
}))

export const V1 = Schema.Struct({ completed: Schema.Array(Schema.String) })

export const V2 = Schema.Struct({ completed: Schema.Array(Schema.String), secret: Secret })

export type State = typeof V2["Type"]

export const Progress = Checkpoint.make(V1).pipe(
  Checkpoint.upgrade(V2, (v1) => ({ ...v1, secret: v1.completed.join() }))
)

/** Has checkpoints. */
export const W = Work.make("w", Progress)

/** Has none. */
export const Plain = Work.make("plain")

export class MyErr extends Schema.TaggedError<MyErr>()("MyErr", {}) {}

export class Svc extends Context.Service<Svc, { readonly go: Effect.Effect<number, MyErr> }>()("typetest/Svc") {}
