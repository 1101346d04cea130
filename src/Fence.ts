/**
 * Fenced writes: the user's own writes and the checkpoint commit together, or
 * neither does.
 *
 * Effects on the database that keeps the leases become exactly-once: what a
 * holder wrote in a fenced transaction is there if and only if the checkpoint
 * that says so is, and a holder that has lost its lease commits nothing more.
 *
 * **Gotchas**
 *
 * While a fenced transaction is open, its lease cannot be taken over, so keep
 * it short: a frozen holder delays its successor by up to two windows. Long
 * transactions also cost the database heap-only updates.
 *
 * **Example** (Writing a row and the progress that tells of it)
 *
 * ```ts
 * import { Effect, Option, Schema } from "effect"
 * import { SqlClient } from "effect/sql"
 * import { Checkpoint, Fence, Work, Worker } from "worklease"
 *
 * const Import = Work.make("import", Checkpoint.make(Schema.Struct({ line: Schema.Int })))
 *
 * const run = (file: string, lines: ReadonlyArray<string>) =>
 *   Worker.run(Import.id(file), Effect.fnUntraced(function*(work) {
 *     const sql = yield* SqlClient.SqlClient
 *     const start = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.line })
 *     for (let line = start; line < lines.length; line++) {
 *       yield* Effect.andThen(
 *         sql`INSERT INTO imported (file, line, text) VALUES (${file}, ${line}, ${lines[line]})`,
 *         work.checkpoint({ line: line + 1 })
 *       ).pipe(Fence.transaction(work))
 *     }
 *   }))
 * ```
 *
 * @since 0.1.0
 */
import * as Context from "effect/Context"
import type * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import { dual } from "effect/Function"
import type * as Backend from "./Backend.ts"
import * as Lease from "./Lease.ts"
import type { BackendError, Fenced, LeaseExpired } from "./LeaseError.ts"

/**
 * What a backend whose store has transactions provides for `transaction`.
 *
 * **Details**
 *
 * Provided only by backends that can: a program that fences does not compile
 * over one that cannot.
 *
 * @category services
 * @since 0.1.0
 */
export class Fence extends Context.Service<Fence, {
  /**
   * Runs an effect in a transaction which pins the term: it fails unless the
   * term is current and unexpired, and nobody can take the lease over until it
   * has ended. A COMMIT whose reply is lost is settled before it answers.
   */
  readonly transaction: <A, EX, R>(self: Effect.Effect<A, EX, R>, options: {
    readonly term: Backend.Term
    /** The milliseconds left of the window, after which the store ends the transaction by itself. */
    readonly remaining: () => number
    /** How long the store may take to pin the term, to commit, and to roll back. */
    readonly operationTimeout: Duration.Duration
  }) => Effect.Effect<A, EX | BackendError | Fenced | LeaseExpired, R>
}>()("worklease/Fence") {}

/**
 * What a fenced transaction adds to the errors: under a held lease, a loss
 * interrupts the work; with a bare token, it is typed.
 *
 * @category models
 * @since 0.1.0
 */
export type TransactionError<L> = BackendError | (L extends Lease.Any ? never : Fenced | LeaseExpired)

/**
 * Runs an effect in a transaction of the lease's own database, which commits
 * only while the lease's term is current. Checkpoints inside it join it.
 *
 * **Details**
 *
 * Fails with `BackendError` if the transaction could not be begun or
 * committed: with outcome `rejected` if it surely was not, `unknown` if it may
 * have been. It runs at read committed, whatever the database's default.
 *
 * @category combinators
 * @since 0.1.0
 */
export const transaction: {
  <L extends Lease.Any | Lease.AnyToken>(lease: L): <A, EX, R>(
    self: Effect.Effect<A, EX, R>
  ) => Effect.Effect<A, EX | TransactionError<L>, R | Fence>
  <A, EX, R, L extends Lease.Any | Lease.AnyToken>(
    self: Effect.Effect<A, EX, R>,
    lease: L
  ): Effect.Effect<A, EX | TransactionError<L>, R | Fence>
} = dual(2, <A, EX, R, L extends Lease.Any | Lease.AnyToken>(
  self: Effect.Effect<A, EX, R>,
  lease: L
): Effect.Effect<A, EX | TransactionError<L>, R | Fence> =>
  Effect.flatMap(
    Fence,
    (fence) =>
      Lease.fenced<A, EX, R, BackendError | Fenced | LeaseExpired, R>(
        self,
        lease,
        fence.transaction
      ) as Effect.Effect<A, EX | TransactionError<L>, R>
  ))
