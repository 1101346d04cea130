/**
 * Fenced transactions: the rows that a worker writes and the checkpoint that
 * tells of them commit together, or neither does. A worker that dies between
 * the two leaves no trace, and one that has lost its lease commits nothing.
 *
 * Runs on PGlite, PostgreSQL inside this process.
 *
 *     node examples/fenced-transaction.ts
 */
import { NodeRuntime } from "@effect/platform-node"
import { Console, Effect, Layer, Option, Schema } from "effect"
import { SqlClient } from "effect/sql"
import assert from "node:assert/strict"
import { Checkpoint, Fence, Lease, Work, Worker } from "worklease"
import * as Pglite from "worklease/layers/Pglite"

const Import = Work.make("import", Checkpoint.make(Schema.Struct({ line: Schema.Int })))

const lines = ["apples", "bread", "cheese", "dates", "eggs"]

class Crash extends Schema.TaggedError<Crash>()("Crash", {}) {}

/** Imports the lines. Fails after it has written line `crashAt`, and before the checkpoint of it. */
const importLines = (crashAt?: number) =>
  Worker.run(
    Import.id("groceries"),
    Effect.fnUntraced(function*(work) {
      const sql = yield* SqlClient.SqlClient
      const start = Option.match(work.prior.state, { onNone: () => 0, onSome: (state) => state.line })
      yield* Console.log(`   begins at line ${start}; the last one: ${work.prior.exit}`)
      for (let line = start; line < lines.length; line++) {
        yield* Effect.gen(function*() {
          yield* sql`INSERT INTO groceries (line, name) VALUES (${line}, ${lines[line]})`
          if (line === crashAt) return yield* new Crash()
          yield* work.checkpoint({ line: line + 1 }) // joins the transaction
        }).pipe(Fence.transaction(work))
      }
    })
  )

const program = Effect.gen(function*() {
  const sql = yield* SqlClient.SqlClient
  const written = Effect.map(
    sql<{ readonly name: string }>`SELECT name FROM groceries ORDER BY line`,
    (rows) => rows.map((row) => row.name)
  )
  yield* sql`CREATE TABLE groceries (line integer NOT NULL, name text NOT NULL)`

  yield* Console.log("A worker fails after it wrote line 2, before its checkpoint:")
  const error = yield* Effect.flip(importLines(2))
  assert.equal(error._tag, "Crash")
  assert.deepEqual(yield* written, ["apples", "bread"])
  yield* Console.log(`   the table has: ${(yield* written).join(", ")}`)

  yield* Console.log("The next one begins with line 2. No row is missing, and none is there twice:")
  yield* importLines()
  assert.deepEqual(yield* written, lines)
  yield* Console.log(`   the table has: ${(yield* written).join(", ")}`)

  yield* Console.log("A holder whose successor has begun:")
  const { token: old } = yield* Lease.acquire(Import.id("groceries"))
  yield* Lease.release(old, "yielded")
  yield* Lease.acquire(Import.id("groceries"))
  const fenced = yield* sql`INSERT INTO groceries (line, name) VALUES (99, 'zombie')`.pipe(
    Fence.transaction(old),
    Effect.flip
  )
  assert.equal(fenced._tag, "Fenced")
  assert.deepEqual(yield* written, lines)
  yield* Console.log(`   ${fenced.message}`)
})

NodeRuntime.runMain(program.pipe(Effect.provide(Lease.layer.pipe(Layer.provideMerge(Pglite.layer)))))
