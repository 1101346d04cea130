/**
 * Leases in Redis (7 and later) or Valkey (8 and later), over the
 * application's own `Redis` service of `effect/persistence/Redis`.
 *
 * Every operation is one Lua script per batch, which runs atomically and reads
 * the server's clock. On a cluster, a batch is one script for each slot. All
 * keys of one work ID share a slot, and a record outlives its expiry: its
 * successor needs the checkpoint.
 *
 * **Gotchas**
 *
 * A lease is as durable as the server is. Without `appendfsync always`, a
 * server that crashes forgets the last checkpoints, and a replica that takes
 * over may not have received them. Fencing tokens stay in order even then,
 * because they follow the server's clock. Where a checkpoint must not be lost,
 * use PostgreSQL.
 *
 * Build the client with `disableOfflineQueue: true` where it has that: while
 * the server is away, operations then fail at once, in place of waiting in a
 * queue.
 *
 * **Example** (Leases in the application's Redis)
 *
 * ```ts
 * import { NodeRedis } from "@effect/platform-node"
 * import { Config, Layer } from "effect"
 * import { Lease } from "worklease"
 * import * as Redis from "worklease/layers/Redis"
 *
 * const WorkleaseLayer = Lease.layer.pipe(
 *   Layer.provide(Redis.layer),
 *   Layer.provideMerge(NodeRedis.layerConfig({
 *     url: Config.String("REDIS_URL"),
 *     disableOfflineQueue: Config.succeed(true)
 *   }))
 * )
 * ```
 *
 * @since 0.1.0
 */

import type { NonEmptyReadonlyArray } from "effect/Array"
import * as Arr from "effect/Array"
import * as Context from "effect/Context"
import * as SecureRandom from "effect/crypto/SecureRandom"
import * as Duration from "effect/Duration"
import * as Effect from "effect/Effect"
import * as Base64 from "effect/encoding/Base64"
import * as Exit from "effect/Exit"
import * as Fiber from "effect/Fiber"
import * as Layer from "effect/Layer"
import * as Option from "effect/Option"
import * as EffectRedis from "effect/persistence/Redis"
import * as Queue from "effect/Queue"
import * as Result from "effect/Result"
import * as Scope from "effect/Scope"
import * as Backend from "../Backend.ts"
import { backendError, minimumRetention, timesOf, toMillis } from "../internal/storage.ts"
import { termOf } from "../internal/term.ts"
import * as Wakeups from "../internal/wakeups.ts"
import { compareBytes } from "../internal/workId.ts"
import type * as Lease from "../Lease.ts"
import {
  BackendError,
  Fenced,
  InvalidConfig,
  LeaseExpired,
  Other,
  PermissionDenied,
  TimedOut,
  TokenExhausted,
  Unreachable
} from "../LeaseError.ts"

/**
 * Where the keys are, and what the server may be.
 *
 * @category options
 * @since 0.1.0
 */
export interface Options {
  /** The beginning of every key and channel. No braces, no NUL, at most 128 UTF-8 bytes. Defaults to `worklease`. */
  readonly prefix?: string | undefined
  /**
   * Whether a server is taken that may evict keys, that is, whose
   * `maxmemory-policy` is not `noeviction`: it may forget any lease and any
   * checkpoint at any time, so that two holders work at once. A server
   * that does not tell it, or does not let itself be asked, takes `true`.
   * Defaults to `false`.
   */
  readonly allowEviction?: boolean | undefined
  /**
   * Whether a waiting acquire is told at once when a lease is released or
   * forgotten, and a holder when it is asked to yield. It costs one more
   * connection while something waits, or a lease is held that has been so for a
   * second. Without it, waiting acquires poll, and requests to yield come with
   * renewals; other processes that wait are still told by this one. Defaults to
   * `true`.
   */
  readonly wakeups?: boolean | undefined
}

/**
 * The user's own writes to the same Redis, which are applied only while a term
 * is current and unexpired, in the same atomic step.
 *
 * **Details**
 *
 * Each operation takes a token (`lease.token` of a held lease), and fails with
 * `Fenced` if another term is current, with `LeaseExpired` if this one is over,
 * and with `BackendError` if the server did not apply it or does not answer.
 * Nothing is sent again: after an unknown outcome the write may have been
 * applied, so make it one that may be repeated.
 *
 * Every key must be in the slot of the lease, also where there is no cluster
 * yet: put `hashTag(workId)` into it. Another key fails with `InvalidConfig`,
 * and so does one that begins as those of the backend do, with its prefix and
 * `:{`.
 *
 * @category services
 * @since 0.1.0
 */
export class FencedWrites extends Context.Service<FencedWrites, {
  /** Sets a key to a string, and takes away its time to live if it has one. */
  readonly set: (
    token: Lease.AnyToken,
    key: string,
    value: string
  ) => Effect.Effect<void, Fenced | LeaseExpired | InvalidConfig | BackendError>
  /**
   * Runs a Lua script with `KEYS` and `ARGV` as it expects them, and answers
   * what it returns. The text of a script should not vary: the server keeps
   * each. Fails with `InvalidConfig` if it begins with `#!`, and with
   * `BackendError` if it is not valid Lua (`rejected`), and if it raises or
   * returns an error: its outcome is `unknown` then, because what it has
   * written before stays.
   */
  readonly eval: (token: Lease.AnyToken, script: {
    readonly lua: string
    readonly keys: ReadonlyArray<string>
    readonly args?: ReadonlyArray<string> | undefined
  }) => Effect.Effect<unknown, Fenced | LeaseExpired | InvalidConfig | BackendError>
}>()("worklease/layers/Redis/FencedWrites") {}

/**
 * Provides a `Backend` and `FencedWrites`. Asks the server what it is: fails
 * with `InvalidConfig` if it may evict keys or does not tell, and with `BackendError` if it
 * cannot be asked.
 *
 * @category layers
 * @since 0.1.0
 */
export const layer: Layer.Layer<
  Backend.Backend | FencedWrites,
  BackendError | InvalidConfig,
  EffectRedis.Redis
> = Layer.effectContext(Effect.suspend(() => make({})))

/**
 * Like `layer`, under another prefix or with other options.
 *
 * @category layers
 * @since 0.1.0
 */
export const layerWith = (
  options: Options
): Layer.Layer<Backend.Backend | FencedWrites, BackendError | InvalidConfig, EffectRedis.Redis> =>
  Layer.effectContext(Effect.suspend(() => make(options)))

/**
 * What a key has to contain to be in the slot of a work ID, braces included:
 * `{orders:7}`. Braces and percent signs of the work ID are percent-encoded.
 *
 * @category keys
 * @since 0.1.0
 */
export const hashTag = (workId: string): string => `{${encoded(workId)}}`

/**
 * The key by which a command of this backend has to be routed in a cluster, for
 * those who build the `Redis` service from the cluster client of their driver.
 * `undefined` where any node will do.
 *
 * @category keys
 * @since 0.1.0
 */
export const routingKey = (command: string, args: ReadonlyArray<string>): string | undefined =>
  (command === "EVALSHA" || command === "EVAL") && args[1] !== "0" ? args[2] : undefined

// -----------------------------------------------------------------------------
// keys
// -----------------------------------------------------------------------------

/** What remains has no brace, so that the server finds the whole of it to be the tag. */
const encoded = (workId: string): string =>
  /[%{}]/.test(workId) ? workId.replaceAll("%", "%25").replaceAll("{", "%7B").replaceAll("}", "%7D") : workId

const decoded = (tag: string): string => tag.replaceAll("%7B", "{").replaceAll("%7D", "}").replaceAll("%25", "%")

const utf8Encoder = new TextEncoder()

