/** The same random operations, on every backend: their replies and their records are the same. */
import { assert, describe, it } from "@effect/vitest"
import { Context, Duration, Effect, Layer, Option } from "effect"
import { TestClock } from "effect/testing"
import { randomUUID } from "node:crypto"
import { Backend } from "worklease"
import * as Memory from "worklease/layers/Memory"
import * as Postgres from "worklease/layers/Postgres"
import * as Redis from "worklease/layers/Redis"
import { freshDatabase } from "../support/Postgres.ts"
import { freshServer, isTested, storeOf } from "../support/Redis.ts"
import * as StoredTime from "../support/StoredTime.ts"

/** By the clocks of the stores, which stand still. In microseconds. */
const epoch = 1_600_000_000_123_456
const memoryEpoch = 1_600_000_000_123_000

interface Subject {
  readonly name: string
  readonly backend: Backend.Backend["Service"]
  readonly epoch: number
  readonly advance: (duration: Duration.Duration) => Effect.Effect<unknown, unknown>
}

const memory = Effect.gen(function*() {
  yield* TestClock.setTime(memoryEpoch / 1000)
  const backend = yield* Effect.map(Layer.build(Memory.layer), Context.get(Backend.Backend))
  // Its clock is that of the test, which nobody else looks at.
  return { name: "Memory", backend, epoch: memoryEpoch, advance: (duration) => TestClock.adjust(duration) } as Subject
})

const postgres = (serializable: boolean) =>
  Effect.gen(function*() {
    const { layer } = yield* freshDatabase({ serializable, minConnections: 3, maxConnections: 5 })
    yield* Effect.provide(StoredTime.installStandingClock, layer)
    const context = yield* Layer.build(Layer.provideMerge(Postgres.layer, layer))
    return {
      name: serializable ? "PostgreSQL, serializable" : "PostgreSQL",
      backend: Context.get(context, Backend.Backend),
      epoch,
      advance: (duration) => Effect.provideContext(StoredTime.advance(duration), context)
    } as Subject
  })

const redis = Effect.gen(function*() {
  const prefix = `agreement-${randomUUID()}`
  const store = storeOf(prefix)
  const context = yield* Layer.build(
    Layer.provideMerge(Redis.layerWith({ prefix }), Layer.provideMerge(store.standingClock, freshServer))
  )
  return {
    name: "Redis",
    backend: Context.get(context, Backend.Backend),
    epoch,
    advance: (duration) => Effect.provideContext(store.advance(duration), context)
  } as Subject
})

/** xorshift32 */
const randomOf = (seed: number) => {
  let x = seed | 0 || 1
  return (below: number) => {
    x ^= x << 13
    x ^= x >>> 17
    x ^= x << 5
    return (x >>> 0) % below
  }
}

const plain = (value: unknown, epoch: number): unknown => {
  if (typeof value === "bigint") {
    return value > 1_000_000_000_000n ? `token ${value - BigInt(epoch)}` : `${value}`
  }
  if (Duration.isDuration(value)) return `${Duration.toMillis(value)} ms`
  if (value instanceof Uint8Array) return `bytes ${Array.from(value)}`
  if (Option.isOption(value)) return Option.isSome(value) ? { some: plain(value.value, epoch) } : "none"
  if (Array.isArray(value)) return value.map((_) => plain(_, epoch))
  if (typeof value === "object" && value !== null) {
    const fields = Object.entries(value).sort(([a], [b]) => a < b ? -1 : 1)
    return Object.fromEntries(
      fields.map(([key, field]) => [key, key === "expiresAt" ? Math.round(field * 1000 - epoch) : plain(field, epoch)])
    )
  }
  return value
}

const workIds = ["a", "b{%}", "ä", "c"]
const holders = ["h1", "h2"]
const exits = ["finished", "abandoned", "retired", "yielded", "given-back", "given-back"] as const
const states = [[], [0], [0xff], [0xef, 0xbb, 0xbf], [0x74], [0xc3], [0x7b, 0x7d], [0xa4], [0xed, 0xa0, 0x80]]

