import * as NodeRedis from "@effect/platform-node/NodeRedis"
import { assert, describe, it } from "@effect/vitest"
import { Context, Deferred, Duration, Effect, Exit, Fiber, Layer, Option, Schedule, Scope } from "effect"
import * as EffectRedis from "effect/persistence/Redis"
import { Backend, Lease, LeaseError, Worker } from "worklease"
import * as Redis from "worklease/layers/Redis"
import * as RedisServer from "../../support/RedisServer.ts"
import { clientOf, clusterClientOf, isTested } from "../support/Redis.ts"

const bytesOf = (text: string) => new TextEncoder().encode(text)

const stored = (text: string): Backend.Stored => ({ version: 1, bytes: bytesOf(text) })

const ttl = Duration.seconds(30)

let attempts = 0

const acquireRequest = (workId: string, holderId = "a"): Backend.AcquireRequest => ({
  workId,
  holderId,
  attempt: `attempt-${attempts++}`,
  ttl,
  quarantineAfter: Option.none()
})

const take = (workId: string, holderId = "a") =>
  Effect.gen(function*() {
    const backend = yield* Backend.Backend
    const [reply] = yield* backend.acquire([acquireRequest(workId, holderId)])
    assert.strictEqual(reply._tag, "Acquired")
    return { workId, holderId, fencingToken: (reply as Backend.Acquired).fencingToken }
  })

const checkpoint = (term: Backend.Term, sequence: bigint, text: string) =>
  Effect.flatMap(Backend.Backend, (_) => _.checkpoint([{ ...term, ttl, sequence, state: stored(text) }]))

const release = (term: Backend.Term) =>
  Effect.flatMap(
    Backend.Backend,
    (_) => _.release([{ ...term, exit: "finished", interrupted: false, state: Option.none() }])
  )

/** The error of an operation, whether it concerns the whole batch or its one item. */
const failureOf = <R>(
  operation: Effect.Effect<ReadonlyArray<unknown>, LeaseError.BackendError, R>
): Effect.Effect<LeaseError.BackendError, LeaseError.BackendError, R> =>
  Effect.matchEffect(operation, {
    onFailure: Effect.succeed,
    onSuccess: ([reply]) =>
      reply instanceof LeaseError.BackendError
        ? Effect.succeed(reply)
        : Effect.die(new Error(`It did not fail: ${JSON.stringify(reply)}`))
  })

const says = (error: LeaseError.BackendError) => `${error.outcome} ${error.reason._tag}`

/** Waits, in real time, for what is on its way. */
const eventually = <E, R>(what: string, condition: Effect.Effect<boolean, E, R>) =>
  Effect.gen(function*() {
    for (let i = 0; i < 1000; i++) {
      if (yield* condition) return
      yield* Effect.sleep("10 millis")
    }
    return yield* Effect.die(new Error(`Not yet: ${what}`))
  })

/** A server of the test's own, its client, and the backend over it. */
const own = (options?: Redis.Options, settings?: Record<string, string>) =>
  Effect.gen(function*() {
    const server = yield* RedisServer.start({ settings })
    const context = yield* Layer.build(Layer.provideMerge(Redis.layerWith(options ?? {}), clientOf(server.url)))
    return { server, context }
  })

/** The backend over a client whose commands pass by the test. */
const observed = (
  url: string,
  send: (send: EffectRedis.Redis["Service"]["send"]) => EffectRedis.Redis["Service"]["send"]
) =>
  Layer.build(
    Redis.layer.pipe(
      Layer.provide(
        Layer.effect(
          EffectRedis.Redis,
          Effect.map(EffectRedis.Redis, (redis) => EffectRedis.Redis.of({ ...redis, send: send(redis.send) }))
        )
      ),
      Layer.provide(clientOf(url))
    )
  )

