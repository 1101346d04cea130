/**
 * A process that reports what it does, one JSON line each.
 */
import { Cause, Effect, Exit, type PlatformError, Schema, type Scope, Stream } from "effect"
import { ChildProcess, ChildProcessSpawner } from "effect/process"
import { fileURLToPath } from "node:url"
import { Stuck } from "./Story.ts"

export interface Options<Settings, Report> {
  readonly script: URL
  /** Its one argument, as JSON. */
  readonly settings: Settings
  readonly Settings: Schema.Codec<Settings, string>
  readonly Report: Schema.Codec<Report, string>
  readonly onReport: (report: Report) => void
  /** Called when it has ended and all that it has reported was heard: with how it ended, unless that was with code 0. */
  readonly onEnd: (how: string | undefined) => void
}

/** Starts one. It ends with the scope, also when it is frozen. */
export const start = Effect.fnUntraced(function*<Settings, Report>(
  options: Options<Settings, Report>
): Effect.fn.Return<
  ChildProcessSpawner.ChildProcessHandle,
  PlatformError.PlatformError,
  ChildProcessSpawner.ChildProcessSpawner | Scope.Scope
> {
  const spawner = yield* ChildProcessSpawner.ChildProcessSpawner
  const argument = yield* Effect.orDie(Schema.encodeEffect(options.Settings)(options.settings))
  const handle = yield* spawner.spawn(ChildProcess.make(
    process.execPath,
    [fileURLToPath(options.script), argument],
    // Nothing gentler reaches a process that is frozen.
    { killSignal: "SIGKILL" }
  ))
  const decode = Schema.decodeEffect(options.Report)
  const listen = Effect.gen(function*() {
    let errors = ""
    yield* Stream.runForEach(Stream.decodeText(handle.stderr), (text) =>
      Effect.sync(() => {
        errors = (errors + text).slice(-2000)
      })).pipe(Effect.forkChild)
    yield* handle.stdout.pipe(
      Stream.decodeText,
      Stream.splitLines,
      Stream.mapEffect((line) => Effect.mapError(decode(line), () => new Stuck({ message: `Not a report: ${line}` }))),
      Stream.runForEach((report) => Effect.sync(() => options.onReport(report)))
    )
    const exit = yield* Effect.exit(handle.exitCode)
    if (Exit.isSuccess(exit) && exit.value === 0) return undefined
    return `ended with ${Exit.isSuccess(exit) ? `code ${exit.value}` : "a signal"}\n${errors.trimEnd()}`
  })
  yield* listen.pipe(
    Effect.catchCause((cause) => Effect.succeed(Cause.pretty(cause))),
    Effect.flatMap((how) => Effect.sync(() => options.onEnd(how))),
    Effect.forkScoped
  )
  return handle
})
