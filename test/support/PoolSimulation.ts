/**
 * Pools of many processes under TestClock, which come, go, crash and freeze at
 * random, and what became of their work.
 */
import { Clock, Deferred, Duration, Effect, Exit, Layer, Option, Random, References, Schema, Scope } from "effect"
import { TestClock } from "effect/testing"
import { Backend, Checkpoint, Lease, Pool, Work } from "worklease"
import * as Memory from "worklease/layers/Memory"
import { BackendError, Unreachable } from "worklease/LeaseError"

const Job = Work.make("job", Checkpoint.make(Schema.Struct({ steps: Schema.Int })))

export const ttl = 10_000
export const interval = 1000
const tick = interval / 4

/** A process that can crash, so that nothing of it arrives any more, and freeze, so that it stands still. */
class Process {
  readonly holderId: string
  readonly memberId: string | undefined
  readonly capacity: number
  readonly scope = Scope.makeUnsafe()
  isDead = false
  isLeaving = false
  thawed: Deferred.Deferred<void> | undefined

  constructor(holderId: string, memberId: string | undefined, capacity: number) {
    this.holderId = holderId
    this.memberId = memberId
    this.capacity = capacity
  }

  readonly untilThawed: Effect.Effect<void> = Effect.suspend(() =>
    this.thawed === undefined ? Effect.void : Deferred.await(this.thawed)
  )

  clock(clock: Clock.Clock): Clock.Clock {
    return {
      currentTimeMillisUnsafe: () => clock.currentTimeMillisUnsafe(),
      currentTimeMillis: clock.currentTimeMillis,
      currentTimeNanosUnsafe: () => clock.currentTimeNanosUnsafe(),
      currentTimeNanos: clock.currentTimeNanos,
      monotonicTimeNanosUnsafe: () => clock.monotonicTimeNanosUnsafe(),
      monotonicTimeNanos: clock.monotonicTimeNanos,
      sleep: (duration) => Effect.andThen(clock.sleep(duration), this.untilThawed)
    }
  }

  backend(backend: Backend.Backend["Service"], statements: Map<string, number>): Backend.Backend["Service"] {
    const unreachable = (operation: string) =>
      Effect.fail(
        new BackendError({
          operation,
          outcome: "rejected",
          reason: new Unreachable({ cause: new Error("The process has crashed") })
        })
      )
    const call = <A extends ReadonlyArray<any>, B>(
      operation: string,
      send: (...args: A) => Effect.Effect<B, BackendError>,
      whenDead: Effect.Effect<never, BackendError> = Effect.never
    ) =>
    (...args: A): Effect.Effect<B, BackendError> =>
      Effect.andThen(
        this.untilThawed,
        Effect.suspend(() => {
          if (this.isDead) return whenDead
          statements.set(operation, (statements.get(operation) ?? 0) + 1)
          return send(...args)
        })
      )
    return Backend.Backend.of({
      ...backend,
      // To wait for their answers cannot be interrupted.
      acquire: call("acquire", backend.acquire, unreachable("acquire")),
      release: call("release", backend.release, unreachable("release")),
      renew: call("renew", backend.renew),
      checkpoint: call("checkpoint", backend.checkpoint),
      inspect: call("inspect", backend.inspect)
    })
  }
}

const drawing = (seed: number) => {
  let state = seed >>> 0
  const next = () => {
    state = (state + 0x6d2b79f5) >>> 0
    let t = state
    t = Math.imul(t ^ (t >>> 15), t | 1)
    t ^= t + Math.imul(t ^ (t >>> 7), t | 61)
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296
  }
  return { chance: (p: number) => next() < p, between: (a: number, b: number) => a + Math.floor(next() * (b - a + 1)) }
}

interface Execution {
  readonly process: Process
  readonly lease: Lease.Any
}

