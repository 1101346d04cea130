import * as NodeServices from "@effect/platform-node/NodeServices"
import { assert, describe, it } from "@effect/vitest"
import { Data, Effect, Option, Stream } from "effect"
import { ChildProcess } from "effect/process"
import { fileURLToPath } from "node:url"
import { Bench } from "../benchmarks/Bench.ts"
import * as Chart from "../benchmarks/Chart.ts"
import * as Format from "../benchmarks/Format.ts"
import type { Machine } from "../benchmarks/Machine.ts"
import * as Pgbench from "../benchmarks/Pgbench.ts"
import * as Report from "../benchmarks/Report.ts"
import * as Run from "../benchmarks/Run.ts"
import { encoded } from "../benchmarks/State.ts"
import { median, percentile, ratios, spread } from "../benchmarks/Statistics.ts"
import * as Table from "../benchmarks/Table.ts"
import * as Target from "../benchmarks/Target.ts"
import { targets } from "../benchmarks/targets/index.ts"

describe("statistics", () => {
  const hundred = Array.from({ length: 100 }, (_, i) => 100 - i)

  it("a percentile is the measured value that so many percent do not exceed", () => {
    assert.deepStrictEqual([0, 1, 50, 90, 99, 100].map((percent) => percentile(hundred, percent)), [
      1,
      1,
      50,
      90,
      99,
      100
    ])
    assert.strictEqual(percentile([3, 1, 2], 50), 2)
    assert.strictEqual(percentile([3, 1, 2], 99), 3)
    assert.strictEqual(percentile([10, 9, 1], 34), 9)
    assert.isNaN(percentile([], 50))
    assert.deepStrictEqual(hundred[0], 100, "the samples are not sorted in place")
  })

  it("the median is that of numbers, not of their texts, and between two it is their mean", () => {
    assert.strictEqual(median([9, 10, 100]), 10)
    assert.strictEqual(median([4, 1, 3, 2]), 2.5)
    assert.isNaN(median([]))
    assert.deepStrictEqual(spread([3, 1, 2]), { median: 2, min: 1, max: 3 })
  })

  it("ratios are those of the same round", () => {
    assert.deepStrictEqual(ratios([2, 9, 4], [1, 3, 8]), [2, 3, 0.5])
  })
})

describe("format", () => {
  it("writes three digits with their unit", () => {
    assert.deepStrictEqual([8.5, 856.4, 12_345, 123_456].map(Format.rate), ["8.50/s", "856/s", "12.3k/s", "123k/s"])
    assert.deepStrictEqual([999, 7030, 1_000_000, 25_276_000_000].map(Format.bytes), [
      "999 B",
      "7.03 kB",
      "1.00 MB",
      "25.3 GB"
    ])
    assert.strictEqual(Format.elapsed(65_400), "1:05")
  })

  it("a spread has its unit once, where it is the same", () => {
    assert.strictEqual(Format.spread(Format.rate, spread([12_000, 11_000, 13_500])), "12.0k/s (11.0–13.5k/s)")
    assert.strictEqual(Format.spread(Format.rate, spread([900, 1200])), "1.05k/s (900/s–1.20k/s)")
    assert.strictEqual(Format.spread(Format.millis, spread([0.25])), "0.25 ms")
  })
})

describe("table", () => {
  const columns: ReadonlyArray<Table.Column> = [{ title: "#", align: "right" }, { title: "what", width: 12 }, {
    title: "x"
  }]

  it("text is aligned, and what is too long continues below", () => {
    assert.strictEqual(
      Table.text(columns, [["10", "a title", "1"], ["", "longer than twelve", "2"]]),
      ` #  what         x
──────────────────
10  a title      1
    longer than  2
    twelve`
    )
  })

  it("in Markdown, no cell ends early", () => {
    assert.strictEqual(
      Table.markdown(columns, [["1", "a | b\\|", "x <b>\ny"]]),
      "| # | what | x |\n| --: | --- | --- |\n| 1 | a \\| b\\\\\\| | x &lt;b><br>y |"
    )
  })
})

