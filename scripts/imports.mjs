// Checks what the built library reaches, through everything that it imports: from where it is built, since types are
// gone there.
//   - Nothing in it, and nothing of effect that it uses, needs Node: it runs everywhere that Effect runs.
//   - The core (src and src/internal) needs nothing but effect. What a backend or a test needs besides, an optional
//     peer, is imported by layers/ and testing/ only, and the core imports neither of those.
import { readFileSync } from "node:fs"
import { builtinModules } from "node:module"
import { join, relative } from "node:path"
import { fileURLToPath, pathToFileURL } from "node:url"
import { Failure, files, isMain, report, root } from "./run.mjs"

const importing =
  /(?:^|[;}\s])(?:import|export)\s*(?:[\w*{}\s,$]+?\s*from\s*)?["']([^"']+)["']|\bimport\(\s*["']([^"']+)["']/g
const comment = /\/\*[^]*?\*\/|^\s*\/\/.*$/gm
const builtins = new Set(builtinModules)
const { peerDependencies } = JSON.parse(readFileSync(join(root, "package.json"), "utf8"))

const nameOf = (url) => relative(root, fileURLToPath(url)).replaceAll("\\", "/")

const importsOf = (url) =>
  Array.from(
    readFileSync(fileURLToPath(url), "utf8").replace(comment, "").matchAll(importing),
    ([, a, b]) => a ?? b
  )

// What may import what goes upwards only.
const layer = (name) => name.startsWith("dist/testing/") ? 2 : name.startsWith("dist/layers/") ? 1 : 0

export const checkImports = () => {
  const dist = join(root, "dist")
  const problems = []
  const visited = new Set()

  const visit = (url, trail) => {
    if (visited.has(url)) return
    visited.add(url)
    const name = nameOf(url)
    const here = [...trail, name]
    const problem = (text) => problems.push([`${text}:`, ...here].join("\n    "))
    for (const specifier of importsOf(url)) {
      const relative = specifier.startsWith(".")
      if (specifier.startsWith("node:") || builtins.has(specifier)) {
        problem(`needs Node's ${specifier}`)
      } else if (relative || /^effect(\/|$)/.test(specifier)) {
        const target = relative ? new URL(specifier, url).href : import.meta.resolve(specifier)
        if (layer(nameOf(target)) > layer(name)) problem(`imports ${nameOf(target)}`)
        else visit(target, here)
      } else if (!name.startsWith("dist/")) {
        // What effect depends on is its own affair.
      } else if (!(specifier.match(/^(@[^/]+\/)?[^/]+/)[0] in peerDependencies)) {
        problem(`imports ${specifier}, which is no peer dependency`)
      } else if (layer(name) === 0) {
        problem(`the core imports ${specifier}`)
      }
    }
  }
  for (const file of files("dist", ".js")) visit(pathToFileURL(join(dist, file)).href, [])
  if (problems.length > 0) throw new Failure(problems.join("\n\n"))
}

if (isMain(import.meta)) report("imports", checkImports)
