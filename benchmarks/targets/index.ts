/** All targets, in the order in which they are measured: Peers shows figures of those before it. */
import type { Target } from "../Target.ts"
import * as Checkpoints from "./Checkpoints.ts"
import * as Contention from "./Contention.ts"
import * as Cycles from "./Cycles.ts"
import * as Handoff from "./Handoff.ts"
import * as LoneHolder from "./LoneHolder.ts"
import * as MemoryBackend from "./MemoryBackend.ts"
import * as Peers from "./Peers.ts"
import * as Redis from "./Redis.ts"
import * as Release from "./Release.ts"
import * as Renewals from "./Renewals.ts"
import * as Storage from "./Storage.ts"
import * as Takeover from "./Takeover.ts"

export const targets: ReadonlyArray<Target> = [
  Checkpoints.target,
  LoneHolder.target,
  Renewals.target,
  Cycles.target,
  Handoff.target,
  Takeover.target,
  Contention.target,
  Storage.target,
  Release.target,
  MemoryBackend.target,
  Peers.target,
  Redis.target
]
