// Stages the package as it is published, in .pack/package, packs it, and checks the tarball.
//
// In the repository `exports` point at the sources, so that tests, examples and editors need no build; published they
// point at dist. publishConfig.exports has them, but npm (unlike pnpm) does not apply it: this does.
import { cpSync, mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs"
import { join } from "node:path"
import { Failure, files, root, run } from "./run.mjs"

const pack = join(root, ".pack")
const tarball = join(pack, "worklease.tgz")
const consumer = join(pack, "consumer")

/** Every module that the package exports, as its user names it. */
const entries = () =>
  files("dist", ".js")
    .map((file) => file.slice(0, -".js".length))
    .filter((name) => !/(^|\/)internal\//.test(name) && !(name.endsWith("/index") && name !== "testing/index"))
    .map((name) => name === "index" ? "." : "./" + name.replace(/\/index$/, ""))

export const stage = () => {
  const { allowScripts: _, devDependencies: __, publishConfig, scripts: ___, ...manifest } = JSON.parse(
    readFileSync(join(root, "package.json"), "utf8")
  )
  const { exports, ...publish } = publishConfig
  rmSync(pack, { recursive: true, force: true })
  mkdirSync(join(pack, "package"), { recursive: true })
  for (const path of ["src", "dist", "README.md", "LICENSE"]) {
    cpSync(join(root, path), join(pack, "package", path), { recursive: true })
  }
  const staged = { ...manifest, exports, publishConfig: publish }
  writeFileSync(join(pack, "package", "package.json"), JSON.stringify(staged, null, 2) + "\n")
  const name = run("npm", "pack", "./.pack/package", "--pack-destination", ".pack", "--silent").trim()
  cpSync(join(pack, name), tarball)
}

export const publint = () => run("publint", "run", tarball, "--strict")

export const attw = () => run("attw", tarball, "--profile", "esm-only", "--no-emoji", "--entrypoints", ...entries())

/**
 * Installs the tarball into an empty project beside the peers, and uses it: every module loads, its declarations stand
 * by themselves (`stripInternal` may have taken away what they refer to, which `skipLibCheck` would hide from the user
 * as `any`), and what is internal cannot be imported.
 */
export const consume = () => {
  const installed = join(consumer, "node_modules", "worklease")
  mkdirSync(installed, { recursive: true })
  run("tar", "-xzf", tarball, "-C", installed, "--strip-components=1")
  const modules = entries().map((entry) => entry.replace(/^\./, "worklease"))
  writeFileSync(join(consumer, "package.json"), `{ "type": "module" }\n`)
  writeFileSync(
    join(consumer, "tsconfig.json"),
    JSON.stringify({
      extends: "../../tsconfig.base.json",
      compilerOptions: { skipLibCheck: false },
      files: ["all.ts"]
    })
  )
  writeFileSync(
    join(consumer, "all.ts"),
    modules.map((name, i) => `import * as m${i} from "${name}"\n`).join("") +
      `export const modules = [${modules.map((_, i) => `m${i}`)}]\n`
  )
  try {
    run("tsc", "-p", join(consumer, "tsconfig.json"))
  } catch (error) {
    // The declarations of other packages are theirs to check.
    const ours = error.message.split("\n").filter((line) => /^error |^[^(]*\b(all\.ts|worklease\/dist\/)/.test(line))
    if (ours.length > 0) throw new Failure(ours.join("\n"))
  }
  writeFileSync(
    join(consumer, "all.mjs"),
    `const modules = ${JSON.stringify(modules)}
for (const name of modules) await import(name)
for (const name of ["index", "internal/x", "testing/internal/x", "testing/index"].map((name) => "worklease/" + name)) {
  await import(name).then(
    () => { throw new Error(name + " can be imported") },
    (error) => { if (error.code !== "ERR_PACKAGE_PATH_NOT_EXPORTED") throw error }
  )
}
`
  )
  run("node", join(consumer, "all.mjs"))
}