const slotCount = 16384

/** CRC-16/XMODEM, as the server computes it. */
const crcTable = Uint16Array.from({ length: 256 }, (_, byte) => {
  let crc = byte << 8
  for (let bit = 0; bit < 8; bit++) crc = (crc & 0x8000) === 0 ? crc << 1 : (crc << 1) ^ 0x1021
  return crc
})

const slotOfTag = (tag: string): number => {
  let crc = 0
  for (const byte of utf8Encoder.encode(tag)) crc = ((crc << 8) ^ crcTable[((crc >> 8) ^ byte) & 0xff]) & 0xffff
  return crc % slotCount
}

const slotOfKey = (key: string): number => {
  const open = key.indexOf("{")
  const close = open === -1 ? -1 : key.indexOf("}", open + 1)
  return slotOfTag(close > open + 1 ? key.slice(open + 1, close) : key)
}

/** For each slot the smallest number that is a tag of it. */
const tagsBySlot: Array<string | undefined> = []
let tagsTried = 0

const tagOfSlot = (slot: number): string => {
  while (tagsBySlot[slot] === undefined) {
    const tag = String(tagsTried++)
    tagsBySlot[slotOfTag(tag)] ??= tag
  }
  return tagsBySlot[slot]
}

/** What a pattern of the server means literally. */
const literally = (text: string): string => text.replaceAll(/[\\*?[\]]/g, "\\$&")

const maxPrefixBytes = 128

const prefixOf = (options: Options): Effect.Effect<string, InvalidConfig> => {
  const prefix = options.prefix ?? "worklease"
  const bytes = utf8Encoder.encode(prefix).byteLength
  return bytes >= 1 && bytes <= maxPrefixBytes && !/[{}\0]|\p{Surrogate}/u.test(prefix)
    ? Effect.succeed(prefix)
    : Effect.fail(
      new InvalidConfig({
        field: "prefix",
        why: `it must be 1 to ${maxPrefixBytes} UTF-8 bytes without braces, NUL or lone surrogates`
      })
    )
}

// -----------------------------------------------------------------------------
// scripts
// -----------------------------------------------------------------------------

/**
 * After how many bytes of states a script answers `Later` to the rest of its
 * items, and leaves them as they are: nobody else is served meanwhile.
 */
const maxReplyBytes = 2 * 1024 * 1024

/**
 * A record is a hash; what is not there is an empty string. Times are in
 * microseconds, which a double holds exactly for two centuries. Tokens and
 * sequences need not fit one: they stay decimal strings.
 */
const basics = `
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

local function text(number)
  return string.format('%.0f', number)
end

local function less(a, b)
  if #a ~= #b then return #a < #b end
  return a < b
end

local function extended(expires, yield)
  if yield == '' then return {'Done', expires} end
  if yield == 'any' then return {'Done', expires, 'any'} end
  return {'Done', expires, text(math.max(0, tonumber(yield) - now))}
end

local function isSame(a, b)
  if #a ~= #b then return false end
  for i = 1, #a do
    if a[i] ~= b[i] then return false end
  end
  return true
end

local function answer(answerOne)
  -- The settings are the server's, and another script may have changed them.
  if cjson.decode_max_depth() < 8 then cjson.decode_max_depth(8) end
  if cjson.encode_max_depth() < 8 then cjson.encode_max_depth(8) end
  local replies = {}
  local bytes = 0
  local fields, last, at = {}, {}, 1
  for i, item in ipairs(cjson.decode(ARGV[1])) do
    for j = 1, #item do
      local field = item[j]
      if field == false then
        item[j] = fields[j]
      elseif type(field) == 'number' then
        item[j] = string.sub(ARGV[2], at, at + field - 1)
        at = at + field
      else
        fields[j] = field
      end
    end
    local reply
    if bytes >= ${maxReplyBytes} then
      reply = {'Later'}
    else
      local ok
      ok, reply = pcall(answerOne, item, i)
      if not ok then reply = {'Error', type(reply) == 'table' and reply.err or tostring(reply)} end
      for j = 1, #reply do bytes = bytes + #reply[j] end
    end
    if isSame(reply, last) then
      replies[i] = false
    else
      replies[i], last = reply, reply
    end
  end
  return cjson.encode(replies)
end
`

/** What most scripts do with whole records. A script takes time for each function that it is given. */
const prelude = `${basics}
local function successor(number)
  local nines = string.match(number, '9*$')
  local zeros = string.rep('0', #nines)
  local head = string.sub(number, 1, #number - #nines)
  if head == '' then return '1' .. zeros end
  return string.sub(head, 1, -2) .. string.char(string.byte(head, -1) + 1) .. zeros
end

local function load(key)
  local values = redis.call('HMGET', key, 'holder', 'token', 'exit', 'expires', 'sequence', 'yield', 'terms',
    'priorExit', 'priorHolder', 'priorToken', 'attempt', 'priorAttempt')
  if not values[1] then return nil end
  return {
    holder = values[1], token = values[2], exit = values[3], expires = tonumber(values[4]), sequence = values[5],
    yield = values[6], terms = tonumber(values[7]), priorExit = values[8], priorHolder = values[9],
    priorToken = values[10], attempt = values[11], priorAttempt = values[12]
  }
end

-- The version and the state, which may be long.
local function stored(key)
  local values = redis.call('HMGET', key, 'version', 'state')
  return values[1] or '', values[2] or ''
end

local function isHeld(row)
  return row.exit == '' and row.expires > now
end

local function isCurrent(row, holder, token)
  return row ~= nil and row.holder == holder and row.token == token
end

-- The terms without progress before this one. Stored as -1 where it had expired and was lifted: it does not count then.
local function countOf(row)
  return math.max(row.terms, 0)
end

-- What a holder that takes the lease would be told: exit, holder, token, terms without progress.
local function priorOf(row)
  if row.exit == 'forgotten' then return '', '', '', 0 end
  if row.exit == 'given-back' then return row.priorExit, row.priorHolder, row.priorToken, countOf(row) end
  if row.exit ~= '' then return row.exit, row.holder, row.token, countOf(row) end
  return 'expired', row.holder, row.token, row.sequence ~= '0' and 0 or row.terms + 1
end

-- Tells one of those who wait, another one each time. Nobody hears it where that one has died, or is connected to
-- another node. Whom none of a few tries has reached, polls.
local function wake(waiting, workId)
  if not waiting then return end
  local channels = redis.pcall('ZRANGEBYSCORE', waiting, '(' .. text(now), '+inf', 'LIMIT', 0, 100)
  if channels.err then return end
  for i = 1, math.min(#channels, 5) do
    local heard = redis.pcall('PUBLISH', channels[(now + i) % #channels + 1], '${Wakeups.freed}' .. workId)
    if type(heard) == 'number' and heard > 0 then return end
  end
end
`

/**
 * Runs one item after the other. An item that meets an error has written
 * nothing, because its one write is its last step, and does not keep the
 * others from theirs.
 *
 * The items are one argument and the replies one string, each in JSON: clients
 * take much longer over many small ones. In a batch much is the same: a field
 * that the item before has too, and a reply like the one before, is `false`. A
 * state is sent as its length in bytes: the states follow one after the other in
 * an argument of their own.
 */
const batchOf = (options: {
  readonly keys: number
  readonly item: string
  /** What it does on a server that takes no writes, or is full. */
  readonly flags?: "no-writes" | "allow-oom"
  /** Whether it reads single fields, in place of whole records. */
  readonly fields?: boolean
}): string =>
  `#!lua${options.flags === undefined ? "" : ` flags=${options.flags}`}
${options.fields === true ? basics : prelude}
return answer(function(item, i)
  local keys = (i - 1) * ${options.keys}
  ${options.item}
end)`