describe.runIf(isTested)("Redis", () => {
  it.live("takes any work ID for what it is, and finds it again", () =>
    Effect.gen(function*() {
      const { context } = yield* own()
      yield* Effect.gen(function*() {
        const backend = yield* Backend.Backend
        const hostile = [
          "{",
          "}",
          "{}",
          "}{",
          "{a}",
          "a{b}c",
          "%",
          "%7B",
          "%257B",
          "{%7B}",
          "a b",
          "a:b",
          "a*",
          "a?b",
          "[a]",
          "\\",
          "\u0001\u0002",
          "\r\n",
          "é",
          "😀",
          "'\"",
          "waiting",
          "x}:waiting",
          "{0}",
          "a".repeat(512)
        ]
        const replies = yield* backend.acquire(hostile.map((workId) => acquireRequest(workId)) as any)
        assert.deepStrictEqual(new Set(replies.map((_) => _._tag)), new Set(["Acquired"]))
        const records = yield* backend.list({ prefix: "", after: Option.none(), limit: 100 })
        assert.sameMembers(records.map((_) => _.workId), hostile)
        for (const workId of hostile) {
          const [first] = yield* backend.list({ prefix: workId, after: Option.none(), limit: 1 })
          assert.strictEqual(first.workId, workId)
        }
      }).pipe(Effect.provide(context))
    }))

  it.live("has the hash tag that the server hashes: all keys of a work ID are in its slot", () =>
    Effect.gen(function*() {
      const server = yield* RedisServer.start({ settings: { "cluster-enabled": "yes" } })
      for (const workId of ["a", "{", "}", "{}", "a{b}c", "%7B", "😀", "a b"]) {
        const slots = new Set<string>()
        for (const key of [Redis.hashTag(workId), `x:${Redis.hashTag(workId)}`, `${Redis.hashTag(workId)}:y{z}`]) {
          slots.add(yield* server.command("CLUSTER", "KEYSLOT", key))
        }
        assert.strictEqual(slots.size, 1, workId)
      }
    }))

  it.live("tokens go on after FLUSHALL, and after the server was started again with nothing", () =>
    Effect.gen(function*() {
      const { context, server } = yield* own()
      yield* Effect.gen(function*() {
        const a = yield* take("job")
        yield* server.command("FLUSHALL")
        const b = yield* take("job", "b")
        assert.isAbove(Number(b.fencingToken - a.fencingToken), 0)
        assert.deepStrictEqual(yield* checkpoint(a, 1n, "late"), [{ _tag: "Fenced" }])
        yield* server.restart
        const c = yield* take("job", "c").pipe(Effect.retry(Schedule.spaced("20 millis")))
        assert.isAbove(Number(c.fencingToken - b.fencingToken), 0)
      }).pipe(Effect.provide(context))
    }))

  it.live("tokens go on from the highest that was swept from the slot, in whatever order", () =>
    Effect.gen(function*() {
      const { context, server } = yield* own()
      yield* Effect.gen(function*() {
        const backend = yield* Backend.Backend
        // Two whose tags have the same slot.
        const workIds = ["job-978", "job-3002"]
        const tokens = ["9000000000000000000", "8000000000000000000"]
        for (const [index, workId] of workIds.entries()) {
          yield* Effect.flatMap(take(workId), backend.forget)
          yield* server.command("HSET", `worklease:{${workId}}`, "token", tokens[index], "expires", "1")
          assert.strictEqual(yield* backend.sweep({ retention: Duration.zero, limit: 10 }), 1)
        }
        for (const workId of workIds) {
          assert.strictEqual((yield* take(workId)).fencingToken, 9000000000000000001n)
        }
      }).pipe(Effect.provide(context))
    }))

  it.live("scripts that the server has lost are there again", () =>
    Effect.gen(function*() {
      const { context, server } = yield* own()
      yield* Effect.gen(function*() {
        const a = yield* take("job")
        yield* server.command("SCRIPT", "FLUSH")
        assert.deepStrictEqual((yield* checkpoint(a, 1n, "one"))[0]._tag, "Done")
        yield* server.command("SCRIPT", "FLUSH")
        yield* take("other")
        assert.deepStrictEqual((yield* release(a))[0]._tag, "Done")
      }).pipe(Effect.provide(context))
    }))

  it.live("two prefixes do not see each other, and a prefix that breaks keys is refused", () =>
    Effect.gen(function*() {
      const server = yield* RedisServer.start()
      const a = yield* Layer.build(Layer.provide(Redis.layerWith({ prefix: "a*" }), clientOf(server.url)))
      const b = yield* Layer.build(Layer.provide(Redis.layerWith({ prefix: "ab" }), clientOf(server.url)))
      yield* Effect.provide(take("job"), a)
      yield* Effect.provide(take("job"), b)
      for (const context of [a, b]) {
        const records = yield* Context.get(context, Backend.Backend).list({
          prefix: "",
          after: Option.none(),
          limit: 10
        })
        assert.strictEqual(records.length, 1)
      }
      for (const prefix of ["", "a{b", "}", "a\0", "a".repeat(129)]) {
        const error = yield* Effect.flip(Layer.build(Layer.provide(Redis.layerWith({ prefix }), clientOf(server.url))))
        assert.strictEqual(error._tag, "InvalidConfig")
      }
    }))

  it.live("refuses a server that may evict keys, unless that is wanted", () =>
    Effect.gen(function*() {
      const server = yield* RedisServer.start({ settings: { "maxmemory-policy": "allkeys-lru" } })
      const error = yield* Effect.flip(Layer.build(Layer.provide(Redis.layer, clientOf(server.url))))
      assert.strictEqual(error._tag, "InvalidConfig")
      assert.include(error.message, "allkeys-lru")
      assert.include(error.message, "noeviction")
      assert.include(error.message, "allowEviction")
      yield* Layer.build(Layer.provide(Redis.layerWith({ allowEviction: true }), clientOf(server.url)))
      const silent = yield* Effect.flip(observed(server.url, (send) => (command, ...args) =>
        command === "INFO" ? Effect.succeed("# Memory" as any) : send(command, ...args)))
      assert.strictEqual(silent._tag, "InvalidConfig")
      yield* server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
      yield* Layer.build(Layer.provide(Redis.layer, clientOf(server.url)))
    }))

  it.live("reads no more than it needs, and no more at a time than a few states", () =>
    Effect.gen(function*() {
      const server = yield* RedisServer.start()
      const replies: Array<number> = []
      const context = yield* observed(server.url, (send) => (command, ...args) =>
        Effect.tap(send<any>(command, ...args), (reply) => {
          if (typeof reply === "string") {
            replies.push(reply.length)
          }
          return Effect.void
        }))
      yield* Effect.gen(function*() {
        const backend = yield* Backend.Backend
        const mebibyte = 1024 * 1024
        const large = "x".repeat(mebibyte)
        const workIds = Array.from({ length: 10 }, (_, i) =>
          `job-${i}`)
        const terms: Array<Backend.Term> = []
        for (const workId of workIds) {
          const term = yield* take(workId)
          yield* checkpoint(term, 1n, large)
          terms.push(term)
        }
        const pageOf = (limit: number) =>
          Effect.gen(function*() {
            replies.length = 0
            const records = yield* backend.list({ prefix: "", after: Option.none(), limit })
            assert.deepStrictEqual(
              records.map((_) =>
                _.workId
              ),
              workIds.slice(0, limit)
            )
            assert.isTrue(records.every(({ state }) => Option.getOrThrow(state).bytes.length === mebibyte))
            assert.isBelow(Math.max(...replies), 3.1 * mebibyte)
            return replies.reduce((sum, length) => sum + length, 0)
          })
        assert.isBelow(yield* pageOf(1), 1.1 * mebibyte)
        yield* pageOf(10)

        for (const term of terms) yield* release(term)
        replies.length = 0
        const priors = yield* backend.acquire(workIds.map((workId) => acquireRequest(workId, "b")) as any)
        for (const reply of priors) {
          assert.strictEqual(Option.getOrThrow((reply as Backend.Acquired).prior.state).bytes.length, mebibyte)
        }
        assert.isBelow(Math.max(...replies), 3.1 * mebibyte)
      }).pipe(Effect.provide(context))
    }), 30_000)

  it.live("lists every record once, in the order of the bytes, and a page is full until the last one", () =>
    Effect.gen(function*() {
      const server = yield* RedisServer.start()
      let deleted: string | undefined
      const context = yield* observed(
        server.url,
        (send) => (command, ...args) =>
          Effect.tap(send<any>(command, ...args), (reply) =>
            // It was met by the scan, and is swept before it is read.
            deleted !== undefined && Array.isArray(reply)
              ? server.command("DEL", deleted).pipe(Effect.orDie)
              : Effect.void)
      )
      yield* Effect.gen(function*() {
        const backend = yield* Backend.Backend
        const workIds = ["\u{1F600}", "\uFFFD", "\uD7FF", "\uE000"].concat(
          Array.from({ length: 196 }, (_, i) => `job-${i}`)
        )
        yield* backend.acquire(workIds.map((workId) => acquireRequest(workId)) as any)
        const inOrder = workIds.slice().sort((a, b) => Buffer.compare(Buffer.from(a), Buffer.from(b)))
        const pages: Array<string> = []
        for (let after = Option.none<string>();;) {
          const page = yield* backend.list({ prefix: "", after, limit: 7 })
          pages.push(...page.map((_) => _.workId))
          if (page.length < 7) break
          after = Option.some(pages[pages.length - 1])
        }
        assert.deepStrictEqual(pages, inOrder)
        deleted = `worklease:{${inOrder[2]}}`
        const page = yield* backend.list({ prefix: "", after: Option.none(), limit: 7 })
        assert.deepStrictEqual(page.map((_) => _.workId), inOrder.filter((_, i) => i !== 2).slice(0, 7))
      }).pipe(Effect.provide(context))
    }))

  it.live("a sweep that was cut short goes on where it was", () =>
    Effect.gen(function*() {
      const server = yield* RedisServer.start()
      const cursors: Array<string> = []
      let failing = false
      const context = yield* observed(server.url, (send) => (command, ...args) => {
        // Only the steps through the keys have a count.
        if (!args.includes("1000")) return send(command, ...args)
        if (failing && cursors.length === 3) {
          return Effect.fail(new EffectRedis.RedisError({ cause: new Error("LOADING") }))
        }
        cursors.push(args[3])
        return send(command, ...args)
      })
      yield* server.command(
        "EVAL",
        "for i = 1, 20000 do redis.call('HSET', 'worklease:{' .. i .. '}', 'holder', 'a') end",
        "0"
      )
      const sweep = Context.get(context, Backend.Backend).sweep({ retention: Duration.zero, limit: 10 })
      failing = true
      yield* Effect.flip(sweep)
      assert.strictEqual(cursors.length, 3)
      const last = cursors[2]
      failing = false
      cursors.length = 0
      yield* Effect.exit(sweep)
      assert.notStrictEqual(cursors[0], "0")
      assert.notStrictEqual(cursors[0], last, "the third step is done")
    }))

  it.live("a sweep ends, however many keys there are", () =>
    Effect.gen(function*() {
      const server = yield* RedisServer.start()
      let steps = 0
      const context = yield* observed(server.url, (send) => (command, ...args) => {
        if (!args.includes("1000")) return send(command, ...args)
        steps++
        return Effect.succeed<any>(["7", [], ""])
      })
      const sweep = Context.get(context, Backend.Backend).sweep({ retention: Duration.zero, limit: 10 })
      assert.strictEqual(yield* sweep.pipe(Effect.timeout("5 seconds")), 0)
      assert.strictEqual(steps, 1000)
    }))

  it.live("does not mind the JSON settings that another script has left", () =>
    Effect.gen(function*() {
      const { context, server } = yield* own()
      yield* server.command("EVAL", "cjson.encode_max_depth(1) cjson.decode_max_depth(1)", "0")
      yield* Effect.provide(take("job"), context)
    }))

  it.live("the states of a batch are kept apart, text or not, and each item has its own reply", () =>
    Effect.gen(function*() {
      const { context } = yield* own()
      yield* Effect.gen(function*() {
        const backend = yield* Backend.Backend
        const states = [
          bytesOf("{\"line\":1}"),
          // The first half of a character, and the second.
          Uint8Array.of(0x61, 0xc3),
          Uint8Array.of(0xa9, 0x62),
          new Uint8Array(0),
          bytesOf("\ufefftest\0 \"\\ \u2028 é 🚀"),
          Uint8Array.from({ length: 256 }, (_, byte) => byte),
          bytesOf("true"),
          bytesOf("{\"line\":1}")
        ]
        for (const isAllText of [true, false]) {
          const all = isAllText ? states.filter((_, i) => i < 1 || i === 3 || i === 4 || i > 5) : states
          const terms = yield* Effect.forEach(all, (_, i) => take(`kept-${isAllText}-${i}`))
          const stranger = { ...terms[1], holderId: "b" }
          const items = all.map((bytes, i) => ({ ...terms[i], ttl, sequence: 1n, state: { version: 1, bytes } }))
          const replies = yield* backend.checkpoint([
            items[0],
            { ...items[1], ...stranger },
            ...items.slice(2)
          ])
          assert.deepStrictEqual(
            replies.map((reply): string => reply._tag),
            all.map((_, i) => i === 1 ? "Fenced" : "Done")
          )
          yield* backend.checkpoint([items[1]])
          const read = yield* Effect.forEach(terms, (term) => backend.read(term))
          assert.deepStrictEqual(
            read.map((reply) =>
              reply._tag === "Done" ? Option.map(reply.state, ({ bytes }) => Array.from(bytes)) : reply._tag
            ),
            all.map((bytes) => Option.some(Array.from(bytes)))
          )
        }
      }).pipe(Effect.provide(context))
    }))

  it.live("items with the same reply do not get the same bytes", () =>
    Effect.gen(function*() {
      const { context } = yield* own()
      yield* Effect.gen(function*() {
        const backend = yield* Backend.Backend
        const workIds = ["same-1", "same-2"]
        const takeAll = Effect.suspend(() => backend.acquire([acquireRequest(workIds[0]), acquireRequest(workIds[1])]))
        const terms = (yield* takeAll).map((reply, i): Backend.Term => ({
          workId: workIds[i],
          holderId: "a",
          fencingToken: (reply as Backend.Acquired).fencingToken
        }))
        yield* backend.release(
          terms.map((term): Backend.ReleaseRequest => ({
            ...term,
            exit: "finished",
            interrupted: false,
            state: Option.some({ sequence: 1n, state: { version: 1, bytes: Uint8Array.of(1, 2, 3) } })
          })) as any
        )
        const [first, second] = (yield* takeAll).map((reply) =>
          Option.getOrThrow((reply as Backend.Acquired).prior.state).bytes
        )
        first.fill(0)
        assert.deepStrictEqual(Array.from(second), [1, 2, 3])
      }).pipe(Effect.provide(context))
    }))

  it.live("an item that cannot be done does not keep the others from theirs", () =>
    Effect.gen(function*() {
      const { context, server } = yield* own()
      yield* Effect.gen(function*() {
        const backend = yield* Backend.Backend
        yield* server.command("SET", "worklease:{bad}", "something else")
        const replies = yield* backend.acquire([acquireRequest("a"), acquireRequest("bad"), acquireRequest("b")])
        assert.deepStrictEqual(replies.map((_) => _._tag), ["Acquired", "BackendError", "Acquired"])
        assert.strictEqual(says(replies[1] as LeaseError.BackendError), "rejected Other")
      }).pipe(Effect.provide(context))
    }))

  describe("errors", () => {
    it.live("a replica takes no writes: rejected, unreachable", () =>
      Effect.gen(function*() {
        const { context, server } = yield* own()
        const a = yield* Effect.provide(take("job"), context)
        yield* server.command("REPLICAOF", "127.0.0.1", "1")
        yield* server.command("CONFIG", "SET", "replica-serve-stale-data", "yes")
        const error = yield* Effect.provide(failureOf(checkpoint(a, 1n, "secret")), context)
        assert.strictEqual(says(error), "rejected Unreachable")
        assert.notInclude(JSON.stringify([error.message, String(error.cause)]), "secret")
        yield* server.command("CONFIG", "SET", "replica-serve-stale-data", "no")
        assert.strictEqual(
          says(yield* Effect.provide(failureOf(checkpoint(a, 1n, "secret")), context)),
          "rejected Unreachable"
        )
        yield* server.command("REPLICAOF", "NO", "ONE")
        assert.strictEqual((yield* Effect.provide(checkpoint(a, 1n, "one"), context))[0]._tag, "Done")
      }))

    it.live("a server that is full takes no checkpoint and no acquire, but renews and releases", () =>
      Effect.gen(function*() {
        const { context, server } = yield* own()
        yield* Effect.gen(function*() {
          const backend = yield* Backend.Backend
          const a = yield* take("job")
          yield* server.command("CONFIG", "SET", "maxmemory", "1")
          const error = yield* failureOf(checkpoint(a, 1n, "secret"))
          assert.strictEqual(says(error), "rejected Other")
          assert.include(error.message, "out of memory")
          assert.strictEqual(says(yield* failureOf(backend.acquire([acquireRequest("other")]))), "rejected Other")
          // Each is told so. Sent again one by one, they would only be refused again.
          const refused = yield* backend.acquire([acquireRequest("other"), acquireRequest("another")])
          assert.isTrue(refused.every((reply) => (reply as unknown) instanceof LeaseError.BackendError))
          assert.strictEqual((yield* backend.read(a))._tag, "Done")
          assert.strictEqual((yield* backend.list({ prefix: "", after: Option.none(), limit: 10 })).length, 1)
          assert.strictEqual((yield* backend.renew([{ ...a, ttl }]))[0]._tag, "Done")
          assert.strictEqual((yield* release(a))[0]._tag, "Done")
        }).pipe(Effect.provide(context))
      }))

    it.live("a server that cannot write its snapshot heals by itself: rejected, unreachable", () =>
      Effect.gen(function*() {
        const server = yield* RedisServer.start()
        const cause = Object.assign(new Error("MISCONF Redis is configured to save RDB snapshots, but cannot"), {
          command: { args: ["secret"] }
        })
        const context = yield* observed(
          server.url,
          (send) => (command, ...args) =>
            command === "EVALSHA" ? Effect.fail(new EffectRedis.RedisError({ cause })) : send(command, ...args)
        )
        const error = yield* failureOf(Context.get(context, Backend.Backend).acquire([acquireRequest("job")]))
        assert.strictEqual(says(error), "rejected Unreachable")
        const { reason } = error
        assert.notStrictEqual("cause" in reason ? reason.cause : undefined, cause, "it may carry what was sent")
      }))

    it.live("a user without permission is told so, and no password shows", () =>
      Effect.gen(function*() {
        const server = yield* RedisServer.start()
        yield* server.command("ACL", "SETUSER", "limited", "on", ">hunter2", "+info", "+hello", "+client", "~*", "&*")
        const client = NodeRedis.layer({
          url: server.url,
          username: "limited",
          password: "hunter2",
          disableOfflineQueue: true
        })
        const context = yield* Layer.build(Layer.provide(Redis.layer, client))
        const error = yield* failureOf(Context.get(context, Backend.Backend).acquire([acquireRequest("job")]))
        assert.strictEqual(says(error), "rejected PermissionDenied")
        assert.notInclude(JSON.stringify([error.message, String(error.cause)]), "hunter2")
      }))

    it.live("a node of a cluster refers to another: rejected, and says what client it takes", () =>
      Effect.gen(function*() {
        const nodes = yield* RedisServer.startCluster
        const context = yield* Layer.build(Layer.provide(
          Redis.layerWith({ allowEviction: true }),
          clientOf(nodes[0].url)
        ))
        const backend = Context.get(context, Backend.Backend)
        const errors: Array<LeaseError.BackendError> = []
        for (let i = 0; i < 12; i++) {
          const exit = yield* Effect.result(backend.acquire([acquireRequest(`job-${i}`)]))
          if (exit._tag === "Failure") errors.push(exit.failure)
        }
        assert.isAbove(errors.length, 0)
        assert.deepStrictEqual(new Set(errors.map(says)), new Set(["rejected Other"]))
        assert.include(errors[0].message, "cluster client")
        // A cluster of which a part is missing takes nothing.
        yield* nodes[2].kill
        yield* eventually(
          "the cluster is down",
          Effect.map(nodes[0].command("CLUSTER", "INFO"), (info) => info.includes("cluster_state:fail"))
        )
        assert.strictEqual(says(yield* failureOf(backend.acquire([acquireRequest("job-0")]))), "rejected Unreachable")
      }))

    it.live("a server that has gone: unknown while a command was on its way, then rejected", () =>
      Effect.gen(function*() {
        const { context, server } = yield* own()
        const a = yield* Effect.provide(take("job"), context)
        yield* server.signal("SIGSTOP")
        const waiting = yield* Effect.forkScoped(
          Effect.provide(failureOf(checkpoint(a, 1n, "secret")), context),
          { startImmediately: true }
        )
        // It has been written once a later turn of the event loop has come.
        yield* Effect.sleep("50 millis")
        yield* server.kill
        assert.strictEqual(says(yield* Fiber.join(waiting)), "unknown Unreachable")
        assert.strictEqual(
          says(yield* Effect.provide(failureOf(checkpoint(a, 1n, "secret")), context)),
          "rejected Unreachable"
        )
      }))

    it.live("a server that cannot be asked keeps the layer from being built", () =>
      Effect.gen(function*() {
        const redis = EffectRedis.Redis.of({
          send: () => Effect.fail(new EffectRedis.RedisError({ cause: new Error("LOADING Redis is loading") })),
          subscribe: () => Effect.never,
          eval: () => () => Effect.never,
          reserve: Effect.never
        })
        const error = yield* Effect.flip(
          Layer.build(Layer.provide(Redis.layer, Layer.succeed(EffectRedis.Redis, redis)))
        )
        assert.strictEqual(error._tag, "BackendError")
        assert.strictEqual(says(error as LeaseError.BackendError), "rejected Unreachable")
      }))
  })

  describe("wake-ups", () => {
    const processOf = (url: string, holderId: string) =>
      Layer.build(
        Lease.layerWith({ holderId, pollInterval: "1 minute" }).pipe(
          Layer.provide(Redis.layer),
          Layer.provide(clientOf(url))
        )
      )

    const subscribers = (server: RedisServer.RedisServer) =>
      Effect.map(server.command("PUBSUB", "CHANNELS"), (reply) => reply.split("worklease:wakeups:").length - 1)

    const waiters = (server: RedisServer.RedisServer) =>
      Effect.map(server.command("ZCARD", "worklease:{job}:waiting"), (reply) => Number(reply.slice(1)))

    it.live(
      "a release wakes an acquire that waits in another process, long before it polls",
      () =>
        Effect.gen(function*() {
          const server = yield* RedisServer.start()
          const [a, b] = [yield* processOf(server.url, "a"), yield* processOf(server.url, "b")]
          const { token } = yield* Effect.provide(Lease.acquire("job"), a)
          assert.strictEqual(yield* subscribers(server), 0, "nothing waits, so nothing listens")
          const waiting = yield* Effect.forkScoped(Effect.provide(Lease.acquire("job", { wait: true }), b))
          yield* eventually("it has registered", Effect.map(waiters(server), (_) => _ === 1))
          assert.strictEqual(yield* subscribers(server), 1)
          yield* Effect.provide(Lease.release(token, "finished"), a)
          const taken = yield* Fiber.join(waiting).pipe(Effect.timeout("5 seconds"))
          assert.strictEqual(taken.token.holderId, "b")
          yield* eventually("nothing waits, so nothing listens", Effect.map(subscribers(server), (_) => _ === 0))
          assert.strictEqual(yield* waiters(server), 0, "and nothing is registered")
        }),
      30_000
    )

    for (const wakeups of [true, false]) {
      it.live(
        wakeups
          ? "a holder that is asked to yield is told at once, and listens only while it has something to be asked for"
          : "without them, it hears of it with its next renewal, and listens to nothing",
        () =>
          Effect.gen(function*() {
            const server = yield* RedisServer.start()
            const start = (holderId: string) =>
              Layer.build(
                Lease.layerWith({ holderId, ttl: "20 seconds", renewEvery: "7 seconds" }).pipe(
                  Layer.provide(Redis.layerWith({ wakeups })),
                  Layer.provide(clientOf(server.url))
                )
              )
            const [a, b] = [yield* start("a"), yield* start("b")]
            yield* Effect.scoped(Effect.gen(function*() {
              const lease = yield* Effect.provide(Lease.hold("job"), a)
              assert.strictEqual(yield* subscribers(server), 0)
              if (wakeups) yield* eventually("it listens", Effect.map(subscribers(server), (_) => _ === 1))
              else yield* Effect.sleep("1500 millis")
              assert.isTrue(yield* Effect.provide(Lease.requestYield("job"), b))
              const told = yield* Effect.timeoutOption(lease.awaitYieldRequest, "3 seconds")
              assert.strictEqual(Option.isSome(told), wakeups)
              assert.strictEqual(yield* subscribers(server), wakeups ? 1 : 0)
              yield* Effect.timeout(lease.awaitYieldRequest, "5 seconds")
            }))
            yield* eventually("nothing is held, so nothing listens", Effect.map(subscribers(server), (_) => _ === 0))
          }),
        30_000
      )
    }

    it.live("a subscriber whose connection was killed listens again", () =>
      Effect.gen(function*() {
        const server = yield* RedisServer.start()
        const [a, b] = [yield* processOf(server.url, "a"), yield* processOf(server.url, "b")]
        const { token } = yield* Effect.provide(Lease.acquire("job"), a)
        const waiting = yield* Effect.forkScoped(Effect.provide(Lease.acquire("job", { wait: true }), b))
        yield* eventually("it has registered", Effect.map(waiters(server), (_) => _ === 1))
        yield* server.command("CLIENT", "KILL", "TYPE", "pubsub")
        yield* eventually("it listens again", Effect.map(subscribers(server), (_) => _ === 1))
        yield* Effect.provide(Lease.release(token, "finished"), a)
        yield* Fiber.join(waiting).pipe(Effect.timeout("5 seconds"))
      }), 30_000)

    it.live(
      "who waits no longer is not registered any more, also on a server that is full",
      () =>
        Effect.gen(function*() {
          const server = yield* RedisServer.start()
          const [a, b] = [yield* processOf(server.url, "a"), yield* processOf(server.url, "b")]
          yield* Effect.provide(Lease.acquire("job"), a)
          const waiting = yield* Effect.forkScoped(Effect.provide(Lease.acquire("job", { wait: true }), b))
          yield* eventually("it has registered", Effect.map(waiters(server), (_) => _ === 1))
          yield* server.command("CONFIG", "SET", "maxmemory", "1")
          yield* Fiber.interrupt(waiting)
          yield* eventually("it is not registered any more", Effect.map(waiters(server), (_) => _ === 0))
        }),
      30_000
    )

    it.live("a release does not try for long to reach those who have died", () =>
      Effect.gen(function*() {
        const { context, server } = yield* own()
        const term = yield* Effect.provide(take("job"), context)
        for (let i = 0; i < 50; i++) {
          yield* server.command("ZADD", "worklease:{job}:waiting", "9007199254740991", `worklease:wakeups:dead-${i}`)
        }
        yield* Effect.provide(release(term), context)
        assert.include(yield* server.command("INFO", "commandstats"), "cmdstat_publish:calls=5,")
      }))

    it.live("who has died is passed over: another is told", () =>
      Effect.gen(function*() {
        const server = yield* RedisServer.start()
        const [a, b] = [yield* processOf(server.url, "a"), yield* processOf(server.url, "b")]
        const { token } = yield* Effect.provide(Lease.acquire("job"), a)
        for (let i = 0; i < 4; i++) {
          yield* server.command("ZADD", "worklease:{job}:waiting", "9007199254740991", `worklease:wakeups:dead-${i}`)
        }
        // One whose registration is over is cleaned up after.
        yield* server.command("ZADD", "worklease:{job}:waiting", "1", "worklease:wakeups:long-dead")
        yield* server.command("ZADD", "worklease:{job}:waiting", "2", "worklease:wakeups:long-dead-too")
        const waiting = yield* Effect.forkScoped(Effect.provide(Lease.acquire("job", { wait: true }), b))
        yield* eventually("it has registered", Effect.map(waiters(server), (_) => _ === 5))
        assert.notInclude(yield* server.command("ZRANGE", "worklease:{job}:waiting", "0", "-1"), "long-dead")
        yield* Effect.provide(Lease.release(token, "finished"), a)
        yield* Fiber.join(waiting).pipe(Effect.timeout("5 seconds"))
      }), 30_000)

    it.live(
      "who is told although nothing waits there any more passes it on, and is not told again",
      () =>
        Effect.gen(function*() {
          const server = yield* RedisServer.start()
          const backendOf = Effect.map(
            Layer.build(Layer.provide(Redis.layer, clientOf(server.url))),
            (context) => Context.get(context, Backend.Backend)
          )
          const [a, b] = [yield* backendOf, yield* backendOf]
          const subscribe = (backend: Backend.Backend["Service"]) =>
            Effect.flatMap(Option.getOrThrow(backend.wakeups)("job"), (wakeup) => Effect.as(wakeup, wakeup))
          yield* Effect.asVoid(Effect.scoped(subscribe(a)))
          const waiting = yield* Effect.forkScoped(yield* subscribe(b), { startImmediately: true })
          // One of the two is told each time.
          for (let i = 0; i < 20 && (yield* waiters(server)) === 2; i++) {
            const term = yield* Effect.provideService(take("job"), Backend.Backend, a)
            yield* Effect.provideService(release(term), Backend.Backend, a)
            yield* Effect.sleep("20 millis")
          }
          assert.strictEqual(yield* waiters(server), 1)
          yield* Fiber.join(waiting).pipe(Effect.timeout("5 seconds"))
        }),
      30_000
    )

    it.live("without them, who waits polls and is not registered: a release tells nobody, and nothing listens", () =>
      Effect.gen(function*() {
        const { context, server } = yield* own({ wakeups: false })
        assert.isTrue(Option.isNone(Context.get(context, Backend.Backend).wakeups))
        const leases = yield* Layer.build(
          Layer.provide(Lease.layerWith({ pollInterval: "100 millis" }), Layer.succeedContext(context))
        )
        const { token } = yield* Effect.provide(Lease.acquire("job"), leases)
        const waiting = yield* Effect.forkScoped(Effect.provide(Lease.acquire("job", { wait: true }), leases))
        yield* Effect.sleep("500 millis")
        assert.strictEqual(yield* waiters(server), 0)
        assert.strictEqual(yield* subscribers(server), 0)
        yield* Effect.provide(Lease.release(token, "finished"), leases)
        yield* Fiber.join(waiting).pipe(Effect.timeout("5 seconds"))
        assert.notInclude(yield* server.command("INFO", "commandstats"), "cmdstat_publish")
      }))
  })

  describe("fenced writes", () => {
    const leases = (context: Context.Context<Backend.Backend>, holderId: string, ttl: Duration.Input = "30 seconds") =>
      Effect.map(
        Layer.build(Layer.provide(Lease.layerWith({ holderId, ttl }), Layer.succeedContext(context))),
        (leases) => Context.merge(context, leases)
      )

    it.live("are applied while the term is current, and never after", () =>
      Effect.gen(function*() {
        const { context, server } = yield* own()
        const a = yield* leases(context, "a", "1 second")
        const b = yield* leases(context, "b")
        const writes = Context.get(context, Redis.FencedWrites)
        const key = `balance:${Redis.hashTag("job")}`
        const value = Effect.map(server.command("GET", key), (reply) => reply.split("\r\n")[1])

        const { token } = yield* Effect.provide(Lease.acquire("job"), a)
        yield* writes.set(token, key, "one")
        assert.strictEqual(yield* value, "one")
        assert.deepStrictEqual(
          yield* writes.eval(token, {
            lua: "redis.call('APPEND', KEYS[1], ARGV[1]); return {#KEYS, #ARGV}",
            keys: [key],
            args: [" two"]
          }),
          [1, 1]
        )
        assert.strictEqual(yield* value, "one two")

        yield* eventually(
          "it has expired",
          Effect.match(writes.set(token, key, "one two"), {
            onSuccess: () => false,
            onFailure: (error) => error._tag === "LeaseExpired"
          })
        )
        const second = yield* Effect.provide(Lease.acquire("job"), b)
        assert.strictEqual((yield* Effect.flip(writes.set(token, key, "late")))._tag, "Fenced")
        yield* writes.set(second.token, key, "three")
        yield* Effect.provide(Lease.release(second.token, "finished"), b)
        assert.strictEqual((yield* Effect.flip(writes.set(second.token, key, "late")))._tag, "LeaseExpired")
        const third = yield* Effect.provide(Lease.acquire("job"), b)
        assert.strictEqual((yield* Effect.flip(writes.set(second.token, key, "late")))._tag, "Fenced")
        yield* writes.set(third.token, key, "four")
        // Also where a server that has forgotten everything gave the same token to another holder.
        yield* server.command("HSET", "worklease:{job}", "holder", "z")
        assert.strictEqual((yield* Effect.flip(writes.set(third.token, key, "late")))._tag, "Fenced")
        assert.strictEqual(yield* value, "four")
      }))

    it.live("refuse a key of another slot, and do not reach the lease's own key", () =>
      Effect.gen(function*() {
        const { context } = yield* own()
        const a = yield* leases(context, "a")
        const writes = Context.get(context, Redis.FencedWrites)
        const { token } = yield* Effect.provide(Lease.acquire("job"), a)
        const error = yield* Effect.flip(writes.set(token, "balance", "one"))
        assert.strictEqual(error._tag, "InvalidConfig")
        assert.include(error.message, "{job}")
        for (const key of ["worklease:{job}", "worklease:{job}:waiting", "worklease:{job}:mine"]) {
          assert.strictEqual((yield* Effect.flip(writes.set(token, key, "one")))._tag, "InvalidConfig", key)
        }
        yield* writes.set(token, `balance:${Redis.hashTag("job")}`, "one")
      }))

    it.live("a script that fails, or returns an error, may have written: its outcome is unknown, and it ran once", () =>
      Effect.gen(function*() {
        const { context, server } = yield* own()
        const a = yield* leases(context, "a")
        const writes = Context.get(context, Redis.FencedWrites)
        const { token } = yield* Effect.provide(Lease.acquire("job"), a)
        const key = `runs:${Redis.hashTag("job")}`
        const ends = [
          "redis.call('LPUSH', KEYS[1], 'x')",
          "error('NOSCRIPT forged')",
          "error({err = 'NOSCRIPT forged'})",
          "error({})",
          "return redis.pcall('LPUSH', KEYS[1], 'x')",
          "return redis.error_reply('NOSCRIPT forged')",
          "return redis.call('NONSENSE')"
        ]
        for (const [index, end] of ends.entries()) {
          const lua = `redis.call('INCR', KEYS[1]) ${end}`
          const error = yield* Effect.flip(writes.eval(token, { lua, keys: [key] }))
          assert.strictEqual(error._tag, "BackendError", end)
          assert.strictEqual(says(error as LeaseError.BackendError), "unknown Other", end)
          assert.include(yield* server.command("GET", key), `\r\n${index + 1}\r\n`, end)
        }
      }))

    it.live("a script is one of its own: it cannot end the check, nor meet its names", () =>
      Effect.gen(function*() {
        const { context } = yield* own()
        const a = yield* leases(context, "a")
        const writes = Context.get(context, Redis.FencedWrites)
        const { token } = yield* Effect.provide(Lease.acquire("job"), a)
        for (const lua of ["return 1 end do", "end local function x()", "not Lua", "]] ]=] return"]) {
          const error = yield* Effect.flip(writes.eval(token, { lua, keys: [] }))
          assert.strictEqual(error._tag, "BackendError", lua)
          assert.strictEqual(says(error as LeaseError.BackendError), "rejected Other", lua)
        }
        const flags = yield* Effect.flip(writes.eval(token, { lua: "#!lua flags=allow-oom\nreturn 1", keys: [] }))
        assert.strictEqual(flags._tag, "InvalidConfig")
        const builtin =
          "(function() end)() local list = {{']]', ']=]'}} return load(function() end) and rawget(_G, 'now') == nil and list[1][1]"
        assert.strictEqual(yield* writes.eval(token, { lua: `${builtin} -- the end`, keys: [] }), "]]")
      }))
  })

  it.live(
    "kill -9 and a restart with its log: a holder keeps its lease and goes on, and nothing is lost",
    () =>
      Effect.gen(function*() {
        const server = yield* RedisServer.start({ settings: { appendonly: "yes", appendfsync: "always" } })
        const context = yield* Layer.build(
          Lease.layerWith({ holderId: "a", ttl: "5 seconds" }).pipe(
            Layer.provideMerge(Redis.layer),
            Layer.provide(clientOf(server.url))
          )
        )
        const started = yield* Deferred.make<void>()
        const goOn = yield* Deferred.make<void>()
        const running = yield* Worker.run(
          "job",
          () => Effect.andThen(Deferred.succeed(started, void 0), Deferred.await(goOn))
        ).pipe(
          Effect.provide(context),
          Effect.forkScoped
        )
        yield* Deferred.await(started)
        const term = yield* Effect.provide(take("other"), context)
        yield* Effect.provide(checkpoint(term, 1n, "one"), context)
        yield* server.restart
        yield* eventually(
          "the checkpoint is there",
          Effect.match(Effect.provide(Effect.flatMap(Backend.Backend, (_) => _.read(term)), context), {
            onFailure: () => false,
            onSuccess: (reply) =>
              reply._tag === "Done" && Option.isSome(reply.state) &&
              new TextDecoder().decode(reply.state.value.bytes) === "one"
          })
        )
        // Past the ttl: only renewals after the restart can have kept it.
        yield* Effect.sleep("6 seconds")
        assert.isUndefined(running.pollUnsafe())
        yield* Deferred.succeed(goOn, void 0)
        yield* Fiber.join(running)
      }),
    30_000
  )

  for (const disableOfflineQueue of [true, false]) {
    const how = disableOfflineQueue ? "" : ", although the client queues"
    it.live(
      `kill -9 without a restart${how}: the holder loses its lease in its time, and an acquire fails in its`,
      () =>
        Effect.gen(function*() {
          const { server } = yield* own()
          const context = yield* Layer.build(
            Lease.layerWith({ holderId: "a", ttl: "2 seconds" }).pipe(
              Layer.provideMerge(Redis.layer),
              Layer.provide(clientOf(server.url, disableOfflineQueue))
            )
          )
          const started = yield* Deferred.make<void>()
          const running = yield* Worker.run(
            "job",
            () => Effect.andThen(Deferred.succeed(started, void 0), Effect.never)
          )
            .pipe(Effect.provide(context), Effect.flip, Effect.forkScoped)
          yield* Deferred.await(started)
          yield* server.kill
          const error = yield* Fiber.join(running).pipe(Effect.timeout("4 seconds"))
          assert.strictEqual(error._tag, "LeaseLost")
          const refused = yield* Effect.flip(Effect.provide(Lease.acquire("other"), context)).pipe(
            Effect.timeout("4 seconds")
          )
          assert.strictEqual(refused._tag, "BackendError")
          yield* server.restart
          yield* eventually(
            "it works again, without a restart of the process",
            Effect.match(Effect.provide(Lease.acquire("other"), context), {
              onFailure: () => false,
              onSuccess: () => true
            })
          )
        }),
      30_000
    )
  }

  it.live(
    "a server that does not answer any more: nothing hangs, also not the end of the layer",
    () =>
      Effect.gen(function*() {
        const server = yield* RedisServer.start()
        const client = yield* Layer.build(clientOf(server.url))
        yield* Effect.addFinalizer(() => server.signal("SIGCONT"))
        const scope = yield* Scope.make()
        const context = yield* Layer.build(
          Lease.layerWith({ holderId: "a", ttl: "2 seconds" }).pipe(
            Layer.provideMerge(Redis.layer),
            Layer.provide(Layer.succeedContext(client))
          )
        ).pipe(Scope.provide(scope))
        yield* Effect.provide(Lease.acquire("held"), context)
        const started = yield* Deferred.make<void>()
        const running = yield* Worker.run("job", () => Effect.andThen(Deferred.succeed(started, void 0), Effect.never))
          .pipe(Effect.provide(context), Effect.flip, Effect.forkScoped)
        yield* Deferred.await(started)
        yield* server.signal("SIGSTOP")
        // It begins to subscribe, and is not answered.
        yield* Effect.flatMap(Option.getOrThrow(Context.get(context, Backend.Backend).wakeups)("held"), (_) => _).pipe(
          Effect.scoped,
          Effect.forkScoped
        )
        const lost = yield* Fiber.join(running).pipe(Effect.timeout("5 seconds"))
        assert.strictEqual(lost._tag, "LeaseLost")
        const refused = yield* Effect.flip(Effect.provide(Lease.acquire("other"), context)).pipe(
          Effect.timeout("5 seconds")
        )
        assert.strictEqual(says(refused as LeaseError.BackendError), "unknown TimedOut")
        yield* Scope.close(scope, Exit.void).pipe(Effect.timeout("5 seconds"))
      }),
    30_000
  )
})

