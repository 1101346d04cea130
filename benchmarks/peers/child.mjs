// Runs one peer's measurement in a process of its own, and sends what came of it to the process that started it:
// the peer's dependencies, its timers and its crashes stay out of everybody else's figures.
const [script, options] = process.argv.slice(2)

process.on("disconnect", () => process.exit(1))

// Exits only once the message is out, and whatever the peer still keeps alive.
const finish = (message) => process.send(message, () => process.exit(0))

const failed = (error) => {
  console.error(error)
  finish({ error: error instanceof Error ? error.message : String(error) })
}
process.on("uncaughtException", failed)
process.on("unhandledRejection", failed)

try {
  const { measure } = await import(script)
  finish(await measure({ ...JSON.parse(options), progress: (text) => process.send({ progress: text }) }))
} catch (error) {
  failed(error)
}