export class Simulation {
  readonly processes: Array<Process> = []
  keys: ReadonlyArray<string> = []
  /** Of each operation, of all processes. */
  readonly statements = new Map<string, number>()
  /** How often work has begun. */
  begun = 0
  /** How often two processes were at the same work, as far as they could know. */
  overlaps = 0
  /** The longest time that a work ID was nobody's, counted from the last fault. */
  longestGap = 0
  private readonly executions = new Map<string, Set<Execution>>()
  private readonly unownedSince = new Map<string, number>()
  /** When members or keys have changed last, or a crash has taken effect. */
  changedAt = 0
  private balancedSince = Infinity
  private faultAt = 0
  private makeUp = ""
  private started = 0
  readonly clock: Clock.Clock
  readonly backend: Backend.Backend["Service"]
  readonly random: ReturnType<typeof drawing>

  constructor(clock: Clock.Clock, backend: Backend.Backend["Service"], seed: number) {
    this.clock = clock
    this.backend = backend
    this.random = drawing(seed)
  }

  get now(): number {
    return this.clock.currentTimeMillisUnsafe()
  }

  get living(): ReadonlyArray<Process> {
    return this.processes.filter((_) => !_.isDead && !_.isLeaving)
  }

  private isOwned(key: string): boolean {
    for (const execution of this.executions.get(key) ?? []) if (this.isLive(execution)) return true
    return false
  }

  private isLive({ process }: Execution): boolean {
    return !process.isDead && process.thawed === undefined
  }

  setKeys(count: number): void {
    this.keys = Array.from({ length: count }, (_, index) => `${index}`.padStart(5, "0"))
    for (const key of this.unownedSince.keys()) if (!this.keys.includes(key)) this.unownedSince.delete(key)
    this.changedAt = Math.max(this.changedAt, this.now)
  }

  start(options: { readonly memberId?: string | undefined; readonly capacity?: number | undefined } = {}) {
    return Effect.gen({ self: this }, function*() {
      const process = new Process(`p${this.started++}`, options.memberId, options.capacity ?? 10_000)
      this.processes.push(process)
      const layer = Lease.layerWith({ holderId: process.holderId, ttl }).pipe(
        Layer.provide(Layer.succeed(Backend.Backend, process.backend(this.backend, this.statements)))
      )
      yield* Layer.buildWithScope(layer, process.scope).pipe(
        Effect.flatMap((context) =>
          Effect.provideContext(
            Pool.make({
              work: Job,
              keys: Effect.sync(() => this.keys),
              capacity: process.capacity,
              memberId: process.memberId,
              handoffTimeout: ttl,
              run: (lease, key) => this.execute(process, lease, key)
            }),
            context
          )
        ),
        Scope.provide(process.scope),
        Effect.provideService(Clock.Clock, process.clock(this.clock))
      )
      return process
    })
  }

  /** Hands over within less than a round after it was asked to. */
  private execute(process: Process, lease: Lease.Lease<{ readonly steps: number }>, key: string) {
    const execution: Execution = { process, lease }
    const pause = this.random.between(1, interval / 2)
    return Effect.acquireUseRelease(
      Effect.gen({ self: this }, function*() {
        this.begun++
        const others = this.executions.get(key) ?? new Set()
        for (const other of others) {
          if (this.isLive(other) && !Duration.isZero(yield* other.lease.window)) this.overlaps++
        }
        this.executions.set(key, others.add(execution))
      }),
      () =>
        // Progress, without which it would pause after two crashes.
        lease.checkpoint({ steps: 0 }).pipe(
          Effect.andThen(lease.awaitYieldRequest),
          Effect.andThen(Effect.sleep(pause)),
          Effect.andThen(lease.handOff({ steps: 1 }))
        ),
      () => Effect.sync(() => this.executions.get(key)?.delete(execution))
    )
  }

  leave(process: Process): Effect.Effect<void> {
    process.isLeaving = true
    // One that may come back is waited for.
    this.changedAt = Math.max(this.changedAt, this.now + (process.memberId === undefined ? 0 : ttl + interval))
    return Effect.asVoid(Effect.forkDetach(Scope.close(process.scope, Exit.void), { startImmediately: true }))
  }

