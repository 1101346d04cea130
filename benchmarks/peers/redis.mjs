// A Redis for the peers that need one.
import { spawn, spawnSync } from "node:child_process"
import { connect, createServer } from "node:net"
import { setTimeout } from "node:timers/promises"

const programs = ["redis-server", "valkey-server"]

const installed = () => programs.find((program) => spawnSync(program, ["--version"], { encoding: "utf8" }).status === 0)

const freePort = () =>
  new Promise((resolve, reject) => {
    const server = createServer().once("error", reject).listen(0, "127.0.0.1", () => {
      const { port } = server.address()
      server.close(() => resolve(port))
    })
  })

const accepts = (port) =>
  new Promise((resolve) => {
    const socket = connect(port, "127.0.0.1")
    const answer = (value) => () => {
      socket.destroy()
      resolve(value)
    }
    socket.once("connect", answer(true)).once("error", answer(false))
  })

// The shell reads a pipe that only this process holds open: the server and its directory go when this process dies in
// any way.
const supervisor = `
directory=$(mktemp -d) || exit 1
"$1" --port "$2" --bind 127.0.0.1 --save '' --appendonly no --dir "$directory" &
server=$!
cat > /dev/null
kill "$server"
wait "$server"
rm -rf "$directory"
`

/** Starts a server on a free port, in memory only. Answers its URL and how to stop it, or why there is none. */
export const startRedis = async () => {
  const program = installed()
  if (program === undefined) {
    return {
      error: "no Redis: give the URL of one with --redis or REDIS_URL, or install redis-server or valkey-server "
        + "(apt-get install redis-server, brew install redis), which is then started on a free port"
    }
  }
  const port = await freePort()
  const shell = spawn("sh", ["-c", supervisor, "sh", program, String(port)], {
    stdio: ["pipe", "pipe", "pipe"],
    detached: true
  })
  let said = ""
  for (const stream of [shell.stdout, shell.stderr]) {
    stream.setEncoding("utf8").on("data", (text) => {
      said = (said + text).slice(-2_000)
    })
  }
  const ended = new Promise((resolve) => {
    shell.once("close", resolve).once("error", resolve)
  })
  const stop = () => {
    shell.stdin.end()
    return ended
  }
  for (let waited = 0; waited < 10_000; waited += 20) {
    if (await accepts(port)) return { url: `redis://127.0.0.1:${port}`, stop }
    await setTimeout(20)
  }
  await stop()
  return { error: `no Redis: ${program} did not accept connections within 10 s\n${said.trim()}` }
}
