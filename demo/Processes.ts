/**
 * The worker processes: starts them, listens to them, and signals them.
 */
import { Cause, Effect, Exit, type PlatformError, Schema, Scope, Stream } from "effect"
import { ChildProcess, ChildProcessSpawner } from "effect/process"
import { fileURLToPath } from "node:url"
import { ReportLine, Settings } from "./Import.ts"
import { type Run, Stuck, type Worker } from "./Run.ts"

export interface Processes {
  /** Starts a process. It ends with the scope, also when it is frozen. */
  readonly start: Effect.Effect<Worker, PlatformError.PlatformError>
  /** SIGKILL: returns when it is dead. */
  readonly kill: (worker: Worker) => Effect.Effect<void, PlatformError.PlatformError>
  /** Has the worker send itself SIGSTOP in its next write, after it has made sure of its lease: the worst moment. */
  readonly freeze: (worker: Worker) => Effect.Effect<void>
  /** SIGCONT. */
  readonly wake: (worker: Worker) => Effect.Effect<void>
}

export const make = Effect.fnUntraced(function*(
  run: Run,
  settings: Omit<typeof Settings.Type, "holderId">
): Effect.fn.Return<Processes, never, ChildProcessSpawner.ChildProcessSpawner | Scope.Scope> {
  const spawner = yield* ChildProcessSpawner.ChildProcessSpawner
  const scope = yield* Effect.scope
  const handles = new Map<Worker, ChildProcessSpawner.ChildProcessHandle>()

  const listen = (worker: Worker, handle: ChildProcessSpawner.ChildProcessHandle) =>
    Effect.gen(function*() {
      let errors = ""
      yield* Stream.runForEach(Stream.decodeText(handle.stderr), (text) =>
        Effect.sync(() => {
          errors = (errors + text).slice(-2000)
        })).pipe(Effect.forkChild)
      yield* handle.stdout.pipe(
        Stream.decodeText,
        Stream.splitLines,
        Stream.mapEffect((line) =>
          Effect.mapError(Schema.decodeEffect(ReportLine)(line), () => new Stuck({ message: `Not a report: ${line}` }))
        ),
        Stream.runForEach((report) => Effect.sync(() => run.reported(worker, report)))
      )
      const exit = yield* Effect.exit(handle.exitCode)
      if (worker.state === "killed") return
      if (Exit.isSuccess(exit) && exit.value === 0) {
        worker.state = "ended"
        return
      }
      const how = Exit.isSuccess(exit) ? `code ${exit.value}` : "a signal"
      run.broken = `${worker.holderId} ended with ${how}\n${errors.trimEnd()}`
    }).pipe(
      Effect.catchCause((cause) =>
        Effect.sync(() => {
          run.broken = `${worker.holderId}: ${Cause.pretty(cause)}`
        })
      )
    )

  const start = Effect.gen(function*() {
    const number = run.workers.length + 1
    const worker: Worker = { holderId: `w${number}`, number, state: "starting", frozenAt: 0 }
    run.workers.push(worker)
    const argument = yield* Effect.orDie(Schema.encodeEffect(Settings)({ ...settings, holderId: worker.holderId }))
    const handle = yield* spawner.spawn(ChildProcess.make(
      process.execPath,
      [fileURLToPath(new URL("worker.ts", import.meta.url)), argument],
      // Nothing gentler reaches a process that is frozen.
      { killSignal: "SIGKILL" }
    ))
    handles.set(worker, handle)
    yield* Effect.forkIn(listen(worker, handle), scope)
    return worker
  }).pipe(Effect.provideService(Scope.Scope, scope))

  /** Unlike the handle's `kill`, does not wait for the end of the process. */
  const signal = (worker: Worker, signal: NodeJS.Signals) =>
    Effect.sync(() => process.kill(handles.get(worker)!.pid, signal))

  return {
    start,
    kill: (worker) =>
      Effect.suspend(() => {
        worker.state = "killed"
        return handles.get(worker)!.kill({ killSignal: "SIGKILL" })
      }),
    freeze: (worker) => signal(worker, "SIGUSR2"),
    wake: (worker) => signal(worker, "SIGCONT")
  }
})