type Reply = ReadonlyArray<string>

interface Script {
  readonly lua: string
  /** The server keeps a script under its SHA-1. */
  readonly digest: Effect.Effect<string>
}

const scriptOf = (lua: string): Script => {
  let digest: string | undefined
  return {
    lua,
    digest: Effect.suspend(() =>
      digest !== undefined
        ? Effect.succeed(digest)
        : Effect.map(Effect.promise(() => crypto.subtle.digest("SHA-1", utf8Encoder.encode(lua))), (bytes) => {
          digest = Array.from(new Uint8Array(bytes), (byte) => byte.toString(16).padStart(2, "0")).join("")
          return digest
        })
    )
  }
}

const maxToken = "9223372036854775807"

/** Keys: the record, the mark of its slot. Without the mark, it takes no work ID that it does not know. */
const acquireScript = scriptOf(batchOf({
  keys: 2,
  item: `
  local key, mark = KEYS[keys + 1], KEYS[keys + 2]
  local holder, attempt, ttl, quarantineAfter, channel = item[1], item[2], item[3], tonumber(item[4]), item[5]
  local row = load(key)
  local exit, priorHolder, priorToken, terms = '', '', '', 0
  local previous
  if row then
    if row.attempt == attempt then
      if not isHeld(row) or row.holder ~= holder then return {'AttemptEnded'} end
      local version, state = stored(key)
      return {'Acquired', row.token, text(row.expires), row.priorExit, row.priorHolder, row.priorToken,
        text(countOf(row)), version, state}
    end
    if row.priorAttempt == attempt then return {'AttemptEnded'} end
    if isHeld(row) then return {'Held', row.holder, text(row.expires - now)} end
    exit, priorHolder, priorToken, terms = priorOf(row)
    if quarantineAfter and terms >= quarantineAfter then return {'Quarantined', text(terms), exit, priorHolder} end
    previous = row.token
  else
    if not mark then return {'Error', 'TRYAGAIN the slot is on its way to another node'} end
    previous = redis.call('GET', mark) or '0'
  end
  if not less(previous, '${maxToken}') then return {'TokenExhausted'} end
  local token = successor(previous)
  if less(token, text(now)) then token = text(now) end
  local expires = text(now + tonumber(ttl))
  local version, state = stored(key)
  redis.call('HSET', key, 'holder', holder, 'token', token, 'attempt', attempt, 'expires', expires, 'exit', '',
    'sequence', '0', 'version', version, 'state', state, 'terms', text(terms), 'priorExit', exit,
    'priorHolder', priorHolder, 'priorToken', priorToken, 'priorAttempt', row and row.attempt or '', 'yield', '',
    'channel', channel)
  return {'Acquired', token, expires, exit, priorHolder, priorToken, text(terms), version, state}`
}))

/** The few fields that an extension needs. A renewal may be all that a full server can still do. */
const renewScript = scriptOf(batchOf({
  keys: 1,
  flags: "allow-oom",
  fields: true,
  item: `
  local key = KEYS[keys + 1]
  local values = redis.call('HMGET', key, 'holder', 'token', 'exit', 'expires', 'yield')
  if values[1] ~= item[1] or values[2] ~= item[2] then return {'Fenced'} end
  if values[3] ~= '' or tonumber(values[4]) <= now then return {'Expired'} end
  local expires = text(now + tonumber(item[3]))
  redis.call('HSET', key, 'expires', expires)
  return extended(expires, values[5])`
}))

const checkpointScript = scriptOf(batchOf({
  keys: 1,
  fields: true,
  item: `
  local key = KEYS[keys + 1]
  local values = redis.call('HMGET', key, 'holder', 'token', 'exit', 'expires', 'yield', 'sequence')
  if values[1] ~= item[1] or values[2] ~= item[2] then return {'Fenced'} end
  if values[3] ~= '' then return {'Expired'} end
  local sequence = item[4]
  if less(sequence, values[6]) then return extended(values[4], values[5]) end
  local expires = text(now + tonumber(item[3]))
  if sequence == values[6] then
    redis.call('HSET', key, 'expires', expires)
  else
    redis.call('HSET', key, 'expires', expires, 'sequence', sequence, 'version', item[5],
      'state', item[6])
  end
  return extended(expires, values[5])`
}))

/** Keys: the record, who waits for it. Without the latter, nobody is told. */
const releaseScript = scriptOf(batchOf({
  keys: 2,
  flags: "allow-oom",
  item: `
  local key = KEYS[keys + 1]
  local holder, token, exit, interrupted = item[1], item[2], item[3], item[4]
  local sequence, version, state, workId = item[5], item[6], item[7], item[8]
  local row = load(key)
  if not isCurrent(row, holder, token) then
    if row and row.priorHolder == holder and row.priorToken == token and row.priorExit == exit then return {'Done'} end
    return {'Fenced'}
  end
  if row.exit ~= '' then return {row.exit == exit and 'Done' or 'Expired'} end
  local revives = sequence ~= '' or (exit == 'given-back' and row.sequence == '0')
  if not isHeld(row) and not revives then return {'Expired'} end
  local fields = {}
  if sequence ~= '' and less(row.sequence, sequence) then
    row.sequence = sequence
    fields = {'sequence', sequence, 'version', version, 'state', state}
  end
  local terms = countOf(row)
  if exit ~= 'given-back' then
    if exit == 'finished' or exit == 'retired' or row.sequence ~= '0' then
      terms = 0
    elseif exit == 'abandoned' and interrupted == '0' then
      terms = terms + 1
    end
  end
  redis.call('HSET', key, 'exit', exit, 'expires', text(now), 'terms', text(terms), unpack(fields))
  wake(KEYS[keys + 2], workId)
  return {'Done'}`
}))

const readScript = scriptOf(batchOf({
  keys: 1,
  flags: "no-writes",
  item: `
  local values = redis.call('HMGET', KEYS[keys + 1], 'holder', 'token', 'version', 'state')
  if values[1] ~= item[1] or values[2] ~= item[2] then return {'Fenced'} end
  return {'Done', values[3], values[4]}`
}))

const forgetScript = scriptOf(batchOf({
  keys: 2,
  flags: "allow-oom",
  item: `
  local key = KEYS[keys + 1]
  local row = load(key)
  if not isCurrent(row, item[1], item[2]) then return {'Fenced'} end
  if row.exit == 'forgotten' then return {'Done'} end
  redis.call('HSET', key, 'exit', 'forgotten', 'expires', text(now), 'version', '', 'state', '', 'terms', '0',
    'priorExit', '', 'priorHolder', '', 'priorToken', '', 'yield', '')
  wake(KEYS[keys + 2], item[3])
  return {'Done'}`
}))

const requestYieldScript = scriptOf(batchOf({
  keys: 1,
  flags: "allow-oom",
  item: `
  local key, deadline, workId = KEYS[keys + 1], item[1], item[2]
  local row = load(key)
  if not row or not isHeld(row) then return {'Free'} end
  redis.call('HSET', key, 'yield', deadline == '' and 'any' or text(now + tonumber(deadline)))
  -- That of the process which holds it. Where that does not listen, nobody hears it.
  local channel = redis.call('HGET', key, 'channel')
  if channel and channel ~= '' then redis.pcall('PUBLISH', channel, '${Wakeups.asked}' .. workId) end
  return {'Done'}`
}))

const liftScript = scriptOf(batchOf({
  keys: 1,
  flags: "allow-oom",
  item: `
  local key = KEYS[keys + 1]
  local row = load(key)
  if not row then return {'Unknown'} end
  local counts = row.exit == '' and not isHeld(row) and row.sequence == '0'
  redis.call('HSET', key, 'terms', counts and '-1' or '0')
  return {'Done'}`
}))

