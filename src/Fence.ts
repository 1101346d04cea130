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

import * as Cause from "effect/Cause"
import * as Context from "effect/Context"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Exit from "effect/Exit"
import { dual } from "effect/Function"
import * as Option from "effect/Option"
import type * as Backend from "./Backend.ts"
import { noReturn, settleExit, stopHere, supervise } from "./internal/supervision.ts"
import { type Term, termOf } from "./internal/term.ts"
import * as Lease from "./Lease.ts"
import { type BackendError, Fenced, LeaseExpired, type LeaseLost } from "./LeaseError.ts"

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
 * have been. When the reply to its COMMIT is lost, a checkpoint inside it tells
 * which, so that it is `unknown` only where there was none, where somebody has
 * checkpointed since, or where the database does not answer in time.
 *
 * It runs at read committed, whatever the database's default, and in a fiber of
 * its own, with which the fibers end that it forks. Inside another transaction
 * of the same client it is a savepoint of that one, and what it says of the
 * commit is true once that one has committed.
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
    (fence) => fenced(self, lease, fence) as Effect.Effect<A, EX | TransactionError<L>, R>
  ))

// -----------------------------------------------------------------------------
// internal
// -----------------------------------------------------------------------------

const fenced = <A, EX, R>(
  self: Effect.Effect<A, EX, R>,
  lease: Lease.Any | Lease.AnyToken,
  fence: Fence["Service"]
): Effect.Effect<A, EX | BackendError | Fenced | LeaseExpired, R> =>
  Effect.suspend(() => {
    const held = Lease.TypeId in lease ? lease : undefined
    const term = termOf(held === undefined ? lease as Lease.AnyToken : held.token)
    if (held !== undefined && term.loseIfExhausted()) return noReturn(term)
    const { operationTimeout } = term.policy
    const transacted = fence.transaction(
      Effect.flatMap(self, (value): Effect.Effect<A, Fenced | LeaseExpired | LeaseLost> => {
        if (term.refused !== undefined) return Effect.fail(term.refused)
        // The window may have ended while this process did not run.
        return held === undefined ? Effect.succeed(value) : settleExit(term, Exit.succeed(value))
      }),
      {
        term,
        // With a bare token, only the backend is asked.
        remaining: () =>
          held === undefined ? Math.max(term.remaining, Duration.toMillis(operationTimeout)) : term.remaining,
        operationTimeout
      }
    )
    // A loss ends the work of a held lease here already, so that the transaction is rolled back also without a guard.
    const guarded = Effect.uninterruptibleMask((restore) =>
      Effect.flatMap(supervise(term, transacted, restore, false), (exit) => settleExit(term, exit))
    )
    return (held === undefined ? transacted : guarded).pipe(
      Effect.catchCause((cause): Effect.Effect<A, EX | BackendError | Fenced | LeaseExpired> => {
        const failure = Option.getOrUndefined(Cause.findErrorOption(cause))
        const refused = term.refused ?? (isRefusal(failure, term) ? failure : undefined)
        if (held === undefined) {
          return refused === undefined
            ? Effect.failCause(cause as Cause.Cause<EX | BackendError>)
            : Effect.fail(refused)
        }
        if (refused !== undefined) term.lose(refused)
        if (term.loss !== undefined) return noReturn(term)
        return term.stopped ? stopHere : Effect.failCause(cause as Cause.Cause<EX | BackendError>)
      })
    )
  })

const isRefusal = (error: unknown, term: Term): error is Fenced | LeaseExpired =>
  (error instanceof Fenced || error instanceof LeaseExpired) && error.workId === term.workId &&
  error.fencingToken === term.fencingToken
