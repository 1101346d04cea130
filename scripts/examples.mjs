// Runs every program in examples/, one after the other, as its reader would: `node examples/x.ts`. Each must end by
// itself, with exit code 0, within two minutes. `npm run examples -- hand-off` runs those whose names contain "hand-off",
// and shows what they print.
import { spawn } from "node:child_process"
import { existsSync, readdirSync } from "node:fs"
import { join } from "node:path"
import { root } from "./run.mjs"

const limit = 120_000
const dir = join(root, "examples")
const wanted = process.argv.slice(2)
const all = (existsSync(dir) ? readdirSync(dir) : []).filter((name) => name.endsWith(".ts")).sort()
const names = all.filter((name) => wanted.length === 0 || wanted.some((word) => name.includes(word)))
if (names.length === 0) {
  const list = all.map((name) => `  ${name.replace(/\.ts$/, "")}`).join("\n")
  const asked = wanted.some((word) => word === "--help" || word === "-h")
  console.log(
    `npm run examples [-- <part of a name>...]\n\nRuns them, and shows what those print that are named:\n${list}`
  )
  process.exit(asked ? 0 : 1)
}

const execute = (name) =>
  new Promise((resolve) => {
    let output = ""
    let late = false
    const collect = (chunk) => {
      output += chunk
      if (wanted.length > 0) process.stdout.write(chunk)
    }
    // In a process group of its own, so that what it started goes with it when it is too late.
    const child = spawn("node", [join("examples", name)], {
      cwd: root,
      stdio: ["ignore", "pipe", "pipe"],
      detached: process.platform !== "win32"
    })
    child.stdout.setEncoding("utf8").on("data", collect)
    child.stderr.setEncoding("utf8").on("data", collect)
    const timer = setTimeout(() => {
      late = true
      output += `\nstill running, or something that it started, after ${limit / 1000} s\n`
      try {
        if (process.platform === "win32") child.kill()
        else process.kill(-child.pid, "SIGKILL")
      } catch {
        // It ended just now.
      }
    }, limit)
    child.on("error", (error) => output += String(error))
    child.on("close", (code) => {
      clearTimeout(timer)
      resolve({ ok: code === 0 && !late, output })
    })
  })

let failed = 0
for (const name of names) {
  const started = performance.now()
  const { ok, output } = await execute(name)
  console.log(`${ok ? "ok  " : "FAIL"}  ${name} (${((performance.now() - started) / 1000).toFixed(1)} s)`)
  if (!ok) {
    failed++
    if (wanted.length === 0) console.log(output.trimEnd().replace(/^/gm, "      | "))
  }
}
console.log(`${names.length - failed} of ${names.length} examples ok`)
if (failed > 0) process.exitCode = 1
