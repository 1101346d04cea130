// Everything that can be said about the repository without running its tests. Stops at the first step that fails.
import { build } from "./build.mjs"
import { checkImports } from "./imports.mjs"
import { attw, consume, publint, stage } from "./pack.mjs"
import { extract } from "./readme.mjs"
import { report, run } from "./run.mjs"

// TypeScript's own compiler with Effect's diagnostics in it (an Effect that nobody runs is an error), started from its
// package, so that the installed compiler stays as it is.
const typeCheck = (config) => () => run(run("effect-tsgo", "get-exe-path").trim(), "-p", config)

report("format", () => run("dprint", "check"))
report("lint", () => run("oxlint", "--deny-warnings"))
report("types of src", typeCheck("tsconfig.src.json"))
report("types of everything", typeCheck("tsconfig.json"))
report("code in README.md: extract", extract)
report("code in README.md: types", typeCheck("tsconfig.readme.json"))
report("build", build)
report("imports", checkImports)
report("package: stage", stage)
report("package: publint", publint)
report("package: are the types wrong", attw)
report("package: as its user sees it", consume)
