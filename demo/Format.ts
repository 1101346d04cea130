/**
 * How figures are written.
 */

export const count = (count: number): string => count.toLocaleString("en-US")

export const seconds = (millis: number): string => `${(millis / 1000).toFixed(1)} s`

/** "1 kill", "2 kills". */
export const plural = (number: number, thing: string): string => `${count(number)} ${thing}${number === 1 ? "" : "s"}`
