import { type Config, Effect, Fiber, Layer } from "effect"
import type { SqlClient } from "effect/sql/SqlClient"
import type { SqlError } from "effect/sql/SqlError"
import { TestClock } from "effect/testing"
import { type Backend, Fence, Lease, Worker } from "worklease"
import * as Memory from "worklease/layers/Memory"
import * as Pglite from "worklease/layers/Pglite"
import type { PgliteClient } from "worklease/layers/PgliteClient"
import * as Postgres from "worklease/layers/Postgres"
import type * as Err from "worklease/LeaseError"
import { TestBackend } from "worklease/testing"
import type * as TestBackendModule from "worklease/testing/TestBackend"
import { type A, check, type E, type R, type Same } from "./assert.ts"
import type { MyErr } from "./fixtures.ts"

// ---- what each backend provides, needs, and may fail with
check<Same<typeof Memory.layer, Layer.Layer<Backend.Backend>>>()
check<Same<typeof Postgres.layer, Layer.Layer<Backend.Backend | Fence.Fence, Err.BackendError, SqlClient>>>()
const named = Postgres.layerWith({ schema: "app", table: "leases" })
check<
  Same<
    typeof named,
    Layer.Layer<Backend.Backend | Fence.Fence, Err.BackendError | Err.InvalidConfig, SqlClient>
  >
>()
const storage = Postgres.layerStorage({})
check<Same<typeof storage, Layer.Layer<Backend.Backend | Fence.Fence, Err.InvalidConfig, SqlClient>>>()
const migrations = Postgres.layerMigrations({})
check<Same<typeof migrations, Layer.Layer<never, Err.BackendError | Err.InvalidConfig, SqlClient>>>()
check<
  Same<
    typeof Pglite.layer,
    Layer.Layer<Backend.Backend | Fence.Fence | SqlClient | PgliteClient, Err.BackendError | SqlError>
  >
>()
const onDirectory = Pglite.layerWith({ dataDir: "data", schema: "app" })
check<
  Same<
    typeof onDirectory,
    Layer.Layer<
      Backend.Backend | Fence.Fence | SqlClient | PgliteClient,
      Err.BackendError | SqlError | Err.InvalidConfig
    >
  >
>()
check<Same<typeof TestBackend.layer, Layer.Layer<Backend.Backend | TestBackend.TestBackend>>>()
check<Same<typeof TestBackend, typeof TestBackendModule>>()

// ---- memory and TestClock: fully provided; two processes are two layers under ONE enclosing backend
const ProcessA = Lease.layerWith({ holderId: "a" })
const ProcessB = Lease.layerWith({ holderId: "b" })
const test = Effect.gen(function*() {
  const backend = yield* TestBackend.TestBackend
  const a = yield* Effect.forkChild(Effect.provide(Worker.run("job", () => Effect.never), ProcessA))
  yield* TestClock.adjust("1 second")
  yield* backend.sever("a")
  yield* TestClock.adjust("30 seconds")
  const exit = yield* Effect.provide(Worker.run("job", (lease) => Effect.succeed(lease.prior.exit)), ProcessB)
  yield* Fiber.interrupt(a)
  return exit
}).pipe(Effect.provide(Layer.provideMerge(TestBackend.layer, TestClock.layer())))
check<Same<R<typeof test>, never>>()
check<Same<A<typeof test>, "none" | "expired" | Lease.ExitMode>>()

// ---- a program that fences does not compile over a backend that cannot
declare const lease: Lease.Lease<{ readonly at: number }>
declare const token: Lease.Token<string>
declare const writes: Effect.Effect<number, MyErr, SqlClient>
const f1 = Effect.gen(function*() {
  const n = yield* writes
  yield* lease.checkpoint({ at: n })
  return n
}).pipe(Fence.transaction(lease))
check<Same<E<typeof f1>, MyErr | Err.CheckpointEncodeError | Err.CheckpointTooLarge | Err.BackendError>>()
check<Same<R<typeof f1>, SqlClient | Fence.Fence>>()
const f2 = Fence.transaction(writes, lease)
check<Same<A<typeof f2>, number>>()
check<Same<E<typeof f2>, MyErr | Err.BackendError>>()
// Under a held lease a loss interrupts; with a bare token it is typed.
const f3 = writes.pipe(Fence.transaction(token))
check<Same<E<typeof f3>, MyErr | Err.BackendError | Err.Fenced | Err.LeaseExpired>>()
const overMemory = f1.pipe(Effect.provide(Memory.layer))
check<Same<R<typeof overMemory>, SqlClient | Fence.Fence>>()
const overPostgres = f1.pipe(Effect.provide(Postgres.layer))
check<Same<R<typeof overPostgres>, SqlClient>>()
const overPglite = f1.pipe(Effect.provide(Pglite.layer))
check<Same<R<typeof overPglite>, never>>()

// ---- the layers of an application
declare const client: Layer.Layer<SqlClient, SqlError | Config.ConfigError>
const application = Lease.layer.pipe(Layer.provide(Postgres.layer), Layer.provideMerge(client))
check<
  Same<typeof application, Layer.Layer<Lease.Leases | SqlClient, Err.BackendError | SqlError | Config.ConfigError>>
>()
