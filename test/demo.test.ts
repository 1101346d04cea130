import * as NodeServices from "@effect/platform-node/NodeServices"
import { assert, describe, it } from "@effect/vitest"
import { Effect, Stream } from "effect"
import { ChildProcess } from "effect/process"
import { fileURLToPath } from "node:url"
import { isTested } from "./support/Redis.ts"

/** A real run, with fewer records: a server, worker processes, kills and a freeze. */
const demo = (...flags: ReadonlyArray<string>) =>
  Effect.gen(function*() {
    const handle = yield* ChildProcess.make(
      process.execPath,
      [
        fileURLToPath(new URL("../demo/main.ts", import.meta.url)),
        "--records=20000",
        "--kills=2",
        ...flags
      ],
      { stdin: "ignore", forceKillAfter: "5 seconds" }
    )
    const output = yield* handle.all.pipe(Stream.decodeText, Stream.mkString)
    return { output, code: yield* handle.exitCode }
  }).pipe(Effect.scoped, Effect.provide(NodeServices.layer))

describe("demo", () => {
  it.live("an import survives murder", () =>
    Effect.gen(function*() {
      const { code, output } = yield* demo("--seed=1")
      assert.match(output, /each of 20,000 records is there exactly once, as the source has it\n/)
      assert.match(output, /no zombie write/)
      assert.match(output, /w\d+ killed with SIGKILL; it held import:/)
      assert.match(output, /import:\d  w\d+ killed \(expired\) → w\d+ from record [\d,]+, gap \d+\.\d s\n/)
      assert.match(output, /2 workers killed with SIGKILL: others continued all that they held\n/)
      assert.match(output, /w\d+ frozen with SIGSTOP for \d+\.\d s: it lost \d leases? and wrote nothing more\n/)
      assert.strictEqual(code, 0, output)
    }))

  it.live("with the fence taken out, it does not", () =>
    Effect.gen(function*() {
      const { code, output } = yield* demo("--seed=1", "--no-fence")
      assert.match(output, /zombie write: w\d+ wrote [\d,]+ records of import:[\d, and]+ after it had lost them\n/)
      assert.match(output, /(?<![\d,])0 of 20,000 records are missing, and [1-9][\d,]* are there more than once\n/)
      assert.match(output, /[1-9][\d,]* rows were written under a fencing token after a later one had been\n/)
      assert.strictEqual(code, 1, output)
    }))

  describe.runIf(isTested)("on Redis", () => {
    it.live("an import survives murder", () =>
      Effect.gen(function*() {
        const { code, output } = yield* demo("--seed=1", "--backend=redis")
        assert.match(output, /each of 20,000 records is there exactly once, as the source has it\n/)
        assert.match(output, /no zombie write/)
        assert.match(output, /2 workers killed with SIGKILL: others continued all that they held\n/)
        assert.match(output, /w\d+ frozen with SIGSTOP for \d+\.\d s: it lost \d leases? and wrote nothing more\n/)
        assert.strictEqual(code, 0, output)
      }))

    it.live("with the fence taken out, it does not", () =>
      Effect.gen(function*() {
        const { code, output } = yield* demo("--seed=1", "--backend=redis", "--no-fence")
        assert.match(output, /(?<![\d,])0 of 20,000 records are missing, and [1-9][\d,]* are there more than once\n/)
        assert.match(output, /[1-9][\d,]* rows were written under a fencing token after a later one had been\n/)
        assert.strictEqual(code, 1, output)
      }))
  })
})
