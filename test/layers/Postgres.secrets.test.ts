import { PgClient } from "@effect/sql-pg"
import { assert, describe, it } from "@effect/vitest"
import { Cause, Effect, Exit, Layer, Logger, Redacted, References, Schema, Tracer } from "effect"
import { SqlClient } from "effect/sql"
import * as Fs from "node:fs/promises"
import * as Path from "node:path"
import { inspect } from "node:util"
import { Checkpoint, Lease, LeaseError, Work, Worker } from "worklease"
import * as Postgres from "worklease/layers/Postgres"
import { start } from "../../support/EmbeddedPostgres.ts"
import { freshDatabase } from "../support/Postgres.ts"
import * as Sessions from "../support/Sessions.ts"

const password = "pa55word-of-the-database"
const content = "content-of-the-checkpoint"

const Text = Work.make("text", Checkpoint.make(Schema.Struct({ text: Schema.String })))

/** Every way in which an error comes to be read by somebody. */
const formsOf = (exit: Exit.Exit<unknown, unknown>): ReadonlyArray<string> => {
  if (Exit.isSuccess(exit)) return []
  return exit.cause.reasons.flatMap((reason) => {
    const error = Cause.isFailReason(reason) ? reason.error : Cause.isDieReason(reason) ? reason.defect : undefined
    const forms = [String(error), JSON.stringify(error), inspect(error, { depth: 10 })]
    if (error instanceof Error) forms.push(error.message, String(error.stack))
    if (error instanceof LeaseError.BackendError) {
      forms.push(JSON.stringify(Schema.encodeSync(Schema.toCodecJson(LeaseError.BackendError))(error)))
    }
    return forms
  }).concat(Cause.pretty(exit.cause))
}

/** Collects all that is logged and traced. */
const recording = () => {
  const records: Array<string> = []
  const logger = Logger.make((options) => {
    records.push(Logger.formatLogFmt.log(options), inspect(options.message, { depth: 10 }), Cause.pretty(options.cause))
  })
  const tracer = Tracer.make({
    span: (options) => {
      const span = new Tracer.NativeSpan(options)
      records.push(span.name)
      const attribute = span.attribute.bind(span)
      span.attribute = (key, value) => {
        records.push(`${key}=${inspect(value, { depth: 10 })}`)
        attribute(key, value)
      }
      return span
    }
  })
  return {
    records,
    layer: Layer.mergeAll(
      Logger.layer([logger]),
      Layer.succeed(References.MinimumLogLevel, "All"),
      Layer.succeed(Tracer.Tracer, tracer)
    )
  }
}

