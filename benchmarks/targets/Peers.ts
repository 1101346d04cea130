/** 11. Libraries that somebody might use instead, or beside: measured in the same run. */
import { Data, Effect, Schema, Stream } from "effect"
import { ChildProcess } from "effect/process"
import { existsSync } from "node:fs"
import { fileURLToPath } from "node:url"
import * as Bench from "../Bench.ts"
import * as Target from "../Target.ts"

class PeersFailed extends Data.TaggedError("PeersFailed")<{ readonly message: string }> {}

const script = fileURLToPath(new URL("../peers/run.mjs", import.meta.url))

/** Which of our figures is nearest to what a peer does. */
const nearest: Readonly<Record<string, ReadonlyArray<string>>> = {
  "@dbos-inc/dbos-sdk": ["checkpoints-alone", "checkpoints-32"],
  "effect-distributed-lock": ["cycles-alone", "cycles-32"],
  "graphile-worker": ["cycles-10", "cycles-200"],
  "pg-boss": ["cycles-10", "cycles-200"]
}

const Peers = Schema.Struct({
  peers: Schema.Array(Schema.Struct({
    name: Schema.String,
    version: Schema.String,
    operation: Schema.String,
    figures: Schema.Array(Schema.Struct({ label: Schema.String, value: Schema.Number, unit: Schema.String })),
    comparedWith: Schema.String,
    comparable: Schema.String,
    notComparable: Schema.String,
    error: Schema.optionalKey(Schema.String)
  }))
})

export const target = Target.make<"--full" | "--quick" | undefined>({
  number: 11,
  name: "Peers",
  method:
    "`benchmarks/peers/run.mjs` installs each peer in a folder of its own and measures it on the same server, in a database " +
    "of its own (or on Redis, where one runs). It passes if all of them could be measured: the figures stand beside our " +
    "nearest operation, of another target of the same run, and decide nothing.",
  sizes: { full: "--full", quick: "--quick", tiny: undefined },
  describe: (size) => size === undefined ? "none" : `run.mjs ${size}`,
  run: Effect.fnUntraced(function*(size) {
    if (size === undefined) return { rows: [], notes: ["The peers are not measured at this size."] }
    const { figures, server } = yield* Bench.Bench
    if (!existsSync(script)) return yield* new PeersFailed({ message: "benchmarks/peers/run.mjs is not there" })
    const handle = yield* ChildProcess.make(process.execPath, [script, size, "--postgres", server.url], {
      stdin: "ignore",
      forceKillAfter: "5 seconds"
    })
    let errors = ""
    yield* handle.stderr.pipe(
      Stream.decodeText,
      Stream.splitLines,
      Stream.runForEach((line) =>
        Effect.suspend(() => {
          errors = `${errors}${line}\n`.slice(-2000)
          return line.trim() === "" ? Effect.void : Bench.progress(line.replace(/^peers: /, ""))
        })
      ),
      Effect.ignore,
      Effect.forkScoped
    )
    const output = yield* handle.stdout.pipe(Stream.decodeText, Stream.mkString)
    const code = yield* handle.exitCode
    if (code !== 0) {
      return yield* new PeersFailed({ message: `benchmarks/peers/run.mjs ended with code ${code}\n${errors.trim()}` })
    }
    const { peers } = yield* Schema.decodeEffect(Schema.fromJsonString(Peers))(output)
    const rows = peers.flatMap((peer): ReadonlyArray<Target.Row> => {
      const ours = (nearest[peer.name] ?? []).map((name) => figures.get(name)).filter((figure) => figure !== undefined)
      const compared = {
        ours: ours.length === 0
          ? "not measured in this run"
          : ours.map(({ label, text }) => `${text} ${label}`).join("\n"),
        target: "measured",
        verdict: Target.verdict(peer.error === undefined && peer.figures.length > 0)
      }
      const title = `${peer.name} ${peer.version}`
      return [{
        ...compared,
        what: `${title}: ${peer.operation}`,
        compared: peer.error === undefined
          ? peer.figures.map(({ label, unit, value }) => `${short(value)} ${unit}: ${label}`).join("\n")
          : `not measured: ${peer.error.split("\n")[0]}`
      }]
    })
    return {
      rows,
      notes: [
        "What is and what is not comparable, each peer says in its peer.mjs, and docs/performance.md repeats it.",
        ...peers.flatMap((peer) => peer.error === undefined ? [] : [`${peer.name} was not measured: ${peer.error}`])
      ],
      remarks: peers.map((peer) =>
        `**${peer.name}**, beside ${peer.comparedWith}. Comparable: ${peer.comparable} Not comparable: ${peer.notComparable}`
      )
    }
  })
})

const short = (value: number): string => new Intl.NumberFormat("en-US", { maximumSignificantDigits: 3 }).format(value)
