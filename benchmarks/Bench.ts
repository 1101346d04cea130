/**
 * What every target needs: the server, a place to say how far it is, and what
 * other targets have measured.
 */
import { Context, Effect, type Scope } from "effect"
import type * as EmbeddedPostgres from "../support/EmbeddedPostgres.ts"
import type { Figure } from "./Target.ts"

export class Bench extends Context.Service<Bench, {
  readonly server: EmbeddedPostgres.EmbeddedPostgres
  /** Where pgbench is, if it is anywhere. */
  readonly pgbench: string | undefined
  /** Says what is being done now. */
  readonly progress: (text: string) => Effect.Effect<void>
  /** What the targets before this one have measured. */
  readonly figures: ReadonlyMap<string, Figure>
}>()("worklease/benchmarks/Bench") {}

export const progress = (text: string): Effect.Effect<void, never, Bench> => Bench.use((_) => _.progress(text))

/** An empty database, as long as the scope is open: its URL. */
export const database: Effect.Effect<string, EmbeddedPostgres.EmbeddedPostgresError, Bench | Scope.Scope> = Bench.use(
  ({ server }) => server.createDatabase()
)

/** Changes a setting of the server, as long as the scope is open. */
export const setting = (
  name: string,
  value: string
): Effect.Effect<void, EmbeddedPostgres.EmbeddedPostgresError, Bench | Scope.Scope> =>
  Bench.use(({ server }) => {
    const reload = Effect.asVoid(server.execute("SELECT pg_reload_conf()"))
    return Effect.acquireRelease(
      Effect.andThen(server.execute(`ALTER SYSTEM SET ${name} = ${value}`), reload),
      () => Effect.orDie(Effect.andThen(server.execute(`ALTER SYSTEM RESET ${name}`), reload))
    )
  })
