// Makes the code blocks of README.md part of the type-check, so that what the reader copies compiles.
//
// Each ```ts block becomes a file typetest/readme/line-N.ts in which it has the line numbers that it has in README.md.
// Directly before a block, an HTML comment (which the reader does not see) may say
//   <!-- illustrative -->         this block is not code to copy: leave it out
//   <!-- prelude: ...code... -->  declarations that the block needs and the reader does not
import { mkdirSync, readFileSync, rmSync, writeFileSync } from "node:fs"
import { join } from "node:path"
import { Failure, isMain, report, root } from "./run.mjs"

const block =
  /(?:<!--(?<comment>(?:(?!-->)[^])*?)-->\s*?\n)?^(?<fence>`{3,})(?:ts|typescript)\b[^\n]*\n(?<code>[^]*?)^\k<fence>/gm

export const extract = () => {
  const target = join(root, "typetest", "readme")
  const readme = readFileSync(join(root, "README.md"), "utf8").replaceAll("\r", "")
  rmSync(target, { recursive: true, force: true })
  mkdirSync(target, { recursive: true })
  let found = 0
  for (const match of readme.matchAll(block)) {
    const { code, comment = "" } = match.groups
    if (comment.trim() === "illustrative") continue
    const prelude = /^\s*prelude:/.test(comment) ? comment.replace("prelude:", "") : ""
    const end = match.index + match[0].lastIndexOf(code)
    const start = match.index + "<!--".length
    // Blank lines instead of everything else keep each part on its own line.
    const lines = (from, to) => "\n".repeat(readme.slice(from, to).split("\n").length - 1)
    const source = prelude === ""
      ? lines(0, end) + code
      : lines(0, start) + prelude + lines(start + comment.length, end) + code
    writeFileSync(join(target, `line-${lines(0, end).length + 1}.ts`), source)
    found++
  }
  if (found === 0) throw new Failure("README.md has no ```ts block")
  return found
}

if (isMain(import.meta)) report("code in README.md: extract", extract)