  crash(process: Process): Effect.Effect<void> {
    process.isDead = true
    this.faultAt = this.now
    this.changedAt = Math.max(this.changedAt, this.now + ttl)
    return Effect.andThen(this.thaw(process), this.leave(process))
  }

  freeze(process: Process): void {
    process.thawed ??= Deferred.makeUnsafe()
    this.faultAt = this.now
  }

  thaw(process: Process): Effect.Effect<void> {
    return Effect.suspend(() => {
      const { thawed } = process
      if (thawed === undefined) return Effect.void
      process.thawed = undefined
      this.faultAt = this.now
      this.changedAt = Math.max(this.changedAt, this.now)
      return Effect.asVoid(Deferred.succeed(thawed, undefined))
    })
  }

  /** What is at work in each process that lives. */
  get loads(): ReadonlyArray<number> {
    const loads = new Map(this.living.map((process) => [process, 0]))
    for (const executions of this.executions.values()) {
      for (const { process } of executions) {
        if (loads.has(process)) loads.set(process, loads.get(process)! + 1)
      }
    }
    return [...loads.values()]
  }

  get isBalanced(): boolean {
    const { living, loads } = this
    const capacity = living.reduce((sum, _) => sum + _.capacity, 0)
    const count = this.keys.length
    return loads.reduce((a, b) => a + b, 0) === Math.min(count, capacity) &&
      living.every(({ capacity: own }, index) => {
        const share = Math.min(own, count * own / capacity)
        return loads[index] >= Math.floor(share) && loads[index] <= Math.ceil(share)
      })
  }

  private look() {
    return Effect.gen({ self: this }, function*() {
      this.balancedSince = this.isBalanced ? Math.min(this.balancedSince, this.now) : Infinity
      const slots = yield* this.backend.inspect({
        workIds: Array.from({ length: 128 }, (_, slot) => `job/member:${slot}`),
        states: false
      })
      const makeUp = slots.map(({ term, workId }) =>
        Option.match(term, { onNone: () => "", onSome: (_) => _.status === "held" ? `${workId} ${_.holderId}` : "" })
      ).join()
      if (makeUp !== this.makeUp) this.changedAt = Math.max(this.changedAt, this.now)
      this.makeUp = makeUp
      const capacity = this.living.reduce((sum, _) => _.thawed === undefined ? sum + _.capacity : sum, 0)
      for (const key of this.keys) {
        const isOwned = this.isOwned(key)
        if (isOwned || capacity < this.keys.length) {
          this.unownedSince.delete(key)
          continue
        }
        const since = this.unownedSince.get(key) ?? this.now
        this.unownedSince.set(key, since)
        this.longestGap = Math.max(this.longestGap, this.now - Math.max(since, this.faultAt))
      }
    })
  }

  pass(millis: number, step = tick): Effect.Effect<void> {
    return Effect.gen({ self: this }, function*() {
      for (let passed = 0; passed < millis; passed += step) {
        yield* TestClock.adjust(step)
        yield* Effect.orDie(this.look())
      }
    })
  }

  /** Lets time pass until all is balanced. Answers how many rounds that took since the last change. */
  converge(): Effect.Effect<number> {
    return Effect.gen({ self: this }, function*() {
      const start = this.now
      do {
        yield* this.pass(tick)
      } while ((this.balancedSince === Infinity || this.now < this.changedAt) && this.now < start + 20 * ttl)
      return Math.max(0, this.balancedSince - this.changedAt) / interval
    })
  }
}

/** Runs a simulation, and ends what it has left. */
export const simulate = <A, E>(seed: number, f: (simulation: Simulation) => Effect.Effect<A, E>): Effect.Effect<A, E> =>
  Effect.gen(function*() {
    const simulation = new Simulation(yield* Clock.Clock, yield* Backend.Backend, seed)
    const result = yield* f(simulation)
    for (const process of simulation.processes) if (!process.isDead) yield* simulation.crash(process)
    yield* TestClock.adjust(2 * ttl)
    return result
  }).pipe(
    Random.withSeed(`${seed}`),
    Effect.provideService(References.MinimumLogLevel, "None"),
    Effect.provide(Memory.layer)
  )