/** One step through the keys of the node that runs it, and which one of a cluster that is. */
const scanScript = scriptOf(`#!lua flags=no-writes
local step = redis.call('SCAN', ARGV[1], 'MATCH', ARGV[2], 'COUNT', ARGV[3], 'TYPE', 'hash')
return {step[1], step[2], ARGV[4] == '1' and redis.call('CLUSTER', 'MYID') or ''}`)

/** Keys: the record, the mark of its slot. Deletes a part of them at most. */
const sweepScript = scriptOf(`#!lua flags=allow-oom
${prelude}
local before = now - tonumber(ARGV[1])
local limit = tonumber(ARGV[2])
local swept = 0
for i = 1, #KEYS, 2 do
  if swept == limit then break end
  local key, mark = KEYS[i], KEYS[i + 1]
  local row = load(key)
  if row then
    local exit = row.exit
    if exit == 'given-back' then exit = row.priorExit == '' and 'forgotten' or row.priorExit end
    if (exit == 'retired' or exit == 'forgotten') and row.expires < before then
      if less(redis.call('GET', mark) or '0', row.token) then redis.call('SET', mark, row.token) end
      redis.call('DEL', key)
      swept = swept + 1
    end
  end
end
return swept`)

const recordsScript = scriptOf(batchOf({
  keys: 1,
  flags: "no-writes",
  item: `
  local key = KEYS[keys + 1]
  local row = load(key)
  if not row then return {'Missing'} end
  local version, state = '', ''
  if item[1] == 'states' then version, state = stored(key) end
  local status, holder, token = row.exit, row.holder, row.token
  if row.exit == 'given-back' then
    status, holder, token = row.priorExit, row.priorHolder, row.priorToken
  elseif row.exit == 'forgotten' then
    status = ''
  elseif row.exit == '' then
    status = isHeld(row) and 'held' or 'expired'
  end
  local terms = countOf(row)
  if not isHeld(row) then
    local _, _, _, next = priorOf(row)
    terms = next
  end
  return {'Done', status, holder, token, text(row.expires), text(row.expires - now), text(terms), version, state}`
}))

const infoScript = scriptOf(`#!lua flags=no-writes,allow-stale
return redis.call('INFO', ARGV[1])`)

/** Keys: who waits. */
const registerScript = scriptOf(batchOf({
  keys: 1,
  item: `
  local waiting, channel, ttl = KEYS[keys + 1], item[1], tonumber(item[2])
  redis.call('ZREMRANGEBYSCORE', waiting, '-inf', text(now))
  redis.call('ZADD', waiting, text(now + ttl), channel)
  redis.call('PEXPIRE', waiting, text(ttl / 1000))
  return {'Done'}`
}))

const unregisterScript = scriptOf(batchOf({
  keys: 1,
  flags: "allow-oom",
  item: `
  redis.call('ZREM', KEYS[keys + 1], item[1])
  return {'Done'}`
}))

const passOnScript = scriptOf(batchOf({
  keys: 1,
  flags: "allow-oom",
  item: `
  redis.call('ZREM', KEYS[keys + 1], item[1])
  wake(KEYS[keys + 1], item[2])
  return {'Done'}`
}))

/** In Lua's long brackets, of a level that the text does not end. */
const quoted = (lua: string): string => {
  let level = ""
  while (lua.includes(`]${level}`)) level += "="
  return `[${level}[${lua}]${level}]`
}

/**
 * The user's script is compiled by itself, so that it can neither end the check
 * nor meet its locals, and gets the `KEYS` and `ARGV` that it expects. What it
 * fails with becomes a reply: the server's own errors then are those of before
 * it ran.
 */
const fencedScript = (lua: string): Script =>
  scriptOf(`#!lua
${prelude}
local row = load(KEYS[1])
if not isCurrent(row, ARGV[1], ARGV[2]) then return {'Fenced'} end
if not isHeld(row) then return {'Expired'} end
local function rest(list, from)
  local result = {}
  for i = from, #list do result[#result + 1] = list[i] end
  return result
end
local write, mistake = loadstring(${quoted(`local KEYS, ARGV = ...; ${lua}\n`)}, '=script')
if not write then return {'Invalid', mistake} end
local ok, result = pcall(write, rest(KEYS, 2), rest(ARGV, 3))
local failure = nil
if not ok then failure = result elseif type(result) == 'table' then failure = rawget(result, 'err') end
if failure == nil then return {'Done', result} end
if type(failure) == 'table' then failure = rawget(failure, 'err') end
return {'Failed', tostring(failure)}`)

const setScript = fencedScript("return redis.call('SET', KEYS[1], ARGV[1])")

// -----------------------------------------------------------------------------
// batches
// -----------------------------------------------------------------------------

/** Text, or the bytes of a state. */
type Field = string | Uint8Array

/** What is sent for each item of a batch, and what its reply means. */
interface Operation<in Request, out A> {
  readonly name: string
  readonly script: Script
  readonly workIdOf: (request: Request) => string
  readonly keysOf: (request: Request) => ReadonlyArray<string>
  readonly argsOf: (request: Request) => Array<Field>
  readonly replyOf: (reply: Reply) => A
}

/** The arguments of a batch. */
const batchArgs = (items: ReadonlyArray<Array<Field | number | false>>): ReadonlyArray<string> => {
  const states: Array<Uint8Array> = []
  for (const item of items) {
    for (const field of item) {
      if (field instanceof Uint8Array) states.push(field)
    }
  }
  const { lengths, text } = encodedStates(states)
  const fields: Array<Field | number | false> = []
  let taken = 0
  for (const item of items) {
    for (let i = 0; i < item.length; i++) {
      const field = item[i]
      if (field instanceof Uint8Array) item[i] = lengths[taken++]
      else if (field === fields[i]) item[i] = false
      else fields[i] = field
    }
  }
  return [JSON.stringify(items), text]
}

const readReply = <A>({ name, replyOf }: Operation<never, A>, reply: Reply): A | BackendError | "Later" => {
  switch (reply[0]) {
    case "Later":
      return "Later"
    case "Error":
      return toBackendError(name, new Error(reply[1]), "rejected")
  }
  return replyOf(reply)
}

// -----------------------------------------------------------------------------
// backend
// -----------------------------------------------------------------------------

/** How many keys one step through them looks at. */
const scanCount = "1000"

/** How many records one script reads or deletes at most: nobody else is served meanwhile. */
const maxRecords = 200

/** How many steps one sweep takes at most, so that it ends however many keys there are. The next one goes on. */
const maxSweepSteps = 1000

const micros = (duration: Duration.Duration): string =>
  String(Math.min(Math.round(Duration.toMillis(duration) * 1000), Number.MAX_SAFE_INTEGER / 4))

