/**
 * A network that can be broken: a TCP proxy between a PostgreSQL client and its server.
 *
 * It reads along, so that a fault can be aimed at one statement, and statements can be counted on the wire.
 */
import * as Effect from "effect/Effect"
import type * as Scope from "effect/Scope"
import * as Net from "node:net"

export interface LostReply {
  /** Which statements lose theirs: those whose text contains this. Defaults to any. */
  readonly of?: string | undefined
  /** How many of them come through before. Defaults to 0. */
  readonly skip?: number | undefined
  /** How many replies are lost. Defaults to 1; what comes after passes. */
  readonly times?: number | undefined
  /**
   * What the client sees in place of the reply: `cut`, the end of the connection (the default), or `silence`, a
   * connection on which nothing arrives any more.
   */
  readonly as?: "cut" | "silence" | undefined
}

export interface TcpProxy {
  readonly host: string
  readonly port: number
  /** The URL of a database on the server, by way of the proxy. */
  readonly url: (url: string) => string
  /** Everything passes. Connections that have stalled stay dead, as those whose peer has vanished do. */
  readonly pass: Effect.Effect<void>
  /** Nothing passes in either direction, and nobody is told: open connections are half-open, new ones are not answered. */
  readonly stall: Effect.Effect<void>
  /** What `stall` has held back passes now, late, on the same connections. */
  readonly resume: Effect.Effect<void>
  /** Ends every open connection, on both sides. New ones pass. */
  readonly cut: Effect.Effect<void>
  /** Ends every open connection, and each new one at once, until `pass`. */
  readonly refuse: Effect.Effect<void>
  /** The server executes the statement to its end, and its reply is lost. */
  readonly loseReply: (options?: LostReply) => Effect.Effect<void>
  /** How many replies were lost so far. */
  readonly lostReplies: Effect.Effect<number>
  /** The texts of the statements that were sent so far, in order. */
  readonly statements: Effect.Effect<ReadonlyArray<string>>
  /** How many connections are open. */
  readonly connections: Effect.Effect<number>
}

/** Opens a proxy to the server that the URL names, for as long as the scope is open. */
export const make = (url: string): Effect.Effect<TcpProxy, never, Scope.Scope> =>
  Effect.map(
    Effect.acquireRelease(
      Effect.callback<Proxy>((resume) => {
        const proxy = new Proxy(new URL(url))
        proxy.server.listen(0, host, () => resume(Effect.succeed(proxy)))
      }),
      (proxy) => Effect.callback<void>((resume) => proxy.close(() => resume(Effect.void)))
    ),
    (proxy): TcpProxy => {
      const { port } = proxy.server.address() as Net.AddressInfo
      return {
        host,
        port,
        url: (url) => {
          const proxied = new URL(url)
          proxied.hostname = host
          proxied.port = String(port)
          return proxied.href
        },
        pass: Effect.sync(() => {
          proxy.mode = "pass"
        }),
        stall: Effect.sync(() => {
          proxy.mode = "stall"
          for (const connection of proxy.connections) connection.stalled = true
        }),
        resume: Effect.sync(() => {
          proxy.mode = "pass"
          for (const connection of proxy.connections) connection.resume()
        }),
        cut: Effect.sync(() => proxy.cut()),
        refuse: Effect.sync(() => {
          proxy.mode = "refuse"
          proxy.cut()
        }),
        loseReply: (options) =>
          Effect.sync(() => {
            proxy.losing = {
              of: options?.of ?? "",
              skip: options?.skip ?? 0,
              times: options?.times ?? 1,
              as: options?.as ?? "cut"
            }
          }),
        lostReplies: Effect.sync(() => proxy.lostReplies),
        statements: Effect.sync(() => proxy.statements.slice()),
        connections: Effect.sync(() => proxy.connections.size)
      }
    }
  )

const host = "127.0.0.1"

class Proxy {
  readonly server: Net.Server
  readonly connections = new Set<Connection>()
  readonly statements: Array<string> = []
  mode: "pass" | "stall" | "refuse" = "pass"
  losing: { readonly of: string; skip: number; times: number; readonly as: "cut" | "silence" } | undefined
  lostReplies = 0

  constructor(target: URL) {
    this.server = Net.createServer({ allowHalfOpen: true }, (client) => {
      if (this.mode === "refuse") return client.destroy()
      const upstream = Net.connect({
        host: target.hostname,
        port: Number(target.port || 5432),
        allowHalfOpen: true
      })
      this.connections.add(new Connection(this, client, upstream))
    })
  }