/** A cluster, and the layer over it. */
const onCluster = Effect.gen(function*() {
  const nodes = yield* RedisServer.startCluster
  const context = yield* Layer.build(
    Layer.provideMerge(Redis.layer, clusterClientOf(nodes.map((_) => _.port)))
  )
  return { context, nodes }
})

describe.runIf(isTested)("Redis Cluster", () => {
  it.live(
    "batches go to all nodes, and come back in order; lists, sweeps, wake-ups and fenced writes work",
    () =>
      Effect.gen(function*() {
        const { context, nodes } = yield* onCluster
        yield* Effect.gen(function*() {
          const backend = yield* Backend.Backend
          const workIds = Array.from({ length: 100 }, (_, i) => `job-{${i}}`)
          const replies = yield* backend.acquire(workIds.map((workId) => acquireRequest(workId)) as any)
          assert.deepStrictEqual(new Set(replies.map((_) => _._tag)), new Set(["Acquired"]))
          const terms = workIds.map((workId, i) => ({
            workId,
            holderId: "a",
            fencingToken: (replies[i] as Backend.Acquired).fencingToken
          }))
          for (const node of nodes) {
            assert.isAbove(Number((yield* node.command("DBSIZE")).slice(1)), 10, "each node has a part")
            yield* node.command("SCRIPT", "FLUSH")
          }
          const states = yield* backend.checkpoint(
            terms.map((term, i) => ({
              ...term,
              fencingToken: term.fencingToken + (i % 2 === 0 ? 0n : 1n),
              ttl,
              sequence: 1n,
              state: stored(String(i))
            })) as any
          )
          assert.deepStrictEqual(states.map((_) => _._tag), workIds.map((_, i) => i % 2 === 0 ? "Done" : "Fenced"))
          const records = yield* backend.list({ prefix: "job-{", after: Option.none(), limit: 1000 })
          assert.deepStrictEqual(records.map((_) => _.workId), workIds.slice().sort())
          for (const { state, workId } of records) {
            const i = workIds.indexOf(workId)
            assert.strictEqual(
              Option.getOrUndefined(Option.map(state, ({ bytes }) => new TextDecoder().decode(bytes))),
              i % 2 === 0 ? String(i) : undefined
            )
          }

          const [subscribe] = [Option.getOrThrow(backend.wakeups)]
          const wakeup = yield* subscribe(workIds[3])
          yield* wakeup
          const waiting = yield* Effect.forkScoped(wakeup, { startImmediately: true })
          assert.deepStrictEqual(yield* release(terms[3]), [{ _tag: "Done" }])
          yield* Fiber.join(waiting).pipe(Effect.timeout("5 seconds"))

          // Whatever node has the record, and on whichever it listens.
          const asked = yield* Option.getOrThrow(backend.yieldRequests)
          const lasting = Array.from({ length: 20 }, (_, i) => `lasting-${i}`)
          yield* backend.acquire(lasting.map((workId) => acquireRequest(workId)) as any)
          const heard = new Set<string>()
          yield* Effect.forkScoped(Effect.forever(Effect.map(asked, (workId) => heard.add(workId))), {
            startImmediately: true
          })
          for (const workId of lasting) {
            assert.isTrue(yield* backend.requestYield({ workId, deadline: Option.none() }))
          }
          yield* eventually("all are heard", Effect.sync(() => heard.size === lasting.length))

          for (const term of terms.slice(0, 50)) yield* backend.forget(term)
          for (const node of nodes) {
            yield* node.command(
              "EVAL",
              `local keys = redis.call('SCAN', '0', 'MATCH', 'worklease:{*}', 'COUNT', '10000')[2]
for _, key in ipairs(keys) do if redis.call('HGET', key, 'exit') == 'forgotten' then redis.call('HSET', key, 'expires', '1') end end`,
              "0"
            )
          }
          const sweep = (limit: number) => backend.sweep({ retention: Duration.zero, limit })
          assert.deepStrictEqual([yield* sweep(20), yield* sweep(20), yield* sweep(20), yield* sweep(20)], [
            20,
            20,
            10,
            0
          ])
          const again = yield* take(workIds[0], "b")
          assert.isAbove(Number(again.fencingToken - terms[0].fencingToken), 0)

          const leases = yield* Layer.build(
            Layer.provide(Lease.layerWith({ holderId: "c" }), Layer.succeedContext(context))
          )
          const { token } = yield* Effect.provide(Lease.acquire("fenced"), leases)
          const writes = yield* Redis.FencedWrites
          const key = `balance:${Redis.hashTag("fenced")}`
          yield* writes.set(token, key, "one")
          assert.strictEqual(
            yield* writes.eval(token, { lua: "return redis.call('GET', KEYS[1])", keys: [key] }),
            "one"
          )
          yield* Effect.provide(Lease.release(token, "finished"), leases)
          assert.strictEqual((yield* Effect.flip(writes.set(token, key, "late")))._tag, "LeaseExpired")
        }).pipe(Effect.provide(context))
      }),
    60_000
  )

  it.live(
    "while slots move, leases are taken, released and forgotten",
    () =>
      Effect.gen(function*() {
        const { context, nodes } = yield* onCluster
        yield* Effect.gen(function*() {
          const backend = yield* Backend.Backend
          const idOf = (node: RedisServer.RedisServer) =>
            Effect.map(node.command("CLUSTER", "MYID"), (reply) => reply.split("\r\n")[1])
          const numberOf = (reply: string) => Number(reply.slice(1))
          /** Begins to move a slot to another node, and leaves it at that. */
          const move = (slot: number) =>
            Effect.gen(function*() {
              for (const [index, from] of nodes.entries()) {
                const to = nodes[(index + 1) % nodes.length]
                const reply = yield* from.command("CLUSTER", "SETSLOT", String(slot), "MIGRATING", yield* idOf(to))
                if (!reply.startsWith("+OK")) continue
                const answer = yield* to.command("CLUSTER", "SETSLOT", String(slot), "IMPORTING", yield* idOf(from))
                return assert.include(answer, "OK")
              }
              assert.fail("no node has the slot")
            })
          const slotOf = (workId: string) =>
            Effect.map(nodes[0].command("CLUSTER", "KEYSLOT", `worklease:{${workId}}`), numberOf)

          const workIds = Array.from({ length: 30 }, (_, i) => `job-${i}`)
          const terms: Array<Backend.Term> = []
          for (const workId of workIds) terms.push(yield* take(workId))
          for (const workId of workIds.slice(0, 2)) yield* move(yield* slotOf(workId))
          assert.deepStrictEqual(yield* release(terms[0]), [{ _tag: "Done" }])
          const again = yield* take("job-0", "b")
          assert.strictEqual((yield* backend.forget(again))._tag, "Done")
          assert.strictEqual((yield* backend.forget(terms[1]))._tag, "Done")
          // What cannot be swept now is left to a later sweep.
          assert.strictEqual(yield* backend.sweep({ retention: Duration.zero, limit: 10 }), 0)
        }).pipe(Effect.provide(context))
      }),
    60_000
  )

  it.live("while slots move, a list sees every node", () =>
    Effect.gen(function*() {
      const { context, nodes } = yield* onCluster
      yield* Effect.gen(function*() {
        const backend = yield* Backend.Backend
        const workIds = Array.from({ length: 30 }, (_, i) => `job-${i}`)
        for (const workId of workIds) yield* take(workId)
        const ids = yield* Effect.forEach(
          nodes,
          (node) => Effect.map(node.command("CLUSTER", "MYID"), (reply) => reply.split("\r\n")[1])
        )
        const move = (slot: number) =>
          Effect.andThen(
            nodes[0].command("CLUSTER", "SETSLOT", String(slot), "MIGRATING", ids[1]),
            nodes[1].command("CLUSTER", "SETSLOT", String(slot), "IMPORTING", ids[0])
          )
        const list = backend.list({ prefix: "", after: Option.none(), limit: 100 })
        yield* move(0)
        assert.sameMembers((yield* list).map((_) => _.workId), workIds)
        // All those by which the node may be reached.
        for (let i = 1; i < 8; i++) yield* move(Math.floor(i * 5461 / 8))
        assert.strictEqual(says(yield* Effect.flip(list)), "rejected Unreachable")
      }).pipe(Effect.provide(context))
    }), 60_000)

  it.live("a node that may evict keys is found whichever it is", () =>
    Effect.gen(function*() {
      const nodes = yield* RedisServer.startCluster
      yield* nodes[1].command("CONFIG", "SET", "maxmemory-policy", "volatile-ttl")
      const error = yield* Effect.flip(
        Layer.build(Layer.provide(Redis.layer, clusterClientOf(nodes.map((_) => _.port))))
      )
      assert.strictEqual(error._tag, "InvalidConfig")
      assert.include(error.message, "volatile-ttl")
    }), 60_000)
})
