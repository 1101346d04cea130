/**
 * The worker processes: starts them, listens to them, and signals them.
 */
import { Effect, type PlatformError, Scope } from "effect"
import { ChildProcessSpawner } from "effect/process"
import * as Child from "./Child.ts"
import { ReportLine, Settings } from "./Import.ts"
import type { Run, Worker } from "./Run.ts"

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

  const start = Effect.gen(function*() {
    const number = run.workers.length + 1
    const worker: Worker = { holderId: `w${number}`, number, state: "starting", frozenAt: 0 }
    run.workers.push(worker)
    const handle = yield* Child.start({
      script: new URL("worker.ts", import.meta.url),
      Settings,
      settings: { ...settings, holderId: worker.holderId },
      Report: ReportLine,
      onReport: (report) => run.reported(worker, report),
      onEnd: (how) => {
        if (worker.state === "killed") return
        if (how === undefined) worker.state = "ended"
        else run.broken = `${worker.holderId} ${how}`
      }
    })
    handles.set(worker, handle)
    return worker
  }).pipe(
    Effect.provideService(ChildProcessSpawner.ChildProcessSpawner, spawner),
    Effect.provideService(Scope.Scope, scope)
  )

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
