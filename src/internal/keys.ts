/**
 * The keys of a pool's work IDs, wherever they come from: a value, an effect or
 * a stream. Whatever fails there, those that were known last stand.
 */

import type * as Cause from "effect/Cause"
import * as Clock from "effect/Clock"
import * as Effect from "effect/Effect"
import * as Fiber from "effect/Fiber"
import type * as Scope from "effect/Scope"
import * as Stream from "effect/Stream"
import type { Options } from "../Pool.ts"
import type * as Work from "../Work.ts"
import { longestPause, pauseOf } from "./plan.ts"
import * as Window from "./window.ts"
import { compareBytes, faultOf } from "./workId.ts"

export interface Known {
  readonly key: string
  readonly workId: string
}

/**
 * Answers how to read the valid keys, each once, in the order of their work
 * IDs: the same array as long as they are the same, none as long as they are
 * not known.
 */
export const make = Effect.fnUntraced(function*(options: {
  readonly work: Work.Any
  readonly keys: Options<Work.Any, unknown, unknown, any, unknown, any>["keys"]
  /** The milliseconds that an effect may take. */
  readonly timeout: number
  /** For how many of them a read waits. */
  readonly patience: number
  readonly warn: (message: string, ...cause: ReadonlyArray<Cause.Cause<unknown>>) => Effect.Effect<void>
}): Effect.fn.Return<Effect.Effect<ReadonlyArray<Known> | undefined>, never, Scope.Scope> {
  const { keys, patience, timeout, warn, work } = options
  let invalid = new Set<string>()
  let raw: ReadonlyArray<string> | undefined
  let known: ReadonlyArray<Known> | undefined

  const take = Effect.fnUntraced(function*(taken: ReadonlyArray<string>) {
    if (raw !== undefined && raw.length === taken.length && raw.every((key, index) => key === taken[index])) return
    raw = taken
    const valid = new Map<string, Known>()
    const before = invalid
    invalid = new Set()
    for (const key of taken) {
      const workId = `${work.name}:${key}`
      if (faultOf(workId) === undefined) {
        valid.set(workId, { key, workId })
        continue
      }
      const isTold = before.has(key) || invalid.has(key)
      invalid.add(key)
      if (!isTold) {
        const shown = key.length > 100 ? `${key.slice(0, 100)}…` : key
        yield* warn(`a key is left out, because ${JSON.stringify(`${work.name}:${shown}`)} is no valid work ID`)
      }
    }
    known = [...valid.values()].sort((a, b) => compareBytes(a.workId, b.workId))
  })

  if (Stream.isStream(keys)) {
    const clock = yield* Clock.Clock
    let times = 0
    const listening = Effect.suspend(() => {
      const since = Window.now(clock)
      return Effect.catchCause(Stream.runForEach(keys, (keys) => take([...keys])), (cause) => {
        // One that fails soon after its first keys is no better than one that has none.
        times = Window.elapsedMillis(clock, since) > longestPause ? 1 : times + 1
        return warn("the stream of keys failed, and is run again", cause).pipe(
          Effect.andThen(Effect.sleep(pauseOf(times, 0.5))),
          Effect.andThen(Effect.fail("again"))
        )
      })
    }).pipe(Effect.eventually)
    yield* Effect.forkScoped(listening as Effect.Effect<void>)
    return Effect.sync(() => known)
  }
  const reading = Effect.isEffect(keys)
    ? Effect.timeout(keys as Effect.Effect<Iterable<string>>, timeout)
    // What can be iterated only once is read once.
    : Effect.succeed(Object.is(keys[Symbol.iterator](), keys) ? [...keys] : keys)
  let isFailing = false
  const taking = reading.pipe(
    Effect.flatMap((keys) => take([...keys])),
    Effect.tap(() =>
      Effect.sync(() => {
        isFailing = false
      })
    ),
    Effect.catchCause((cause) => {
      if (isFailing) return Effect.void
      isFailing = true
      return warn("the keys could not be read; those that were read last stand", cause)
    })
  )
  const scope = yield* Effect.scope
  let fiber: Fiber.Fiber<void> | undefined
  // A round does not wait for long: what it has to hand over or take does not depend on what is new.
  return Effect.gen(function*() {
    if (fiber === undefined || fiber.pollUnsafe() !== undefined) {
      fiber = yield* Effect.forkIn(taking, scope, { startImmediately: true })
    }
    if (fiber.pollUnsafe() === undefined) yield* Effect.timeoutOption(Fiber.await(fiber), patience)
    return known
  })
})

/** Equal for the same work IDs, and hardly ever for others. */
export const digestOf = (known: ReadonlyArray<Known>): number => {
  let hash = 0x811c9dc5
  for (const { workId } of known) {
    for (let i = 0; i <= workId.length; i++) {
      hash = Math.imul(hash ^ (i === workId.length ? 0 : workId.charCodeAt(i)), 0x01000193)
    }
  }
  return hash
}
