/**
 * Turns: of those that want to do something one after the other, who may begin
 * now.
 */

export class Turn {
  private isTaken = false
  private readonly waiting = new Array<() => void>()

  /** Takes the turn, if nobody has it. Tells whether it did. */
  take(): boolean {
    if (this.isTaken) return false
    return this.isTaken = true
  }

  /** Calls back when it is the caller's turn, because somebody has it now. */
  wait(begin: () => void): void {
    this.waiting.push(begin)
  }

  /** Gives up waiting, if it still waits. */
  cancel(begin: () => void): void {
    const index = this.waiting.indexOf(begin)
    if (index >= 0) this.waiting.splice(index, 1)
  }

  /** Ends the turn of whoever has it. */
  end(): void {
    const next = this.waiting.shift()
    if (next === undefined) this.isTaken = false
    else next()
  }
}
