/**
 * The picture of the pool: who has which partition.
 */
import { count, plural } from "../Format.ts"
import { colours, type Line, type Piece, show as showIn, type Style, timed } from "../Terminal.ts"
import { type Fleet, gap, goesElsewhere, type Member, runningOf } from "./Fleet.ts"

/** Shows the fleet until the scope is closed. */
export const show = (fleet: Fleet) =>
  showIn(fleet, { lines: (columns) => pictureOf(fleet, columns), summary: () => summaryOf(fleet) })

const pictureOf = (fleet: Fleet, columns: number): ReadonlyArray<Line> => {
  // Of several starts of one member, the latest.
  const members = [...new Map(fleet.members.map((member) => [member.name, member])).values()]
  return [
    [],
    ...members.map((member) => memberLine(fleet, member, columns)),
    [],
    timed(fleet.now, summaryOf(fleet))
  ]
}

/** A column for each partition, or, where there are too many, for several. */
const memberLine = (fleet: Fleet, member: Member, columns: number): Line => {
  const { partitions } = fleet
  const size = Math.ceil(partitions.length / Math.max(10, columns - 30))
  const cells = Array.from({ length: Math.ceil(partitions.length / size) }, (_, cell): Piece => {
    const all = partitions.slice(cell * size, (cell + 1) * size)
    const held = all.map(runningOf).filter((running) => running?.member.name === member.name)
    return held.length === 0
      ? ["·", "dim"]
      : held.some((running) => running!.isAsked)
      ? ["▒", colourOf(member)]
      : [held.length === all.length ? "█" : "▄", colourOf(member)]
  })
  const { holderId, state } = member
  const style: ReadonlyArray<Style> = state === "killed"
    ? ["red"]
    : state === "left"
    ? ["dim"]
    : ["bold", colourOf(member)]
  return [
    [` ${holderId.padEnd(6)}`, ...style],
    ...cells,
    [` ${count(fleet.heldBy(member).length).padStart(3)}  `],
    [stateOf[state], state === "killed" ? "red" : "dim"]
  ]
}

const stateOf: Record<Member["state"], string> = {
  starting: "starts",
  working: "",
  leaving: "hands over",
  killed: "killed ✗",
  left: "has left"
}

const colourOf = (member: Member): Style => colours[(member.number - 1) % colours.length]

const summaryOf = (fleet: Fleet): Line => {
  const { atWork, partitions, present } = fleet
  const moves = fleet.moves.filter(goesElsewhere)
  const longest = Math.max(0, ...moves.map(({ gap }) => gap))
  return [
    [`${plural(present.length, "member")}, ${atWork} of ${partitions.length} at work`, "bold"],
    [`, ${plural(moves.length, "move")}${moves.length === 0 ? "" : `, longest gap ${gap(longest)}`}`]
  ]
}
