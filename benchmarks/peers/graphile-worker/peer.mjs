// Job cycles per second of Graphile Worker: jobs that are there beforehand, through a task that does nothing.
import { EventEmitter } from "node:events"
import { setTimeout } from "node:timers/promises"

export const about = {
  package: "graphile-worker",
  server: "postgres",
  operation: "a job cycle: fetch a job that was added beforehand, run a task that does nothing, delete the job",
  comparedWith: "acquire + release of distinct work IDs, at once by as many fibers",
  comparable:
    "Both claim a unit of work for one process, run nothing, and record that it ended; a pool of 10 connections each, "
    + "in the same run on the same server; counted until the last job is gone from the table.",
  notComparable:
    "Graphile Worker does more: it finds the next job by priority, schedule and queue, carries its payload, counts its "
    + "attempts, and deletes its row in the end (adding the jobs is not counted). worklease is asked for a work ID that "
    + "the caller names. Graphile Worker does less: a claim is no lease that expires and is renewed (a killed worker's "
    + "job stays locked for 4 hours), has no fencing token and no checkpoint to continue from. In its batched mode it "
    + "fetches up to 500 jobs at once and completes them after they ran, not each before its worker goes on: a crash "
    + "leaves all of those locked, and runs some of them again."
}

const modes = [
  { label: "concurrency 10, unbatched", guess: 4_000, options: { concurrentJobs: 10 } },
  // What its documentation on performance measures with, but for the number of connections.
  {
    label: "concurrency 24, localQueue 500, completeJobBatchDelay 0",
    guess: 30_000,
    options: { concurrentJobs: 24, localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0 }
  }
]

export const measure = async ({ postgres, seconds, progress }) => {
  const { Logger, makeWorkerUtils, run } = await import("graphile-worker")
  const { default: pg } = await import("pg")
  const logger = new Logger(() => () => {})
  const utils = await makeWorkerUtils({ connectionString: postgres, logger })
  await utils.migrate()
  await utils.release()
  const client = new pg.Client({ connectionString: postgres })
  await client.connect()

  const add = async (jobs) => {
    await client.query(
      "SELECT count(*) FROM graphile_worker.add_jobs(ARRAY("
        + "SELECT json_populate_record(NULL::graphile_worker.job_spec, "
        + "json_build_object('identifier', 'nothing', 'payload', json_build_object('number', number))) "
        + "FROM generate_series(1, $1::int) AS number))",
      [jobs]
    )
    // As autovacuum would: without statistics the jobs are not found by the index.
    await client.query("VACUUM ANALYZE")
  }
  const remaining = async () => {
    const { rows } = await client.query("SELECT count(*)::int AS jobs FROM graphile_worker._private_jobs")
    return rows[0].jobs
  }
  /** Works off the jobs that are there. The time runs from the start of the first worker. */
  const drain = async (jobs, options) => {
    const events = new EventEmitter()
    let started
    events.once("worker:create", () => {
      started = performance.now()
    })
    let left = jobs
    let allExecuted
    const done = new Promise((resolve) => {
      allExecuted = resolve
    })
    // One of the connections listens for new jobs.
    const runner = await run({
      preset: { worker: { connectionString: postgres, maxPoolSize: 11, logger, events, ...options } },
      taskList: {
        nothing: () => {
          if (--left === 0) allExecuted()
        }
      },
      noHandleSignals: true,
      parsedCronItems: []
    })
    await Promise.race([done, runner.promise])
    while (await remaining() > 0) await setTimeout(1)
    const rate = jobs / ((performance.now() - started) / 1000)
    await runner.stop()
    return rate
  }

  const figures = []
  for (const { label, guess, options } of modes) {
    progress(`${label}: warming up`)
    const few = Math.ceil(guess * seconds * 0.1)
    await add(few)
    const jobs = Math.ceil(await drain(few, options) * seconds * 0.4)
    await add(jobs)
    progress(`${label}: ${jobs} jobs`)
    figures.push({ label, value: await drain(jobs, options), unit: "jobs/s" })
  }
  await client.end()
  return { figures }
}