interface Known {
  readonly workId: string
  readonly holderId: string
  /** From the epoch of the store. */
  readonly token: bigint
  sequence: bigint
}

const check = Effect.fnUntraced(function*(subjects: ReadonlyArray<Subject>, seed: number, steps: number) {
  const random = randomOf(seed)
  const one = <A>(from: ReadonlyArray<A>): A => from[random(from.length)]
  const chance = (percent: number) => random(100) < percent
  const prefix = `${seed}:`
  const ids = workIds.map((_) => prefix + _)
  const terms: Array<Known> = []
  const attempts: Array<Backend.AcquireRequest> = []
  const trace: Array<string> = []
  let serial = 0

  const some = () => chance(70) ? [one(ids)] : ids.filter(() => chance(60))
  const lastOf = (workId: string): Known => {
    const own = terms.filter((_) => _.workId === workId)
    const known = own.length === 0 || chance(5)
      ? { workId, holderId: one(holders), token: 1n, sequence: 0n }
      : chance(80)
      ? own[own.length - 1]
      : one(own)
    return chance(3) ? { ...known, holderId: "other" } : known
  }
  const termOf = ({ holderId, token, workId }: Known, { epoch }: Subject) => ({
    workId,
    holderId,
    fencingToken: token + BigInt(epoch)
  })
  const stateOf = () => ({ version: 1 + random(3), bytes: Uint8Array.from(one(states)) })
  const ttls = [Duration.seconds(10), Duration.millis(10), Duration.seconds(30)]

  const ask = Effect.fnUntraced(function*(
    what: string,
    f: (subject: Subject) => Effect.Effect<unknown, unknown>
  ) {
    trace.push(what)
    const answers = yield* Effect.forEach(subjects, (subject) =>
      Effect.map(
        Effect.exit(f(subject)),
        (exit) => ({
          name: subject.name,
          raw: exit,
          plain: exit._tag === "Success" ? plain(exit.value, subject.epoch) : `failed ${String(exit.cause)}`
        })
      ))
    for (const answer of answers) {
      assert.deepStrictEqual(
        answer.plain,
        answers[0].plain,
        `${answer.name} against ${answers[0].name}, seed ${seed}, after\n${trace.slice(-25).join("\n")}`
      )
    }
    trace.push(`   ${JSON.stringify(answers[0].plain)}`)
    return answers[0].raw._tag === "Success" ? answers[0].raw.value : assert.fail(`${String(answers[0].raw)}`)
  })

  for (let step = 0; step < steps; step++) {
    const kind = random(100)
    if (kind < 22) {
      const requests = some().map((workId): Backend.AcquireRequest => {
        const earlier = attempts.filter((_) => _.workId === workId)
        if (earlier.length > 0 && chance(20)) {
          const again = chance(60) ? earlier[earlier.length - 1] : one(earlier)
          return chance(10) ? { ...again, holderId: one(holders) } : again
        }
        const request = {
          workId,
          holderId: one(holders),
          attempt: `${seed}.${serial++}`,
          ttl: one(ttls),
          quarantineAfter: chance(50) ? Option.none() : Option.some(1 + random(3))
        }
        attempts.push(request)
        return request
      })
      if (requests.length === 0) continue
      const replies = (yield* ask(
        `acquire ${JSON.stringify(requests)}`,
        ({ backend }) => backend.acquire(requests as any)
      )) as ReadonlyArray<Backend.AcquireReply>
      for (const [i, reply] of replies.entries()) {
        if (reply._tag !== "Acquired") continue
        const token = reply.fencingToken - BigInt(subjects[0].epoch)
        const { holderId, workId } = requests[i]
        if (terms.some((_) => _.workId === workId && _.token === token)) continue
        terms.push({ workId, holderId, token, sequence: 0n })
      }
    } else if (kind < 30) {
      const known = some().map(lastOf)
      if (known.length === 0) continue
      const ttl = one(ttls)
      yield* ask(
        `renew ${JSON.stringify(plain(known, 0))} ${ttl}`,
        (subject) => subject.backend.renew(known.map((_) => ({ ...termOf(_, subject), ttl })) as any)
      )
    } else if (kind < 44) {
      const items = some().map((workId) => {
        const known = lastOf(workId)
        if (chance(80)) known.sequence++
        const sequence = chance(15) && known.sequence > 1n ? known.sequence - 1n : known.sequence
        return { known, sequence: sequence < 1n ? 1n : sequence, state: stateOf(), ttl: one(ttls) }
      })
      if (items.length === 0) continue
      yield* ask(`checkpoint ${JSON.stringify(plain(items, 0))}`, (subject) =>
        subject.backend.checkpoint(
          items.map(({ known, ...rest }) => ({
            ...termOf(known, subject),
            ...rest,
            state: { ...rest.state, bytes: rest.state.bytes.slice() }
          })) as any
        ))
    } else if (kind < 60) {
      const items = some().map((workId) => {
        const known = lastOf(workId)
        if (chance(50)) known.sequence++
        return {
          known,
          exit: one(exits),
          interrupted: chance(30),
          state: chance(25) && known.sequence > 0n
            ? Option.some({ sequence: known.sequence, state: stateOf() })
            : Option.none()
        }
      })
      if (items.length === 0) continue
      yield* ask(`release ${JSON.stringify(plain(items, 0))}`, (subject) =>
        subject.backend.release(
          items.map(({ known, ...rest }) => ({ ...termOf(known, subject), ...rest })) as any
        ))
    } else if (kind < 63) {
      const known = lastOf(one(ids))
      yield* ask(`read ${known.workId}`, (subject) => subject.backend.read(termOf(known, subject)))
    } else if (kind < 67) {
      const known = lastOf(one(ids))
      yield* ask(
        `forget ${JSON.stringify(plain(known, 0))}`,
        (subject) => subject.backend.forget(termOf(known, subject))
      )
    } else if (kind < 72) {
      const request = {
        workId: one(ids),
        deadline: chance(50) ? Option.none() : Option.some(Duration.millis(random(20_000)))
      }
      yield* ask(`requestYield ${JSON.stringify(plain(request, 0))}`, ({ backend }) => backend.requestYield(request))
    } else if (kind < 80) {
      const workId = one(ids)
      yield* ask(`lift ${workId}`, ({ backend }) => backend.lift(workId))
    } else if (kind < 97) {
      const duration = chance(90)
        ? one([
          Duration.millis(10),
          Duration.seconds(10),
          Duration.seconds(7),
          Duration.millis(1),
          Duration.seconds(30)
        ])
        : Duration.minutes(61)
      trace.push(`advance ${Duration.toMillis(duration)} ms`)
      yield* Effect.forEach(subjects, (subject) => subject.advance(duration), { discard: true })
    } else {
      yield* ask("sweep", ({ backend }) => backend.sweep({ retention: Duration.zero, limit: 1000 }))
    }
    const withStates = chance(70)
    yield* ask(`inspect`, ({ backend }) =>
      Effect.map(
        backend.inspect({ workIds: ids, states: withStates }),
        (records) => [...records].sort((a, b) => a.workId < b.workId ? -1 : 1)
      ))
    if (chance(5)) {
      yield* ask(`list`, ({ backend }) => backend.list({ prefix, after: Option.none(), limit: 3 }))
    }
  }
})

describe("Backends", () => {
  it.effect("agree", () =>
    Effect.gen(function*() {
      const subjects = [
        yield* memory,
        yield* postgres(false),
        yield* postgres(true),
        ...(isTested ? [yield* redis] : [])
      ]
      for (const seed of [1, 2, 3]) yield* check(subjects, seed, 150)
    }).pipe(Effect.scoped))
})
