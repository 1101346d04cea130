/**
 * A process of a benchmark: `node process.ts <program> <settings>`. Ends when
 * the process that started it does, in whatever way.
 */
import * as NodeRuntime from "@effect/platform-node/NodeRuntime"
import { Effect, Logger, Queue, Schema } from "effect"
import { createInterface } from "node:readline"
import type { Program } from "./Program.ts"

const programs: Readonly<Record<string, () => Promise<Program<any, any, any>>>> = {
  contender: () => import("./processes/Contender.ts").then((_) => _.Contender),
  holder: () => import("./processes/Holder.ts").then((_) => _.Holder),
  keeper: () => import("./processes/Keeper.ts").then((_) => _.Keeper)
}

const [name, argument] = process.argv.slice(2)

const lineOf = (schema: Schema.Codec<any, any>) => Schema.fromJsonString(Schema.toCodecJson(schema))

const main = Effect.gen(function*() {
  const program = yield* Effect.promise(() => programs[name]())
  const commands = yield* Queue.make<unknown>()
  const decode = Schema.decodeSync(lineOf(program.Command))
  const encode = Schema.encodeSync(lineOf(program.Event))
  const orphaned = Effect.callback<void>((resume) => {
    const lines = createInterface({ input: process.stdin })
    lines.on("line", (line) => Queue.offerUnsafe(commands, decode(line)))
    lines.once("close", () => resume(Effect.void))
    return Effect.sync(() => {
      lines.close()
      process.stdin.destroy()
    })
  })
  const settings = yield* Schema.decodeEffect(lineOf(program.Settings))(argument)
  yield* program.run(settings, {
    commands,
    say: (event) => Effect.sync(() => process.stdout.write(`${encode(event)}\n`))
  }).pipe(Effect.raceFirst(orphaned))
})

main.pipe(
  Effect.tapCause((cause) => Effect.logError(`The process ${name} failed`, cause)),
  // Standard output is for events.
  Effect.provide(Logger.layer([Logger.withConsoleError(Logger.formatSimple)])),
  NodeRuntime.runMain({ disableErrorReporting: true })
)