const make = Effect.fnUntraced(function*(options: Options) {
  const prefix = yield* prefixOf(options)
  const redis = yield* EffectRedis.Redis

  const keyOf = (workId: string): string => `${prefix}:${hashTag(workId)}`
  const waitingKeyOf = (workId: string): string => `${keyOf(workId)}:waiting`
  /** Holds the highest token that was swept from the slot. */
  const markKeyOf = (workId: string): string => `${prefix}:{${tagOfSlot(slotOfTag(encoded(workId)))}}:mark`

  /** Where the server does not know the script, EVAL runs it and has the very node keep it that has the keys. */
  const evaluate = (
    operation: string,
    script: Script,
    keys: ReadonlyArray<string>,
    args: ReadonlyArray<string>
  ): Effect.Effect<unknown, BackendError> =>
    Effect.flatMap(
      script.digest,
      (digest) =>
        Effect.catch(redis.send("EVALSHA", digest, String(keys.length), ...keys, ...args), (error) => {
          if (codeOf(error.cause) !== "NOSCRIPT") return Effect.fail(toBackendError(operation, error.cause))
          return Effect.mapError(
            redis.send("EVAL", script.lua, String(keys.length), ...keys, ...args),
            ({ cause }) => toBackendError(operation, cause)
          )
        })
    )

  const isCluster = yield* inspect(redis, evaluate, prefix, options)

  /** Sends a batch, as one script or as one for each slot, and in as many parts as its replies take. */
  const run = <Request, A>(
    operation: Operation<Request, A>,
    requests: ReadonlyArray<Request>
  ): Effect.Effect<ReadonlyArray<A | BackendError>, BackendError> => {
    const replies = Arr.makeBy(requests.length, (): A | BackendError | undefined => undefined)

    /** Answers what is to be sent again. What failed by itself has written nothing. */
    const sendOnce = (indices: ReadonlyArray<number>, keysOf: (request: Request) => ReadonlyArray<string>) =>
      Effect.map(
        evaluate(
          operation.name,
          operation.script,
          indices.flatMap((index) => keysOf(requests[index])),
          batchArgs(indices.map((index) => operation.argsOf(requests[index])))
        ),
        (answer) => {
          const later: Array<number> = []
          let last: Reply = []
          for (const [i, fields] of (JSON.parse(answer as string) as ReadonlyArray<Reply | false>).entries()) {
            if (fields !== false) last = fields
            // Each is read by itself, for its bytes become its reader's own.
            const reply = readReply(operation, last)
            if (reply === "Later") later.push(indices[i])
            else replies[indices[i]] = reply
          }
          return later
        }
      )

    const fail = (indices: ReadonlyArray<number>, error: BackendError) => {
      for (const index of indices) replies[index] = error
    }

    /**
     * While a slot is on its way to another node, commands with several keys are
     * refused. Those with one are not: then each record goes by itself.
     */
    const sendSingly = (indices: ReadonlyArray<number>) =>
      Effect.forEach(
        indices,
        (index) =>
          Effect.catch(
            sendOnce([index], (request) => operation.keysOf(request).slice(0, 1)),
            (error) => Effect.sync(() => fail([index], error))
          ),
        { concurrency: 16, discard: true }
      )

    const send = (indices: ReadonlyArray<number>): Effect.Effect<void, BackendError> =>
      sendOnce(indices, operation.keysOf).pipe(
        Effect.catch((error) => {
          switch (codeOf(causeOf(error))) {
            case "TRYAGAIN":
              return Effect.as(sendSingly(indices), [])
            // It would refuse each by itself as well.
            case "OOM":
              return Effect.sync(() => {
                fail(indices, error)
                return []
              })
          }
          return Effect.fail(error)
        }),
        Effect.flatMap((later) =>
          later.length === 0
            ? Effect.void
            // Those before have their answers, whatever becomes of these.
            : Effect.catch(send(later), (error) => Effect.sync(() => fail(later, error)))
        )
      )

    const done = () => replies as ReadonlyArray<A | BackendError>
    const all = requests.map((_, index) => index)
    if (!isCluster || requests.length === 1) return Effect.map(send(all), done)
    const bySlot = Object.values(
      Arr.groupBy(all, (index) => String(slotOfTag(encoded(operation.workIdOf(requests[index])))))
    )
    return Effect.map(
      Effect.forEach(
        bySlot,
        (indices) => Effect.catch(send(indices), (error) => Effect.sync(() => fail(indices, error))),
        { concurrency: "unbounded", discard: true }
      ),
      done
    )
  }

  const batch = <Request extends { readonly workId: string }, A>(
    name: string,
    script: Script,
    keysOf: (request: Request) => ReadonlyArray<string>,
    argsOf: (request: Request) => Array<Field>,
    replyOf: (reply: Reply) => A | BackendError
  ): Backend.Batch<Request, A> => {
    const operation = { name, script, workIdOf: (_: Request) => _.workId, keysOf, argsOf, replyOf }
    return (requests) =>
      run<Request, A | BackendError>(operation, requests) as Effect.Effect<
        NonEmptyReadonlyArray<A | BackendError>,
        BackendError
      >
  }

  /** A batch of one. */
  const one = <Request extends { readonly workId: string }, A>(batch: Backend.Batch<Request, A>, request: Request) =>
    Effect.flatMap(
      batch([request]),
      ([reply]) => reply instanceof BackendError ? Effect.fail(reply) : Effect.succeed(reply)
    )

  const isTold = options.wakeups !== false
  const channel = `${prefix}:wakeups:${SecureRandom.uuidV4Unsafe()}`

  const termArgs = ({ fencingToken, holderId }: Backend.Term) => [holderId, String(fencingToken)]

  const acquire = batch<Backend.AcquireRequest, Backend.AcquireReply>(
    "acquire",
    acquireScript,
    ({ workId }) => [keyOf(workId), markKeyOf(workId)],
    ({ attempt, holderId, quarantineAfter, ttl }) => [
      holderId,
      attempt,
      micros(ttl),
      Option.match(quarantineAfter, { onNone: () => "", onSome: String }),
      isTold ? channel : ""
    ],
    (reply) => {
      switch (reply[0]) {
        case "Held":
          return { _tag: "Held", holderId: reply[1], remaining: Duration.micros(BigInt(reply[2])) }
        case "AttemptEnded":
          return { _tag: "AttemptEnded" }
        case "Quarantined":
          return {
            _tag: "Quarantined",
            termsWithoutProgress: Number(reply[1]),
            exit: exitOf(reply[2]),
            holderId: reply[3]
          }
        case "TokenExhausted":
          return backendError("acquire", "rejected", new TokenExhausted({}))
      }
      const [, token, expires, exit, holderId, priorToken, terms, version, state] = reply
      return {
        _tag: "Acquired",
        fencingToken: BigInt(token),
        expiresAt: toMillis(expires),
        prior: {
          state: storedOf(version, state),
          term: exit === "" ? Option.none() : Option.some({
            exit: exitOf(exit),
            holderId,
            fencingToken: BigInt(priorToken)
          }),
          termsWithoutProgress: Number(terms)
        }
      }
    }
  )

  const renew = batch<Backend.RenewRequest, Backend.ExtendReply>(
    "renew",
    renewScript,
    ({ workId }) => [keyOf(workId)],
    (request) => [...termArgs(request), micros(request.ttl)],
    extendReply
  )

  const checkpoint = batch<Backend.CheckpointRequest, Backend.ExtendReply>(
    "checkpoint",
    checkpointScript,
    ({ workId }) => [keyOf(workId)],
    ({ fencingToken, holderId, sequence, state, ttl }) => [
      holderId,
      String(fencingToken),
      micros(ttl),
      String(sequence),
      String(state.version),
      state.bytes
    ],
    extendReply
  )

  const release = batch<Backend.ReleaseRequest, Backend.TermReply>(
    "release",
    releaseScript,
    ({ workId }) => [keyOf(workId), waitingKeyOf(workId)],
    (request) => [
      ...termArgs(request),
      request.exit,
      request.interrupted ? "1" : "0",
      ...Option.match(request.state, {
        onNone: () => ["", "", ""],
        onSome: ({ sequence, state }) => [String(sequence), String(state.version), state.bytes]
      }),
      request.workId
    ],
    termReply
  )

  const readOne = batch<Backend.Term, Effect.Success<ReturnType<Backend.Backend["Service"]["read"]>>>(
    "readCheckpoint",
    readScript,
    ({ workId }) => [keyOf(workId)],
    termArgs,
    (reply) => reply[0] === "Done" ? { _tag: "Done", state: storedOf(reply[1], reply[2]) } : { _tag: "Fenced" }
  )

  const forgetOne = batch<Backend.Term, Backend.TermReply>(
    "forget",
    forgetScript,
    ({ workId }) => [keyOf(workId), waitingKeyOf(workId)],
    (term) => [...termArgs(term), term.workId],
    termReply
  )

  const requestYieldOne = batch<Parameters<Backend.Backend["Service"]["requestYield"]>[0], boolean>(
    "requestYield",
    requestYieldScript,
    ({ workId }) => [keyOf(workId)],
    ({ deadline, workId }) => [Option.match(deadline, { onNone: () => "", onSome: micros }), workId],
    (reply) => reply[0] === "Done"
  )

  const liftOne = batch<{ readonly workId: string }, boolean>(
    "lift",
    liftScript,
    ({ workId }) => [keyOf(workId)],
    () => [],
    (reply) => reply[0] === "Done"
  )

  // ---------------------------------------------------------------------------
  // all records
  // ---------------------------------------------------------------------------

  const nodes: Effect.Effect<ReadonlyArray<Node>, BackendError> = isCluster
    ? clusterNodes(redis, prefix)
    : Effect.succeed([{ id: "", keys: [`${prefix}:{0}`] }])

  /** One step through the keys of a node. Answers the work IDs that it met. */
  const scan = (operation: string, node: Node, cursor: string, workIdPrefix: string) => {
    const pattern = `${literally(`${prefix}:{${encoded(workIdPrefix)}`)}*}`
    const byKey = (index: number): Effect.Effect<readonly [string, ReadonlyArray<string>, string], BackendError> =>
      Effect.flatMap(
        evaluate(operation, scanScript, [node.keys[index]], [cursor, pattern, scanCount, isCluster ? "1" : ""]),
        (reply) => {
          const step = reply as readonly [string, ReadonlyArray<string>, string]
          if (step[2] === node.id) return Effect.succeed(step)
          // While the slot of the key is on its way to another node, that one may be asked. Another slot may stay.
          if (index + 1 < node.keys.length) return byKey(index + 1)
          const cause = new Error(`the slots of the node ${node.id} are on their way to other nodes`)
          return Effect.fail(backendError(operation, "rejected", new Unreachable({ cause })))
        }
      )
    return Effect.map(byKey(0), ([next, keys]) => ({
      next,
      workIds: keys.map((key) => decoded(key.slice(prefix.length + 2, -1)))
    }))
  }

  /** From where the next sweep goes on, also where this one is cut short: it must not see the same keys for ever. */
  let position = { node: "", cursor: "0" }

  const sweep: Backend.Backend["Service"]["sweep"] = Effect.fnUntraced(function*({ limit, retention }) {
    const age = micros(Duration.max(retention, minimumRetention))
    const all = yield* nodes
    const known = all.findIndex(({ id }) => id === position.node)
    const from = Math.max(known, 0)
    let cursor = known === -1 ? "0" : position.cursor
    // A node whose middle comes first is begun again at the end.
    const round = all.slice(from).concat(all.slice(0, cursor === "0" ? from : from + 1))
    let swept = 0
    let steps = 0
    for (const [index, node] of round.entries()) {
      do {
        if (steps++ === maxSweepSteps) return swept
        const step = yield* scan("sweep", node, cursor, "")
        for (const group of groupsOf(step.workIds)) {
          if (swept === limit) return swept
          swept += Number(
            yield* evaluate(
              "sweep",
              sweepScript,
              group.flatMap((workId) => [keyOf(workId), markKeyOf(workId)]),
              [age, String(limit - swept)]
            ).pipe(
              // What is on its way to another node is left to a later sweep.
              Effect.catchIf((error) => codeOf(causeOf(error)) === "TRYAGAIN", () => Effect.succeed(0))
            )
          )
        }
        cursor = step.next
        position = { node: cursor === "0" ? all[(from + index + 1) % all.length].id : node.id, cursor }
      } while (cursor !== "0")
    }
    return swept
  })

  /** What one script may take: the records of one slot on a cluster, and not too many. */
  const groupsOf = (workIds: ReadonlyArray<string>): ReadonlyArray<ReadonlyArray<string>> =>
    isCluster
      ? Object.values(Arr.groupBy(workIds, (workId) => String(slotOfTag(encoded(workId))))).flatMap((group) =>
        Arr.chunksOf(group, maxRecords)
      )
      : Arr.chunksOf(workIds, maxRecords)

  /** The first work IDs after one, in byte order, and whether there are no more. */
  const firstAfter = Effect.fnUntraced(function*(after: Option.Option<string>, limit: number, prefix: string) {
    // A step may meet a key again, and while slots move, two nodes may have it.
    let found = new Set<string>()
    let isAll = true
    let last: string | undefined
    const keepFirst = () => {
      const sorted = Array.from(found).sort(compareBytes)
      if (sorted.length <= limit) return sorted
      isAll = false
      sorted.length = limit
      last = sorted[limit - 1]
      found = new Set(sorted)
      return sorted
    }
    for (const node of yield* nodes) {
      let cursor = "0"
      do {
        const step = yield* scan("list", node, cursor, prefix)
        for (const workId of step.workIds) {
          if (Option.isSome(after) && compareBytes(workId, after.value) <= 0) continue
          if (last === undefined || compareBytes(workId, last) < 0) found.add(workId)
        }
        if (found.size > 2 * limit) keepFirst()
        cursor = step.next
      } while (cursor !== "0")
    }
    return { workIds: keepFirst(), isAll }
  })

  const list: Backend.Backend["Service"]["list"] = Effect.fnUntraced(function*({ after, limit, prefix }) {
    const records: Array<Backend.LeaseRecord> = []
    while (records.length < limit) {
      const first = yield* firstAfter(after, limit - records.length, prefix)
      records.push(...yield* recordsOf("list", first.workIds, true))
      if (first.isAll) break
      // Where some were swept meanwhile, others follow: a page that is not full is the last one.
      after = Arr.last(first.workIds)
    }
    return records
  })

  const recordsOf = Effect.fnUntraced(function*(name: string, all: ReadonlyArray<string>, states: boolean) {
    const operation: Operation<string, Reply> = {
      name,
      script: recordsScript,
      workIdOf: (workId) => workId,
      keysOf: (workId) => [keyOf(workId)],
      argsOf: () => states ? ["states"] : [],
      replyOf: (reply) => reply
    }
    const records: Array<Backend.LeaseRecord> = []
    for (const workIds of Arr.chunksOf(all, maxRecords)) {
      const replies = yield* run(operation, workIds)
      for (const [index, reply] of replies.entries()) {
        if (reply instanceof BackendError) return yield* reply
        // It was swept meanwhile.
        if (reply[0] !== "Done") continue
        const [, status, holderId, token, expires, remaining, terms, version, state] = reply
        records.push({
          workId: workIds[index],
          term: status === "" ? Option.none() : Option.some({
            holderId,
            fencingToken: BigInt(token),
            status: status === "held" ? status : exitOf(status),
            expiresAt: toMillis(expires),
            ...timesOf(status === "held", remaining)
          }),
          state: storedOf(version, state),
          termsWithoutProgress: Number(terms)
        })
      }
    }
    return records
  })

  // ---------------------------------------------------------------------------
  // wake-ups
  // ---------------------------------------------------------------------------

  /** On a connection that does not answer, a client that subscribes cannot be interrupted: it is left behind then. */
  const subscription = Effect.acquireRelease(
    Effect.gen(function*() {
      const scope = yield* Scope.make()
      const fiber = yield* Effect.forkDetach(Scope.provide(redis.subscribe(channel), scope), { startImmediately: true })
      return { scope, fiber }
    }),
    ({ fiber, scope }) => {
      const end = Effect.andThen(Fiber.await(fiber), Scope.close(scope, Exit.void))
      return fiber.pollUnsafe() === undefined ? Effect.asVoid(Effect.forkDetach(end)) : end
    }
  )

  const listen = Effect.gen(function*() {
    const { fiber } = yield* subscription
    const messages = yield* Wakeups.inTime("listen", Fiber.join(fiber))
    const queue = yield* Queue.unbounded<{ readonly payload: string }, BackendError>()
    yield* Queue.take(messages).pipe(
      Effect.map(({ message }) => Queue.offerUnsafe(queue, { payload: message })),
      Effect.forever,
      Effect.mapError((error) => toBackendError("listen", error.cause)),
      Effect.catchCause((cause) => Queue.failCause(queue, cause)),
      Effect.forkScoped
    )
    return queue
  })

  /** Requests to yield need no registration: a record says where its holder listens. */
  const eachWaiting = (
    operation: string,
    script: Script,
    all: ReadonlyArray<string>,
    argsOf: (workId: string) => Array<string>
  ): Effect.Effect<unknown, BackendError> => {
    const workIds = all.filter((workId) => workId !== Wakeups.anyWorkId)
    return workIds.length === 0 ? Effect.void : Wakeups.inTime(
      operation,
      Effect.flatMap(
        run<string, void>({
          name: operation,
          script,
          workIdOf: (workId) => workId,
          keysOf: (workId) => [waitingKeyOf(workId)],
          argsOf,
          replyOf: () => undefined
        }, workIds),
        (replies) => {
          const failed = replies.find((reply) => reply instanceof BackendError)
          return failed === undefined ? Effect.void : Effect.fail(failed)
        }
      )
    )
  }

  const wakeups = !isTold ? undefined : Wakeups.makeUnsafe({
    listen,
    register: (workIds) =>
      eachWaiting("register", registerScript, workIds, () => [channel, micros(Wakeups.registrationTtl)]),
    passOn: (workIds) => eachWaiting("passOn", passOnScript, workIds, (workId) => [channel, workId]),
    unregister: (workIds, ping) =>
      Effect.andThen(
        eachWaiting("unregister", unregisterScript, workIds, () => [channel]),
        ping
          ? Wakeups.inTime(
            "unregister",
            Effect.mapError(redis.send("PUBLISH", channel, ""), ({ cause }) => toBackendError("unregister", cause))
          )
          : Effect.void
      )
  })

  const backend = Backend.Backend.of({
    acquire,
    renew,
    checkpoint,
    release,
    read: (term) => one(readOne, term),
    forget: (term) => one(forgetOne, term),
    requestYield: (request) => one(requestYieldOne, request),
    lift: (workId) => one(liftOne, { workId }),
    sweep,
    inspect: ({ states, workIds }) => recordsOf("inspect", workIds, states),
    list,
    ...Wakeups.portOf(wakeups),
    transaction: Option.none()
  })

  // ---------------------------------------------------------------------------
  // fenced writes
  // ---------------------------------------------------------------------------

  const scripts = new Map<string, Script>()

  const fenced = (
    token: Lease.AnyToken,
    script: Script,
    keys: ReadonlyArray<string>,
    args: ReadonlyArray<string>
  ): Effect.Effect<unknown, Fenced | LeaseExpired | InvalidConfig | BackendError> =>
    Effect.suspend((): Effect.Effect<unknown, Fenced | LeaseExpired | InvalidConfig | BackendError> => {
      const term = termOf(token)
      const slot = slotOfTag(encoded(term.workId))
      const stray = keys.find((key) => slotOfKey(key) !== slot)
      if (stray !== undefined) {
        return Effect.fail(
          new InvalidConfig({
            field: "key",
            why: `${JSON.stringify(stray)} is not in the slot of the lease. Put its hash tag into it: ${
              JSON.stringify(hashTag(term.workId))
            }`
          })
        )
      }
      const own = keys.find((key) => key.startsWith(`${prefix}:{`))
      if (own !== undefined) {
        return Effect.fail(
          new InvalidConfig({
            field: "key",
            why: `${JSON.stringify(own)} is where the leases are. Begin your keys with something else`
          })
        )
      }
      return Effect.flatMap(
        evaluate("fencedWrite", script, [keyOf(term.workId), ...keys], [...termArgs(term), ...args]),
        (reply): Effect.Effect<unknown, Fenced | LeaseExpired | BackendError> => {
          const [answer, result] = reply as ReadonlyArray<unknown>
          switch (answer) {
            case "Done":
              return Effect.succeed(result)
            case "Fenced":
              return Effect.fail(new Fenced(term))
            case "Expired":
              return Effect.fail(new LeaseExpired(term))
          }
          const cause = new Error(withoutArguments(String(result)))
          return Effect.fail(
            answer === "Invalid"
              ? backendError("fencedWrite", "rejected", new Other({ cause, why: "the script is not valid Lua" }))
              // It may have written before.
              : backendError("fencedWrite", "unknown", new Other({ cause, why: "the script failed" }))
          )
        }
      )
    })

  const fencedWrites = FencedWrites.of({
    set: (token, key, value) => Effect.asVoid(fenced(token, setScript, [key], [value])),
    eval: (token, { args, keys, lua }) =>
      Effect.suspend(() => {
        if (lua.startsWith("#!")) {
          return Effect.fail(
            new InvalidConfig({ field: "lua", why: "it must not begin with #!: flags are not its own" })
          )
        }
        let script = scripts.get(lua)
        if (script === undefined) scripts.set(lua, script = fencedScript(lua))
        return fenced(token, script, keys, args ?? [])
      })
  })

  if (wakeups !== undefined) yield* Effect.forkScoped(wakeups.keep)
  return Context.make(Backend.Backend, backend).pipe(Context.add(FencedWrites, fencedWrites))
})

// -----------------------------------------------------------------------------
// the server
// -----------------------------------------------------------------------------

type Evaluate = (
  operation: string,
  script: Script,
  keys: ReadonlyArray<string>,
  args: ReadonlyArray<string>
) => Effect.Effect<unknown, BackendError>

/** A node that has records, and keys of some of its slots, by which it is reached. */
interface Node {
  readonly id: string
  readonly keys: ReadonlyArray<string>
}

const maxKeysOfNode = 8

const clusterNodes = (
  redis: EffectRedis.Redis["Service"],
  prefix: string
): Effect.Effect<ReadonlyArray<Node>, BackendError> =>
  redis.send<
    ReadonlyArray<readonly [number, number, readonly [string, number, string, ...Array<unknown>]]>
  >("CLUSTER", "SLOTS").pipe(
    Effect.mapError((error) => toBackendError("list", error.cause)),
    Effect.map((ranges) => {
      // By their IDs: a node may not know its own host, and several may have the same one to those outside.
      const slots = new Map<string, Array<number>>()
      for (const [first, last, [, , id]] of ranges) {
        const own = slots.get(id) ?? []
        for (let slot = first; slot <= last; slot++) own.push(slot)
        slots.set(id, own)
      }
      return Array.from(slots, ([id, own]): Node => ({
        id,
        // Far apart: slots that move together are neighbors.
        keys: Arr.makeBy(
          Math.min(maxKeysOfNode, own.length),
          (i) => `${prefix}:{${tagOfSlot(own[Math.floor(i * own.length / Math.min(maxKeysOfNode, own.length))])}}`
        )
      }))
    })
  )

/** Asks whether the server is a cluster, and refuses one that forgets what it should keep. */
const inspect = Effect.fnUntraced(function*(
  redis: EffectRedis.Redis["Service"],
  evaluate: Evaluate,
  prefix: string,
  options: Options
) {
  const allowEviction = options.allowEviction === true
  const isCluster = yield* redis.send("INFO", "cluster").pipe(
    Effect.map((info) => fieldOf(info, "cluster_enabled") === "1"),
    Effect.mapError((error) => toBackendError("connect", error.cause)),
    Effect.catchIf((error) => allowEviction && error.reason._tag === "PermissionDenied", () => Effect.succeed(false))
  )
  if (allowEviction) return isCluster
  const infos = isCluster
    ? Effect.flatMap(
      clusterNodes(redis, prefix),
      (nodes) => Effect.forEach(nodes, ({ keys }) => evaluate("connect", infoScript, keys.slice(0, 1), ["memory"]))
    )
    : Effect.map(
      Effect.mapError(redis.send("INFO", "memory"), (error) => toBackendError("connect", error.cause)),
      (info) => [info]
    )
  for (const info of yield* infos) {
    const policy = fieldOf(info, "maxmemory_policy")
    if (policy !== "noeviction") {
      return yield* new InvalidConfig({
        field: "maxmemory-policy",
        why:
          `the server ${
            policy === undefined ? "does not tell its own" : `has ${policy}`
          }, which may delete leases and checkpoints when memory is short. ` +
          "Set it to noeviction, use another server, or, if losing them is acceptable, set allowEviction"
      })
    }
  }
  return isCluster
})

const fieldOf = (info: unknown, name: string): string | undefined =>
  new RegExp(`^${name}:(.*?)\\s*$`, "m").exec(String(info))?.[1]

// -----------------------------------------------------------------------------
// replies
// -----------------------------------------------------------------------------

const utf8Decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true })

