import { Schema } from "effect"
import { Checkpoint, type Work } from "worklease"
import type * as Err from "worklease/LeaseError"
import { check, type E, type R, type Same } from "./assert.ts"
import { type Dec, type Enc, Plain, Progress, type State, V1, type V2, W } from "./fixtures.ts"

check<Same<typeof V2["DecodingServices"], Dec>>()
check<Same<typeof V2["EncodingServices"], Enc>>()
check<Same<typeof Progress, Checkpoint.Checkpoint<State, Dec, Enc>>>()

// ---- make, bytes, upgrade
const made = Checkpoint.make(V1, { version: 2, maxBytes: 1024 })
check<Same<typeof made, Checkpoint.Checkpoint<typeof V1["Type"]>>>()
const raw = Checkpoint.bytes()
check<Same<typeof raw, Checkpoint.Checkpoint<Uint8Array>>>()
const dataFirst = Checkpoint.upgrade(made, Schema.Struct({ done: Schema.Int }), (v1) => ({ done: v1.completed.length }))
check<Same<typeof dataFirst, Checkpoint.Checkpoint<{ readonly done: number }>>>()
// @ts-expect-error  the migration has to make what the schema says
Checkpoint.upgrade(made, Schema.Struct({ done: Schema.Int }), (v1) => ({ done: v1.completed }))
// @ts-expect-error  and gets what the version before held
Checkpoint.upgrade(made, Schema.Struct({ done: Schema.Int }), (v1) => ({ done: v1.offset }))

// ---- decoding and encoding need their own services only
const decoding = Progress.decode("w:a", { version: 1, bytes: new Uint8Array() })
check<Same<R<typeof decoding>, Dec>>()
check<Same<E<typeof decoding>, Err.CheckpointDecodeError>>()
const encoding = Progress.encode("w:a", { completed: [], secret: "" })
check<Same<R<typeof encoding>, Enc>>()
check<Same<E<typeof encoding>, Err.CheckpointEncodeError | Err.CheckpointTooLarge>>()

// ---- what a work carries in its type
check<Same<typeof W, Work.Work<State, Dec, Enc>>>()
const id = W.id("a")
check<Same<typeof id, Work.WorkId<State, Dec, Enc>>>()
check<Same<Work.State<typeof W>, State>>()
check<Same<Work.State<typeof id>, State>>()
check<Same<Work.Services<typeof id>, Dec | Enc>>()
check<Same<Work.DecodingServices<typeof id>, Dec>>()
check<Same<Work.DecodeError<typeof id>, Err.CheckpointDecodeError>>()
check<Same<Work.State<typeof Plain>, never>>()
check<Same<Work.State<"plain:x">, never>>()
check<Same<Work.DecodeError<"plain:x">, never>>()
check<Same<Work.Services<"plain:x">, never>>()

// any work, and any work ID, is accepted where its state does not matter
const anyWork: Work.Any = W
const anyId: Work.AnyId = id
const inputs: ReadonlyArray<Work.Input> = ["plain:x", id, Plain.id("x")]
const anyCheckpoint: Checkpoint.Any = Progress
void anyWork
void anyId
void inputs
void anyCheckpoint
// @ts-expect-error  what is written cannot be read as something else
const other: Work.WorkId<{ readonly completed: ReadonlyArray<number>; readonly secret: string }, Dec, Enc> = id
void other
