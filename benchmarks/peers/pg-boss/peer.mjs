// Job cycles per second of pg-boss: 10 loops that fetch and complete jobs that are there beforehand.
import { cyclesPerSecond } from "../rate.mjs"

export const about = {
  package: "pg-boss",
  server: "postgres",
  operation: "a job cycle: fetch(1) of a job that was inserted beforehand, and complete it; 10 loops at once",
  comparedWith: "acquire + release of distinct work IDs, 10 fibers at once",
  comparable:
    "Both claim a unit of work for one process, and record that it ended, one statement each and nothing in between; "
    + "a pool of 10 connections each, in the same run on the same server.",
  notComparable:
    "pg-boss does more: it finds the next job by priority and time, carries its payload, counts its attempts, and "
    + "keeps the completed job (inserting it is not counted). worklease is asked for a work ID that the caller "
    + "names. pg-boss does less: there is no fencing token for writes elsewhere and no checkpoint to continue from, "
    + "and a dead worker's job comes back only when a sweep finds it expired. Its batches are the caller's: "
    + "fetch(100) and complete(100 IDs) is a loop that takes and ends 100 jobs together, while worklease gathers "
    + "what independent fibers ask for."
}

export const measure = async ({ postgres, seconds, progress }) => {
  const { PgBoss } = await import("pg-boss")
  // Without its background work: nothing of that is due within the measurement.
  const boss = new PgBoss({ connectionString: postgres, max: 10, supervise: false, schedule: false })
  boss.on("error", (error) => {
    throw error
  })
  await boss.start()
  const database = boss.getDb()

  const fill = async (queue, jobs) => {
    for (let left = jobs; left > 0; left -= 10_000) {
      await boss.insert(queue, Array.from({ length: Math.min(left, 10_000) }, (_, number) => ({ data: { number } })))
    }
    await database.executeSql("VACUUM ANALYZE")
  }
  const jobsPerSecond = async (queue, seconds, batchSize) => {
    const rate = await cyclesPerSecond(10, seconds, async () => {
      const jobs = await boss.fetch(queue, { batchSize })
      if (jobs.length === 0) throw new Error("The jobs ran out before the time")
      const { affected } = await boss.complete(queue, jobs.map((job) => job.id))
      if (affected !== jobs.length) throw new Error(`${affected} of ${jobs.length} jobs were completed`)
      return jobs.length
    })
    return rate
  }
  const mode = async (queue, batchSize, guess) => {
    await boss.createQueue(queue)
    progress(`fetch(${batchSize}): warming up`)
    await fill(queue, Math.ceil(guess * seconds * 0.1))
    const warm = await jobsPerSecond(queue, seconds * 0.1, batchSize)
    await fill(queue, Math.ceil(warm * seconds * 0.4 * 1.5) + 10 * batchSize)
    progress(`fetch(${batchSize})`)
    return jobsPerSecond(queue, seconds * 0.4, batchSize)
  }

  const single = await mode("single", 1, 15_000)
  const batched = await mode("batched", 100, 150_000)
  await boss.stop({ graceful: false })
  return {
    figures: [
      { label: "fetch(1) + complete, 10 loops", value: single, unit: "jobs/s" },
      { label: "fetch(100) + complete(100 IDs), 10 loops", value: batched, unit: "jobs/s" }
    ]
  }
}