/** Clients send and receive text. What is text already, as JSON is, stays legible and a quarter shorter. */
const encodedState = (bytes: Uint8Array): { readonly length: number; readonly text: string } => {
  try {
    return { length: 1 + bytes.byteLength, text: `t${utf8Decoder.decode(bytes)}` }
  } catch {
    const text = `b${Base64.encode(bytes)}`
    return { length: text.length, text }
  }
}

/** One after the other. If all of them are text, and mostly they are, they are decoded at once. */
const encodedStates = (
  states: ReadonlyArray<Uint8Array>
): { readonly lengths: ReadonlyArray<number>; readonly text: string } => {
  const lengths = states.map((bytes) => 1 + bytes.byteLength)
  const joined = new Uint8Array(lengths.reduce((sum, length) => sum + length, 0))
  let at = 0
  for (const bytes of states) {
    // It also keeps what is cut off at the end of a state from being completed by the next one.
    joined[at++] = 0x74 // t
    joined.set(bytes, at)
    at += bytes.byteLength
  }
  try {
    return { lengths, text: utf8Decoder.decode(joined) }
  } catch {
    const each = states.map(encodedState)
    return { lengths: each.map(({ length }) => length), text: each.map(({ text }) => text).join("") }
  }
}

const storedOf = (version: string, state: string): Option.Option<Backend.Stored> =>
  version === "" ? Option.none() : Option.some({
    version: Number(version),
    bytes: state.startsWith("t") ? utf8Encoder.encode(state.slice(1)) : Result.getOrThrow(Base64.decode(state.slice(1)))
  })

