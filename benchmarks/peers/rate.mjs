/**
 * Runs so many lanes at once, each of which does one cycle after the other until the time is up, and answers the cycles
 * per second of all of them together. A cycle answers how many it counts for, once it has ended; the time runs until
 * the last lane has ended.
 */
export const cyclesPerSecond = async (lanes, seconds, cycle) => {
  let cycles = 0
  const elapsed = await secondsOf(async () => {
    const until = performance.now() + seconds * 1000
    const run = async (lane) => {
      while (performance.now() < until) {
        const ended = await cycle(lane)
        cycles += ended
      }
    }
    await Promise.all(Array.from({ length: lanes }, (_, lane) => run(lane)))
  })
  return cycles / elapsed
}

/** How long it takes. */
export const secondsOf = async (body) => {
  const started = performance.now()
  await body()
  return (performance.now() - started) / 1000
}

/** A state such as our own benchmarks checkpoint: an object of about 200 bytes as JSON, different each time. */
export const state = (number) => ({
  step: number,
  cursor: `page-${String(number).padStart(12, "0")}`,
  completed: ["create-tenant", "copy-templates", "invite-members"],
  note: "x".repeat(90)
})