  cut(): void {
    for (const connection of this.connections) connection.destroy()
  }

  close(done: () => void): void {
    this.cut()
    this.server.close(done)
  }
}

type Held = { readonly to: Net.Socket; readonly data: Buffer | undefined }

class Connection {
  private readonly proxy: Proxy
  private readonly client: Net.Socket
  private readonly upstream: Net.Socket
  private readonly held: Array<Held> = []
  private readonly prepared = new Map<string, string>()
  private readonly requests = new Messages(false)
  private readonly replies = new Messages(true)
  stalled: boolean
  /** The reply that is to be lost, and how. */
  private losing: "cut" | "silence" | undefined

  constructor(proxy: Proxy, client: Net.Socket, upstream: Net.Socket) {
    this.proxy = proxy
    this.client = client
    this.upstream = upstream
    this.stalled = proxy.mode === "stall"
    for (const [from, to] of [[client, upstream], [upstream, client]] as const) {
      from.setNoDelay(true)
      from.on("data", (data) => this.pass(from, to, data))
      from.on("end", () => this.pass(from, to, undefined))
      from.on("error", () => {})
      // Whoever is stalled does not learn that its peer has gone.
      from.on("close", () => this.stalled ? this.forget() : this.destroy())
    }
  }

  private pass(from: Net.Socket, to: Net.Socket, data: Buffer | undefined): void {
    if (this.stalled) {
      this.held.push({ to, data })
      return
    }
    if (data === undefined) {
      to.end()
      return
    }
    if (from === this.client) {
      for (const message of this.requests.read(data)) this.observe(message)
    } else {
      const ready = this.replies.read(data).some((message) => message.type === "Z")
      if (this.losing !== undefined) {
        // The statement is over on the server, and not before, when it is ready for the next.
        if (ready) this.lose(this.losing)
        return
      }
    }
    to.write(data)
  }

  private observe(message: Message): void {
    const text = statementOf(message, this.prepared)
    if (text === undefined) return
    this.proxy.statements.push(text)
    const losing = this.proxy.losing
    if (losing === undefined || losing.times === 0 || !text.includes(losing.of)) return
    if (losing.skip-- > 0) return
    losing.times--
    this.losing = losing.as
  }

  private lose(as: "cut" | "silence"): void {
    this.proxy.lostReplies++
    this.losing = undefined
    if (as === "cut") this.destroy()
    else this.stalled = true
  }

  resume(): void {
    this.stalled = false
    for (const { data, to } of this.held.splice(0)) {
      this.pass(to === this.upstream ? this.client : this.upstream, to, data)
    }
    if (this.client.destroyed || this.upstream.destroyed) this.destroy()
  }

  /** Gone once both ends are. */
  private forget(): void {
    if (this.client.destroyed && this.upstream.destroyed) this.proxy.connections.delete(this)
  }

  destroy(): void {
    this.client.destroy()
    this.upstream.destroy()
    this.proxy.connections.delete(this)
  }
}

// -----------------------------------------------------------------------------
// the wire protocol, as far as it is read along
// -----------------------------------------------------------------------------

interface Message {
  readonly type: string
  readonly body: Buffer
}

/** Cuts a stream into messages: a type byte and a length, except for what a client sends first. */
class Messages {
  private rest: Buffer = Buffer.alloc(0)
  private typed: boolean

  constructor(typed: boolean) {
    this.typed = typed
  }

  read(data: Buffer): ReadonlyArray<Message> {
    this.rest = Buffer.concat([this.rest, data])
    const messages: Array<Message> = []
    while (true) {
      const header = this.typed ? 1 : 0
      if (this.rest.length < header + 4) return messages
      const end = header + this.rest.readInt32BE(header)
      if (this.rest.length < end) return messages
      messages.push({
        type: this.typed ? String.fromCharCode(this.rest[0]) : "",
        body: this.rest.subarray(header + 4, end)
      })
      this.typed = true
      this.rest = this.rest.subarray(end)
    }
  }
}

/** The text of the statement that a message executes, if it does. */
const statementOf = (message: Message, prepared: Map<string, string>): string | undefined => {
  const [first, second] = message.body.toString("utf8").split("\0", 2)
  switch (message.type) {
    case "Q":
      return first
    case "P":
      prepared.set(first, second)
      return undefined
    case "B":
      // The client executes what it binds, at once.
      return prepared.get(second)
    default:
      return undefined
  }
}
