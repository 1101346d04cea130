/**
 * Processes of a benchmark, seen from the one that starts them. They read
 * commands and say events, one JSON line each, and end with the scope, or with
 * this process, however it ends.
 */
import { Data, Deferred, Effect, Exit, Queue, Schema, type Scope, Stream } from "effect"
import { ChildProcess, ChildProcessSpawner } from "effect/process"
import { fileURLToPath } from "node:url"
import type { Program } from "./Program.ts"

interface Tagged {
  readonly _tag: string
}

export class ProcessFailed extends Data.TaggedError("ProcessFailed")<{ readonly message: string }> {}

export interface Process<in Command, in out Event extends Tagged> {
  readonly pid: number
  readonly send: (command: Command) => Effect.Effect<void>
  /** The next event with one of these tags, also if it was said already. Fails if the process ends before. */
  readonly next: <Tag extends Event["_tag"]>(
    tags: Tag | ReadonlyArray<Tag>,
    options?: {
      readonly where?: (event: Extract<Event, { readonly _tag: Tag }>) => boolean
      /** Fails if there is none for so long. Defaults to 60. */
      readonly seconds?: number
    }
  ) => Effect.Effect<Extract<Event, { readonly _tag: Tag }>, ProcessFailed>
  /** SIGKILL. Does not wait for its end. */
  readonly kill: Effect.Effect<void>
}

export const start = Effect.fnUntraced(function*<Settings, Command, Event extends Tagged>(
  program: Program<Settings, Command, Event>,
  settings: Settings,
  nodeOptions: ReadonlyArray<string> = []
): Effect.fn.Return<
  Process<Command, Event>,
  ProcessFailed,
  ChildProcessSpawner.ChildProcessSpawner | Scope.Scope
> {
  const spawner = yield* ChildProcessSpawner.ChildProcessSpawner
  const commands = yield* Queue.make<string>()
  const argument = yield* Effect.orDie(Schema.encodeEffect(lineOf(program.Settings))(settings))
  const handle = yield* spawner.spawn(ChildProcess.make(
    process.execPath,
    [...nodeOptions, fileURLToPath(new URL("process.ts", import.meta.url)), program.name, argument],
    { killSignal: "SIGKILL", stdin: { stream: Stream.encodeText(Stream.fromQueue(commands)) } }
  )).pipe(
    Effect.mapError((error) => new ProcessFailed({ message: `Could not start ${program.name}: ${error.message}` }))
  )

  const events: Array<Event> = []
  let waiting: Array<{
    readonly isWanted: (event: Event) => boolean
    readonly deferred: Deferred.Deferred<any, ProcessFailed>
  }> = []
  let failure: ProcessFailed | undefined
  let errors = ""

  const said = (event: Event) => {
    const first = waiting.find(({ isWanted }) => isWanted(event))
    if (first === undefined) {
      events.push(event)
    } else {
      waiting = waiting.filter((one) => one !== first)
      Deferred.doneUnsafe(first.deferred, Effect.succeed(event))
    }
  }

  yield* Stream.runForEach(Stream.decodeText(handle.stderr), (text) =>
    Effect.sync(() => {
      errors = (errors + text).slice(-2000)
    })).pipe(Effect.ignore, Effect.forkScoped)

  const decode = Schema.decodeEffect(lineOf(program.Event))
  yield* handle.stdout.pipe(
    Stream.decodeText,
    Stream.splitLines,
    Stream.mapEffect((line) => decode(line)),
    Stream.runForEach((event) => Effect.sync(() => said(event))),
    Effect.andThen(handle.exitCode),
    Effect.exit,
    Effect.flatMap((exit) =>
      Effect.sync(() => {
        const how = Exit.isSuccess(exit) ? `code ${exit.value}` : "a signal, or with something that is no event"
        failure = new ProcessFailed({
          message: `The process ${program.name} ended with ${how}\n${errors.trim()}`.trim()
        })
        for (const { deferred } of waiting) Deferred.doneUnsafe(deferred, Effect.fail(failure))
        waiting = []
      })
    ),
    Effect.forkScoped
  )

  const encode = Schema.encodeEffect(lineOf(program.Command))
  return {
    pid: handle.pid,
    send: (command) => Effect.flatMap(Effect.orDie(encode(command)), (line) => Queue.offer(commands, `${line}\n`)),
    next: (tags, options) =>
      Effect.suspend(() => {
        const isWanted = (event: Event): boolean =>
          [tags].flat().some((tag) => tag === event._tag) && options?.where?.(event as never) !== false
        const index = events.findIndex(isWanted)
        if (index >= 0) return Effect.succeed(events.splice(index, 1)[0] as never)
        if (failure !== undefined) return Effect.fail(failure)
        const deferred = Deferred.makeUnsafe<any, ProcessFailed>()
        waiting.push({ isWanted, deferred })
        const seconds = options?.seconds ?? 60
        return Effect.timeoutOrElse(Deferred.await(deferred), {
          duration: seconds * 1000,
          orElse: () =>
            Effect.fail(
              new ProcessFailed({ message: `The process ${program.name} did not say ${tags} within ${seconds} s` })
            )
        })
      }),
    kill: Effect.sync(() => {
      try {
        process.kill(handle.pid, "SIGKILL")
      } catch {
        // It has ended already.
      }
    })
  }
})

const lineOf = <A>(schema: Schema.Codec<A, any>) => Schema.fromJsonString(Schema.toCodecJson(schema))
