// Makes a fresh clone ready: every npm script runs this first (its "pre" script), so that `git clone` and `npm test`
// are all there is to it. Installs what the lockfile says when node_modules is missing or says something else.
//
// The repository's TypeScript runs by type stripping, which needs Node 22.18. The package `node` puts a Node 22 into
// node_modules/.bin, which npm has first on the PATH of its scripts: so this script may run on an older Node, and the
// script after it does not.
import { spawnSync } from "node:child_process"
import { readFileSync, rmSync } from "node:fs"
import { dirname, join } from "node:path"
import { fileURLToPath } from "node:url"

const root = dirname(dirname(fileURLToPath(import.meta.url)))
const hostNode = process.env.npm_node_execpath ?? process.execPath // not the one in node_modules: npm ci deletes that

const packages = (file) => JSON.parse(readFileSync(join(root, file), "utf8")).packages

/** Compares contents, not times: a git checkout touches files that did not change. */
const installed = () => {
  try {
    const have = packages("node_modules/.package-lock.json")
    return Object.entries(packages("package-lock.json")).every(([path, wanted]) =>
      path === "" || wanted.optional || have[path]?.version === wanted.version
    )
  } catch {
    return false
  }
}

const npm = (...args) =>
  process.env.npm_execpath === undefined
    ? spawnSync("npm", args, { cwd: root, encoding: "utf8", shell: process.platform === "win32" })
    : spawnSync(hostNode, [process.env.npm_execpath, ...args], { cwd: root, encoding: "utf8" })

const install = () => {
  const started = Date.now()
  console.log("setup: installing the dependencies into node_modules")
  const flags = ["--include=dev", "--no-audit", "--no-fund", "--loglevel=error"]
  let result = npm("ci", ...flags)
  if (result.status !== 0 && /node_modules[\\/]node\b/.test(result.stdout + result.stderr)) {
    // The package `node` has no binary for this platform, which fails the whole installation: do without it.
    result = npm("ci", "--ignore-scripts", ...flags)
    if (result.status === 0) {
      const others = Object.entries(packages("node_modules/.package-lock.json"))
        .filter(([path, info]) => info.hasInstallScript && path !== "node_modules/node")
        .map(([path]) => path.replace(/.*node_modules\//, ""))
      result = npm("rebuild", "--loglevel=error", ...new Set(others))
    }
  }
  if (result.status !== 0) {
    console.error(`${result.stdout ?? ""}${result.stderr ?? ""}${result.error ?? ""}`)
    console.error("setup: npm ci failed")
    process.exit(1)
  }
  console.log(`setup: done in ${Math.round((Date.now() - started) / 1000)} s`)
}

if (!installed()) install()

// What the scripts will run on. A binary that cannot run here (musl, say) must not stand in front of one that can.
const bin = join(root, "node_modules", ".bin", "node")
let version = spawnSync(bin, ["--version"], { encoding: "utf8", shell: process.platform === "win32" }).stdout?.trim()
if (!version) {
  for (const suffix of ["", ".cmd", ".ps1"]) rmSync(bin + suffix, { force: true })
  version = spawnSync(hostNode, ["--version"], { encoding: "utf8" }).stdout.trim()
}
const [major, minor] = version.slice(1).split(".").map(Number)
if (major < 22 || (major === 22 && minor < 19)) {
  console.error(`setup: no Node 22 for this platform on npm: using ${version}, but TypeScript files need Node >= 22.19`)
}
