/** Clients of real servers, and what the contract suite may do to what they store. */
import * as NodeRedis from "@effect/platform-node/NodeRedis"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Layer from "effect/Layer"
import * as Logger from "effect/Logger"
import * as Redis from "effect/persistence/Redis"
import { createCluster } from "redis"
import { routingKey } from "worklease/layers/Redis"
import * as RedisServer from "../../support/RedisServer.ts"

/** Whether tests can run here. Where CI is set, they have to. */
export const isTested: boolean = RedisServer.isAvailable || (process.env.CI ?? "") !== ""

/** Lost connections are part of the tests, and the driver would log each. */
export const clientOf = (url: string, disableOfflineQueue = true) =>
  NodeRedis.layer({ url, disableOfflineQueue }).pipe(Layer.provide(Logger.layer([])))

/** A client of a server that ends with it. */
export const freshServer = Layer.unwrap(Effect.map(RedisServer.url, clientOf))

/** A `Redis` service over the cluster client of the driver, as an application builds it. */
export const clusterClientOf = (ports: ReadonlyArray<number>): Layer.Layer<Redis.Redis, Redis.RedisError> =>
  Layer.effect(
    Redis.Redis,
    Effect.gen(function*() {
      const failed = (cause: unknown) => new Redis.RedisError({ cause })
      const cluster = createCluster({ rootNodes: ports.map((port) => ({ url: `redis://127.0.0.1:${port}` })) })
      cluster.on("error", () => {})
      yield* Effect.acquireRelease(
        Effect.tryPromise({ try: () => cluster.connect(), catch: failed }),
        () => Effect.sync(() => cluster.destroy())
      )
      const send = <A>(command: string, ...args: ReadonlyArray<string>) =>
        Effect.tryPromise({
          try: () => cluster.sendCommand<any>(routingKey(command, args), false, [command, ...args]) as Promise<A>,
          catch: failed
        })
      return yield* Redis.make({
        send,
        subscribe: (channel, onMessage) =>
          Effect.as(
            Effect.acquireRelease(
              Effect.tryPromise({
                try: () => cluster.subscribe(channel, (message) => onMessage({ channel, message })),
                catch: failed
              }),
              () => Effect.ignoreCause(Effect.promise(() => cluster.unsubscribe(channel)))
            ),
            Effect.never
          ),
        connect: Effect.succeed({ send, close: Effect.void })
      })
    })
  )

const micros = (duration: Duration.Duration): string => String(Math.round(Duration.toMillis(duration) * 1000))

/** What the contract suite may do to the leases under a prefix. */
export const storeOf = (prefix: string) => {
  const clock = `${prefix}:clock`

  /** Moves what is stored into the past: to it, the server's clock has moved on. */
  const shift = (duration: Duration.Duration) =>
    Effect.flatMap(Redis.Redis, (redis) =>
      redis.send(
        "EVAL",
        `for _, key in ipairs(redis.call('KEYS', ARGV[1])) do
  for _, field in ipairs({'expires', 'yield'}) do
    local value = tonumber(redis.call('HGET', key, field))
    if value then redis.call('HSET', key, field, string.format('%.0f', value - tonumber(ARGV[2]))) end
  end
end`,
        "0",
        `${prefix}:{*}`,
        micros(duration)
      ))

  const raiseToken = (workId: string, fencingToken: bigint) =>
    Effect.flatMap(Redis.Redis, (redis) => redis.send("HSET", `${prefix}:{${workId}}`, "token", String(fencingToken)))

  const moveClock = (micros: string) => Effect.flatMap(Redis.Redis, (redis) => redis.send("INCRBY", clock, micros))

  const advance = (duration: Duration.Duration) => moveClock(micros(duration))

  const setBack = (duration: Duration.Duration) => moveClock(`-${micros(duration)}`)

  /** The clock of the scripts is a key. */
  const standingClock: Layer.Layer<Redis.Redis, Redis.RedisError, Redis.Redis> = Layer.effect(
    Redis.Redis,
    Effect.gen(function*() {
      const redis = yield* Redis.Redis
      yield* redis.send("SET", clock, "1600000000123456")
      const send: Redis.Redis["Service"]["send"] = (command, ...args) => {
        // It asks for the text then, which is where the time is.
        if (command === "EVALSHA") return Effect.fail(new Redis.RedisError({ cause: new Error("NOSCRIPT") }))
        if (command !== "EVAL") return redis.send(command, ...args)
        const [lua, ...rest] = args
        const now = `redis.call('GET', '${clock}')`
        return redis.send(
          command,
          lua.replaceAll("redis.call('TIME')", `{string.sub(${now}, 1, -7), string.sub(${now}, -6)}`),
          ...rest
        )
      }
      return Redis.Redis.of({ ...redis, send })
    })
  )

  return { shift, raiseToken, advance, setBack, standingClock }
}
