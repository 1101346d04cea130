/**
 * What a process of a benchmark does, and how it is talked to.
 */
import type { Effect, Queue, Schema } from "effect"

export interface Program<in out Settings, in out Command, in out Event> {
  readonly name: string
  readonly Settings: Schema.Codec<Settings, any>
  readonly Command: Schema.Codec<Command, any>
  readonly Event: Schema.Codec<Event, any>
  readonly run: (settings: Settings, parent: Parent<Command, Event>) => Effect.Effect<void, unknown>
}

/** The process that has started this one. */
export interface Parent<out Command, in Event> {
  readonly commands: Queue.Dequeue<Command>
  readonly say: (event: Event) => Effect.Effect<void>
}

export const make = <Settings, Command, Event>(
  program: Program<Settings, Command, Event>
): Program<Settings, Command, Event> => program