describe("chart", () => {
  const bars = [
    { label: "ours & <theirs>", value: 200, text: "\"200\"", kind: "ours" as const },
    { label: "half", value: 100, text: "100", kind: "compared" as const },
    { label: "none", value: NaN, text: "NaN", kind: "compared" as const }
  ]
  const svg = Chart.svg("A & B", [{ title: "<panel>", bars }])

  it("texts are escaped", () => {
    assert.include(svg, "ours &amp; &lt;theirs&gt;")
    assert.include(svg, "&quot;200&quot;")
    assert.include(svg, "&lt;panel&gt;")
    assert.include(svg, "aria-label=\"A &amp; B\"")
    assert.notMatch(svg, /&(?!amp;|lt;|gt;|quot;)/)
    const opened = [...svg.matchAll(/<([a-z]+)(?: [^>]*[^/>])?>/g)].map(([, name]) => name).sort()
    assert.deepStrictEqual(opened, [...svg.matchAll(/<\/([a-z]+)>/g)].map(([, name]) => name).sort())
  })

  it("bars are as long as their values", () => {
    const [ours, half, none] = [...svg.matchAll(/<rect class="(?:ours|compared)"[^>]* width="([\d.]+)"/g)]
      .map(([, width]) => Number(width))
    assert.strictEqual(ours, half * 2)
    assert.strictEqual(none, 1)
  })

  it("has colours for light and for dark", () => {
    assert.include(svg, "prefers-color-scheme: dark")
  })
})

describe("pgbench", () => {
  it("its rate is read from what it prints", () => {
    const output = "number of failed transactions: 0 (0.000%)\nlatency average = 0.5 ms\n" +
      "initial connection time = 9.2 ms\ntps = 21345.678901 (without initial connection time)\n"
    assert.deepStrictEqual(Pgbench.perSecond(output), Option.some(21_345.678901))
    assert.deepStrictEqual(Pgbench.perSecond("connection refused"), Option.none())
    assert.deepStrictEqual(Pgbench.perSecond(output.replace("transactions: 0", "transactions: 12")), Option.none())
  })
})

describe("state", () => {
  it.effect("is at most 200 bytes long, and always as long", () =>
    Effect.gen(function*() {
      const { byteLength } = yield* encoded(1)
      assert.isAtMost(byteLength, 200)
      assert.isAtLeast(byteLength, 190)
      assert.strictEqual((yield* encoded(1_000_000)).byteLength, byteLength)
    }))
})

// -----------------------------------------------------------------------------
// runs
// -----------------------------------------------------------------------------

class Broken extends Data.TaggedError("Broken")<{ readonly message: string }> {}

const fake = (
  number: number,
  run: Effect.Effect<Target.Outcome, unknown, Target.Services>
): Target.Target => ({ number, name: `Target ${number}`, method: "none", describe: () => "no size", run: () => run })

const row = (verdict: Target.Verdict): Target.Row => ({ what: "it", ours: "1/s", target: "≥ 2/s", verdict })

const machine: Machine = {
  cpu: "a CPU",
  cores: 2,
  memory: 8e9,
  load: 0.5,
  system: "a system",
  versions: [["Node", "22"]],
  settings: [["fsync", "off"]]
}

const runAll = (targets: ReadonlyArray<Target.Target>) =>
  Run.all(targets, "tiny", {
    // None of them asks for it.
    server: {} as never,
    pgbench: undefined,
    progress: { begin: () => Effect.void, say: () => Effect.void, end: () => Effect.void },
    seconds: 0.2
  }).pipe(
    Effect.map((results): Report.Report => ({ machine, size: "tiny", results, seconds: 65, date: "2026-11-30" })),
    Effect.provide(NodeServices.layer)
  )

