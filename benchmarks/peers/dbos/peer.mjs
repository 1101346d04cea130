// Durable steps per second of DBOS: one workflow of many trivial steps alone, then 32 of them at once.
import { secondsOf, state } from "../rate.mjs"

export const about = {
  package: "@dbos-inc/dbos-sdk",
  server: "postgres",
  operation:
    "a durable step (DBOS.runStep) that does nothing and returns about 200 bytes, in a workflow of many of them",
  comparedWith: "work.checkpoint with a typed state of about 200 bytes: a lone holder, and 32 holders at once",
  comparable:
    "Both make about 200 bytes of progress durable in PostgreSQL, so that whoever continues does not do it again, and "
    + "both go on only after the commit; 10 connections each, in the same run on the same server.",
  notComparable:
    "DBOS does more: it keeps each step's output in a row of its own, from which a workflow is replayed, and "
    + "looks first whether the workflow was cancelled and the step has already run, which makes 4 transactions of 7 "
    + "statements a step; it also queues and schedules workflows. worklease keeps only the last state, in one row "
    + "per lease. DBOS does less: a step checks that its execution still owns the workflow, but extends no "
    + "time-limited lease: another process takes over a killed one's workflows only when it is told to; there is no "
    + "fencing token for writes elsewhere; and the steps of concurrent workflows are not gathered into one "
    + "statement."
}

export const measure = async ({ postgres, seconds, progress }) => {
  const { DBOS } = await import("@dbos-inc/dbos-sdk")
  const { default: pg } = await import("pg")
  DBOS.setConfig({
    name: "worklease-benchmark",
    systemDatabaseUrl: postgres,
    systemDatabasePoolSize: 10,
    logLevel: "error"
  })
  const workflow = DBOS.registerWorkflow(async (milliseconds) => {
    const until = performance.now() + milliseconds
    let steps = 0
    while (performance.now() < until) {
      await DBOS.runStep(async () => state(steps), { name: "step" })
      steps++
    }
    return steps
  }, { name: "steps" })
  await DBOS.launch()

  const stepsPerSecond = async (workflows, seconds) => {
    let steps = 0
    const elapsed = await secondsOf(async () => {
      const counts = await Promise.all(Array.from({ length: workflows }, () => workflow(seconds * 1000)))
      steps = counts.reduce((sum, count) => sum + count, 0)
    })
    return { rate: steps / elapsed, steps }
  }

  progress("warming up")
  const warm = (await stepsPerSecond(32, seconds / 5)).steps
  const client = new pg.Client({ connectionString: postgres })
  await client.connect()
  await client.query("VACUUM ANALYZE")
  progress("one workflow")
  const alone = await stepsPerSecond(1, seconds * 0.4)
  progress("32 workflows")
  const many = await stepsPerSecond(32, seconds * 0.4)

  // What was measured is what is stored: a row for each step.
  const { rows } = await client.query("SELECT count(*)::int AS steps FROM dbos.operation_outputs")
  await client.end()
  const counted = warm + alone.steps + many.steps
  if (rows[0].steps !== counted) throw new Error(`${counted} steps were counted, ${rows[0].steps} are stored`)
  await DBOS.shutdown()
  return {
    figures: [
      { label: "one workflow", value: alone.rate, unit: "steps/s" },
      { label: "32 workflows at once", value: many.rate, unit: "steps/s" }
    ]
  }
}