const exitModes: ReadonlyArray<string> = ["finished", "abandoned", "retired", "yielded"] satisfies Array<
  Backend.ExitMode
>

/** A mode that a later version has written is as if nobody had said anything. */
const exitOf = (exit: string): Backend.ExitMode | "expired" =>
  exitModes.includes(exit) ? exit as Backend.ExitMode : "expired"

const termReply = ([tag]: Reply): Backend.TermReply => ({ _tag: tag as Backend.TermReply["_tag"] })

const extendReply = ([tag, expires, yieldRequest]: Reply): Backend.ExtendReply =>
  tag !== "Done" ? { _tag: tag as "Fenced" | "Expired" } : {
    _tag: "Done",
    expiresAt: toMillis(expires),
    yieldRequest: yieldRequest === undefined ? Option.none() : Option.some({
      remaining: yieldRequest === "any" ? Option.none() : Option.some(Duration.micros(BigInt(yieldRequest)))
    })
  }

// -----------------------------------------------------------------------------
// errors
// -----------------------------------------------------------------------------

/** The first word of what the server says, which names the error. */
const codeOf = (cause: unknown): string | undefined =>
  cause instanceof Error ? /^([A-Z][A-Z0-9]+)(?: |$)/.exec(cause.message)?.[1] : undefined

