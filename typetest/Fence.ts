import { Effect, Layer, Schema } from "effect"
import { SqlClient } from "effect/sql"
import type { SqlError } from "effect/sql/SqlError"
import { Checkpoint, Fence, Lease, Work, Worker } from "worklease"
import * as Memory from "worklease/layers/Memory"
import * as Pglite from "worklease/layers/Pglite"
import type * as Err from "worklease/LeaseError"
import { TestBackend } from "worklease/testing"
import { type A, check, type E, type R, type Same } from "./assert.ts"

const Import = Work.make("import", Checkpoint.make(Schema.Struct({ line: Schema.Int })))

declare const token: Lease.Token<{ readonly line: number }>
declare const held: Lease.Lease<{ readonly line: number }>
declare const body: Effect.Effect<string, SqlError, SqlClient.SqlClient>

// ---- under a held lease, a loss is no error inside the work; with a token it is typed
const underLease = Fence.transaction(body, held)
check<Same<A<typeof underLease>, string>>()
check<Same<E<typeof underLease>, SqlError | Err.BackendError>>()
check<Same<R<typeof underLease>, SqlClient.SqlClient | Fence.Fence>>()
const withToken = Fence.transaction(body, token)
check<Same<E<typeof withToken>, SqlError | Err.BackendError | Err.Fenced | Err.LeaseExpired>>()

// ---- the other way round
const piped = body.pipe(Fence.transaction(held))
check<Same<typeof piped, typeof underLease>>()
const pipedToken = body.pipe(Fence.transaction(token))
check<Same<typeof pipedToken, typeof withToken>>()

// ---- the lease around may be any
const current = Effect.flatMap(Lease.CurrentLease, (lease) => Fence.transaction(body, lease))
check<Same<E<typeof current>, SqlError | Err.BackendError>>()
check<Same<R<typeof current>, SqlClient.SqlClient | Fence.Fence | Lease.CurrentLease>>()

// ---- it takes nothing else
// @ts-expect-error not a lease
export const notALease = Fence.transaction(body, "import:a")
// @ts-expect-error a look-alike is no token
export const notAToken = Fence.transaction(body, { workId: "import:a", holderId: "a", fencingToken: 1n, expiresAt: 0 })

// ---- a fenced program runs over a backend with transactions, and does not compile over one without
const program = Worker.run(Import.id("a"), (work) =>
  Effect.gen(function*() {
    const sql = yield* SqlClient.SqlClient
    yield* Effect.andThen(sql`SELECT 1`, work.checkpoint({ line: 1 })).pipe(Fence.transaction(work))
  }))
check<Same<R<typeof program>, Lease.Leases | SqlClient.SqlClient | Fence.Fence>>()

const overPglite = Effect.provide(program, Lease.layer.pipe(Layer.provideMerge(Pglite.layer)))
check<Same<R<typeof overPglite>, never>>()

declare const client: Layer.Layer<SqlClient.SqlClient>
const overMemory = Effect.provide(program, Lease.layer.pipe(Layer.provide(Memory.layer), Layer.merge(client)))
check<Same<R<typeof overMemory>, Fence.Fence>>()
const overTestBackend = Effect.provide(program, Lease.layer.pipe(Layer.provide(TestBackend.layer), Layer.merge(client)))
check<Same<R<typeof overTestBackend>, Fence.Fence>>()
