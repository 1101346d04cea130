import * as NodeServices from "@effect/platform-node/NodeServices"
import { assert, describe, it } from "@effect/vitest"
import { Effect, Stream } from "effect"
import { ChildProcess } from "effect/process"
import { fileURLToPath } from "node:url"
import { isTested } from "./support/Redis.ts"

/** A real run, with fewer members: a server, processes that come and go, one that is killed. */
const demo = (...flags: ReadonlyArray<string>) =>
  Effect.gen(function*() {
    const handle = yield* ChildProcess.make(
      process.execPath,
      [
        fileURLToPath(new URL("../demo/pool/main.ts", import.meta.url)),
        "--members=3",
        "--keys=12",
        "--pause=500",
        "--seed=1",
        ...flags
      ],
      { stdin: "ignore", forceKillAfter: "5 seconds" }
    )
    const output = yield* handle.all.pipe(Stream.decodeText, Stream.mkString)
    return { output, code: yield* handle.exitCode }
  }).pipe(Effect.scoped, Effect.provide(NodeServices.layer))

const isAsItShouldBe = ({ code, output }: { readonly code: number; readonly output: string }) => {
  assert.match(output, /all 12 at work after \d+\.\d s: m\d has 12; 0 moves, at least 0 were needed\n/)
  assert.match(
    output,
    /all 12 at work after \d+\.\d s: m1 has 4, m2 has 4, m3 has 4; \d+ moves, at least 8 were needed\n/
  )
  assert.match(output, /m\d killed with SIGKILL; it had 4\n/)
  assert.match(output, /m\d killed \(expired\) → m\d  [\d ]+  gap (up to )?\d\.\d s\n/)
  assert.match(output, /m\d is told to end \(SIGTERM\); it has 6\n/)
  assert.match(output, /no partition was executed twice at once: \d+ executions, compared by fencing token\n/)
  assert.match(output, /each went on where the last checkpoint before it was\n/)
  assert.match(output, /all 12 at work, evenly shared, at the end of each stage, and then nothing moved\n/)
  assert.match(output, /m\d was away for \d+\.\d s when it was redeployed/)
  assert.match(output, /nothing is held any more, now that all have left\n/)
  assert.strictEqual(code, 0, output)
}

describe("demo of a pool", () => {
  it.live("members come and go, and nothing is executed twice at once", () => Effect.map(demo(), isAsItShouldBe))

  it.live.runIf(isTested)(
    "on Redis, members come and go, and nothing is executed twice at once",
    () => Effect.map(demo("--backend=redis"), isAsItShouldBe)
  )
})