describe("a run", () => {
  it.live("goes on after a target that fails, dies or does not end, and says why", () =>
    Effect.gen(function*() {
      let figure: Target.Figure | undefined
      const report = yield* runAll([
        fake(1, Effect.succeed({ rows: [row("pass")], figures: { one: { label: "one", text: "1/s" } } })),
        fake(2, Effect.fail(new Broken({ message: "the server is gone\nand more" }))),
        fake(3, Effect.die(new TypeError("a mistake"))),
        fake(4, Effect.never),
        fake(
          5,
          Bench.use(({ figures }) =>
            Effect.sync(() => {
              figure = figures.get("one")
              return { rows: [row("pass"), row("fall short")] }
            })
          )
        )
      ])
      assert.deepStrictEqual(report.results.map(Target.verdictOf), ["pass", "failed", "failed", "failed", "fall short"])
      assert.deepStrictEqual(figure, { label: "one", text: "1/s" })
      const text = Report.text(report)
      assert.match(text, /2 {2}Target 2 +failed: the server is gone +failed\n/)
      assert.match(text, /3 {2}Target 3 +failed: a mistake +failed\n/)
      assert.match(text, /4 {2}Target 4 +failed: It took longer than +failed\n/)
      assert.include(text, "Of 5 targets, 1 pass. Falling short: 5. Failed: 2, 3, 4. Measured in 1:05.")
      assert.include(Report.markdown(report), "| **2** | **Target 2** | **failed: the server is gone** |")
    }))

  it.live("what ended it ends the others too", () =>
    Effect.gen(function*() {
      let begun = 0
      const other = fake(2, Effect.as(Effect.sync(() => begun++), { rows: [row("pass")] }))
      for (const endless of [Effect.never, Effect.interrupt]) {
        const exit = yield* Effect.exit(Effect.timeout(runAll([fake(1, endless), other]), 50))
        assert.strictEqual(exit._tag, "Failure")
        assert.strictEqual(begun, 0)
      }
    }))

  it("all twelve are there", () => {
    assert.deepStrictEqual(targets.map(({ number }) => number), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
  })
})

const bench = (...flags: ReadonlyArray<string>) =>
  Effect.gen(function*() {
    const handle = yield* ChildProcess.make(
      process.execPath,
      [fileURLToPath(new URL("../benchmarks/main.ts", import.meta.url)), ...flags],
      { stdin: "ignore", forceKillAfter: "5 seconds" }
    )
    const output = yield* handle.all.pipe(Stream.decodeText, Stream.mkString)
    return { output, code: yield* handle.exitCode }
  }).pipe(Effect.scoped, Effect.provide(NodeServices.layer))

describe("npm run bench", () => {
  it.live("measures what it is asked to, and prints the table", () =>
    Effect.gen(function*() {
      const { code, output } = yield* bench("--tiny", "--only", "1,5,8,10")
      assert.match(output, /PostgreSQL 18\.\d/)
      assert.match(output, /fsync=on/)
      assert.match(output, / 1 {2}Checkpoints +pass\n/)
      assert.match(output, / 20 holders +[\d.]+k?\/s +(pgbench|client) [\d.]+k?\/s/)
      assert.match(output, / 5 {2}Handoff +(pass|fall short)\n/)
      assert.match(output, / 200 renewals: heap-only +[\d.]+ % +≥ 99 % +(pass|fall short)\n/)
      assert.match(output, /10 {2}Memory backend +(pass|fall short)\n/)
      assert.match(output, /Of 4 targets, \d pass/)
      assert.notInclude(output, "failed")
      assert.notInclude(output, "Cycles")
      assert.strictEqual(code, 0, output)
    }))

  it.live("refuses what makes no sense", () =>
    Effect.gen(function*() {
      const unknown = yield* bench("--only", "13")
      assert.include(unknown.output, "There is no target \"13\": they are 1 to 12.")
      assert.strictEqual(unknown.code, 1)
      const partial = yield* bench("--quick", "--write")
      assert.include(partial.output, "--write is for a full run of all targets")
      assert.strictEqual(partial.code, 1)
    }))
})
