// Compiles src to dist, from nothing: a module that was deleted must not live on in the package.
import { rmSync } from "node:fs"
import { join } from "node:path"
import { isMain, report, root, run } from "./run.mjs"

export const build = () => {
  rmSync(join(root, "dist"), { recursive: true, force: true })
  run("tsc", "-p", "tsconfig.build.json")
}

if (isMain(import.meta)) report("build to dist", build)