const causeOf = ({ reason }: BackendError): unknown => "cause" in reason ? reason.cause : undefined

/**
 * Drivers attach the command to an error that the server names, and the server
 * repeats the arguments of a command that it does not know; they hold checkpoints.
 */
const cleaned = (cause: unknown): unknown =>
  cause instanceof Error && codeOf(cause) !== undefined ? new Error(withoutArguments(cause.message)) : cause

const withoutArguments = (message: string): string => message.split(", with args beginning with")[0]

const notFollowed = "the server is one node of a cluster, and the client does not follow its redirections. " +
  "Build the Redis service from the cluster client of the driver"

const outOfMemory = "the server is out of memory and takes no more writes. " +
  "Raise its maxmemory, delete what is not needed, or sweep"

/** Errors of the connection before anything was written to it, by the classes and codes of the drivers. */
const neverSent = /^(ClientClosedError|ClientOfflineError|ConnectionTimeoutError|RootNodesUnavailableError)$/

/**
 * What an error of the client means. What the server refuses by name it has
 * not applied; a connection that ends under a command tells nothing.
 */
const toBackendError = (
  operation: string,
  error: unknown,
  outcome: BackendError["outcome"] = "unknown"
): BackendError => {
  const cause = cleaned(error)
  switch (codeOf(error)) {
    case "NOAUTH":
    case "WRONGPASS":
    case "NOPERM":
    case "DENIED":
      return backendError(operation, "rejected", new PermissionDenied({ cause }))
    case "LOADING":
    case "READONLY":
    case "MASTERDOWN":
    case "CLUSTERDOWN":
    case "TRYAGAIN":
    case "NOREPLICAS":
    // It cannot write its snapshot just now.
    case "MISCONF":
      return backendError(operation, "rejected", new Unreachable({ cause }))
    case "BUSY":
      return backendError(operation, "rejected", new TimedOut({ cause }))
    case "MOVED":
    case "ASK":
      return backendError(operation, "rejected", new Other({ cause, why: notFollowed }))
    case "OOM":
      return backendError(operation, "rejected", new Other({ cause, why: outOfMemory }))
    case "NOSCRIPT":
    case "CROSSSLOT":
    case "WRONGTYPE":
      return backendError(operation, "rejected", new Other({ cause }))
  }
  if (!(error instanceof Error)) return backendError(operation, outcome, new Other({ cause }))
  if (neverSent.test(error.constructor.name) || ("syscall" in error && error.syscall === "connect")) {
    return backendError(operation, "rejected", new Unreachable({ cause }))
  }
  if (/timeout|aborted/i.test(`${error.constructor.name} ${error.message}`)) {
    return backendError(operation, outcome, new TimedOut({ cause }))
  }
  return backendError(
    operation,
    outcome,
    codeOf(error) === undefined && /socket|connect|closed|EPIPE|ECONNRESET|ENOTFOUND/i.test(error.message)
      ? new Unreachable({ cause })
      : new Other({ cause })
  )
}
