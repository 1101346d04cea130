/**
 * Leases in PGlite: PostgreSQL inside the process, in memory or on a
 * directory. The same SQL as `layers/Postgres`.
 *
 * For development, tests, and programs that bring their database along. It has
 * one session: while a transaction is open, every other operation waits, and
 * operations on leases inside one, other than checkpoints, are refused.
 *
 * **Example** (Leases without a server)
 *
 * ```ts
 * import { Effect, Layer } from "effect"
 * import { Lease, Worker } from "worklease"
 * import * as Pglite from "worklease/layers/Pglite"
 *
 * const program = Worker.run("job", () => Effect.log("working"))
 *
 * Effect.runPromise(program.pipe(Effect.provide(Lease.layer.pipe(Layer.provide(Pglite.layer)))))
 * ```
 *
 * @since 0.1.0
 */

import * as Layer from "effect/Layer"
import type * as SqlClient from "effect/sql/SqlClient"
import type * as SqlError from "effect/sql/SqlError"
import type * as Backend from "../Backend.ts"
import type { Fence } from "../Fence.ts"
import type { BackendError, InvalidConfig } from "../LeaseError.ts"
import * as PgliteClient from "./PgliteClient.ts"
import * as Postgres from "./Postgres.ts"

/**
 * Where the database and its tables are.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options extends PgliteClient.Options, Postgres.Options {}

/**
 * Provides a `Backend` and a `Fence` over a database in memory, which is gone
 * when the layer is, and its `SqlClient` for the application's own tables.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer: Layer.Layer<
  Backend.Backend | Fence | SqlClient.SqlClient | PgliteClient.PgliteClient,
  BackendError | SqlError.SqlError
> = Layer.suspend(() => Layer.provideMerge(Postgres.layer, PgliteClient.layer()))

/**
 * Like `layer`, on a directory, in another schema or under another name.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerWith = (
  options: Options
): Layer.Layer<
  Backend.Backend | Fence | SqlClient.SqlClient | PgliteClient.PgliteClient,
  BackendError | SqlError.SqlError | InvalidConfig
> => Layer.provideMerge(Postgres.layerWith(options), PgliteClient.layer(options))
