// Lock cycles per second of effect-distributed-lock, on Redis: lock and unlock, with and without its pushed wake-ups.
import { randomUUID } from "node:crypto"

export const about = {
  package: "effect-distributed-lock",
  server: "redis",
  operation: "a lock cycle: withPermits(1) around nothing, on a semaphore of one permit that nobody else wants",
  comparedWith: "acquire + release of distinct work IDs: alone, and 32 fibers at once",
  comparable:
    "Both take a time-limited claim on a name, run nothing and give it back, with one round trip to take it and "
    + "one to give it back, in the same run on the same machine.",
  notComparable:
    "Its store is Redis, in memory, which replies without a commit; worklease commits each acquire and release in "
    + "PostgreSQL. It does less: no fencing token, no checkpoint, no record of how the last holder left, and expiry "
    + "is judged by the clocks of its clients. It does more: a semaphore may have several permits, and withPermits "
    + "starts a fiber that keeps the claim alive. With pushed wake-ups, which are its default, each acquisition "
    + "opens and closes a connection to subscribe, also when nobody holds the lock: that is what the figures with "
    + "push show."
}

export const measure = async ({ redis: url, seconds, progress }) => {
  const { Effect } = await import("effect")
  const { DistributedSemaphore, RedisBacking } = await import("effect-distributed-lock")
  const { Redis } = await import("ioredis")

  // Fails at once when there is nothing at the URL: the others would try for ever.
  const probe = new Redis(url, { lazyConnect: true, retryStrategy: null })
  let problem
  probe.on("error", (error) => {
    problem = error.message
  })
  await probe.connect().catch((error) => {
    throw new Error(`no Redis answers at the URL given: ${problem ?? error.message}`)
  })
  const version = /^(?:valkey|redis)_version:(\S+)/m.exec(await probe.info("server"))?.[1]
  probe.disconnect()

  const redis = new Redis(url)
  const keyPrefix = `worklease-benchmark:${randomUUID()}:`
  const cyclesPerSecond = (pushBasedAcquireEnabled, keys, seconds) =>
    Effect.gen(function*() {
      const semaphores = yield* Effect.forEach(
        Array.from({ length: keys }, (_, index) => `key-${index}`),
        (key) => DistributedSemaphore.make(key, { limit: 1, ttl: "30 seconds" })
      )
      let cycles = 0
      const started = performance.now()
      const until = started + seconds * 1000
      yield* Effect.forEach(
        semaphores,
        (semaphore) =>
          Effect.repeat(semaphore.withPermits(1)(Effect.sync(() => cycles++)), {
            while: () => performance.now() < until
          }),
        { concurrency: "unbounded", discard: true }
      )
      return cycles / ((performance.now() - started) / 1000)
    }).pipe(
      Effect.provide(RedisBacking.layer(redis, { keyPrefix, pushBasedAcquireEnabled })),
      Effect.runPromise
    )

  const figures = []
  for (const push of [true, false]) {
    for (const keys of [1, 32]) {
      const label = `${keys === 1 ? "one at a time" : `${keys} keys at once`}, ${push ? "with" : "without"} push`
      progress(label)
      await cyclesPerSecond(push, keys, seconds * 0.05)
      figures.push({ label, value: await cyclesPerSecond(push, keys, seconds * 0.2), unit: "cycles/s" })
    }
  }
  redis.disconnect()
  return { figures, on: `Redis ${version}` }
}