describe("Postgres and secrets", () => {
  it.live("no message, JSON, log or span has the password of the database", () =>
    Effect.gen(function*() {
      const server = yield* start()
      const url = yield* server.createDatabase()
      const name = new URL(url).pathname.slice(1)
      yield* server.execute(`CREATE ROLE app LOGIN PASSWORD '${password}'`)
      yield* server.execute(`ALTER DATABASE "${name}" OWNER TO app`)
      const rules = Path.join(server.dataDirectory, "pg_hba.conf")
      const before = yield* Effect.promise(() => Fs.readFile(rules, "utf8"))
      yield* Effect.promise(() => Fs.writeFile(rules, `host all app 127.0.0.1/32 scram-sha-256\n${before}`))
      yield* server.execute("SELECT pg_reload_conf()")

      const as = (change: (url: URL) => void) => {
        const changed = new URL(url)
        changed.username = "app"
        changed.password = password
        change(changed)
        return changed.href
      }
      yield* Sessions.eventually(
        "passwords are asked for",
        Effect.map(
          Effect.exit(Effect.scoped(Layer.build(Sessions.process(as((url) => url.password = "another"))))),
          Exit.isFailure
        )
      )
      const { layer, records } = recording()

      yield* Effect.gen(function*() {
        assert.strictEqual(
          yield* Effect.provide(Worker.run("a", () => Effect.succeed(1)), Sessions.process(as(() => {}))),
          1
        )
        for (
          const [changed, reason] of [
            [as((url) => url.password = `${password}-wrong`), "PermissionDenied"],
            [as((url) => url.username = "somebody"), "PermissionDenied"],
            [as((url) => url.pathname = "/nothing"), "Unreachable"],
            [as((url) => url.port = "1"), "Unreachable"],
            [as((url) => url.hostname = "host.invalid"), "Unreachable"]
          ] as const
        ) {
          const storage = Lease.layer.pipe(
            Layer.provideMerge(Postgres.layerStorage({})),
            Layer.provideMerge(PgClient.layer({ url: Redacted.make(changed) }))
          )
          for (
            const exit of [
              yield* Effect.exit(Effect.scoped(Layer.build(Sessions.process(changed)))),
              yield* Effect.exit(Effect.provide(Lease.acquire("a"), storage)),
              yield* Effect.exit(Effect.provide(Worker.run("a", () => Effect.void), storage))
            ]
          ) {
            const error = yield* Effect.flip(exit as Exit.Exit<unknown, unknown>)
            if (!(error instanceof LeaseError.BackendError)) return assert.fail(String(error))
            assert.strictEqual(error.reason._tag, reason, changed)
            assert.strictEqual(error.outcome, "rejected", changed)
            for (const form of formsOf(exit)) assert.notInclude(form, password)
          }
        }
        // What is logged of a lease that is held meanwhile.
        yield* Effect.gen(function*() {
          const lease = yield* Lease.hold("b")
          yield* server.execute("ALTER ROLE app PASSWORD 'another'")
          yield* server.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'")
          yield* Effect.exit(lease.lost)
        }).pipe(Effect.scoped, Effect.provide(Sessions.process(as(() => {}), { ttl: "1 second" })))
      }).pipe(Effect.withSpan("test"), Effect.provide(layer))
      assert.isTrue(records.some((record) => record.includes("Could not renew the lease")))
      for (const record of records) assert.notInclude(record, password)
    }))

  it.live("no message, JSON, log or span has what a checkpoint holds", () =>
    Effect.gen(function*() {
      const { url } = yield* freshDatabase()
      const settings = yield* Sessions.session(url)
      yield* settings.unsafe(
        `ALTER DATABASE "${new URL(url).pathname.slice(1)}" SET log_parameter_max_length_on_error = -1`
      )
      const { layer, records } = recording()
      const exits: Array<Exit.Exit<unknown, unknown>> = []
      const bytes = Buffer.from(JSON.stringify({ text: content }))
      yield* Effect.gen(function*() {
        const sql = yield* SqlClient.SqlClient
        const { token } = yield* Lease.acquire(Text.id("a"))
        yield* Lease.checkpoint(token, { text: content })
        const attempts = Effect.gen(function*() {
          exits.push(yield* Effect.exit(Lease.checkpoint(token, { text: `${content} again` })))
          exits.push(yield* Effect.exit(Lease.release(token, "finished", { text: `${content} again` })))
          exits.push(yield* Effect.exit(sql.withTransaction(Lease.checkpoint(token, { text: `${content} again` }))))
          exits.push(
            yield* Effect.exit(Worker.run(
              Text.id("b"),
              Effect.fnUntraced(function*(work) {
                yield* work.leaveAs("finished", { text: content })
              })
            ))
          )
        })
        // PostgreSQL puts the failing row into the error.
        yield* sql.unsafe("ALTER TABLE worklease ADD CONSTRAINT small CHECK (length(state) < 5) NOT VALID")
        yield* attempts
        yield* sql.unsafe("ALTER TABLE worklease DROP CONSTRAINT small")
        // Or the parameters, if it is told to.
        yield* sql.unsafe(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
          IF NEW.state IS NOT NULL THEN
            RAISE EXCEPTION 'no' USING DETAIL = convert_from(NEW.state, 'UTF8');
          END IF;
          RETURN NEW;
        END $$`)
        yield* sql.unsafe("CREATE TRIGGER refuse BEFORE UPDATE ON worklease FOR EACH ROW EXECUTE FUNCTION refuse()")
        yield* attempts
        yield* sql.unsafe("DROP TRIGGER refuse ON worklease")
        // A state that the next holder cannot read.
        yield* sql.unsafe("UPDATE worklease SET state = $1, state_version = 1, exit = 'finished'", [
          new Uint8Array(Buffer.from(JSON.stringify({ text: [content] })))
        ])
        exits.push(yield* Effect.exit(Lease.acquire(Text.id("a"))))
        exits.push(yield* Effect.exit(Worker.run(Text.id("a"), () => Effect.void)))
        yield* sql.unsafe("ALTER TABLE worklease RENAME TO gone")
        yield* attempts
      }).pipe(
        Effect.provide(Sessions.process(url, { ttl: "3 seconds", operationTimeout: "200 millis" })),
        Effect.withSpan("test"),
        Effect.provide(layer)
      )
      const secrets = [content, bytes.toString("hex"), bytes.toString("base64").slice(0, 30)]
      const forms = exits.flatMap((exit) => {
        assert.isTrue(Exit.isFailure(exit))
        return formsOf(exit)
      })
      assert.isNotEmpty(forms)
      assert.isNotEmpty(records)
      for (const text of [...forms, ...records]) {
        for (const secret of secrets) assert.notInclude(text, secret)
      }
    }))
})
