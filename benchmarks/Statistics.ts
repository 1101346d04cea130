/**
 * What is said about numbers that were measured several times.
 */

/** The median of several rounds, and how far they were apart. */
export interface Spread {
  readonly median: number
  readonly min: number
  readonly max: number
}

/**
 * The value that so many percent of the samples do not exceed (the nearest
 * rank: always one that was measured). Of no samples it is not a number.
 */
export const percentile = (samples: ReadonlyArray<number>, percent: number): number => {
  const sorted = [...samples].sort((a, b) => a - b)
  const rank = Math.ceil(percent / 100 * sorted.length)
  return sorted[Math.min(Math.max(rank, 1), sorted.length) - 1] ?? NaN
}

/** The middle sample, or the mean of the two in the middle. */
export const median = (samples: ReadonlyArray<number>): number => {
  const sorted = [...samples].sort((a, b) => a - b)
  const middle = sorted.length >> 1
  return sorted.length === 0
    ? NaN
    : sorted.length % 2 === 1
    ? sorted[middle]
    : (sorted[middle - 1] + sorted[middle]) / 2
}

export const spread = (samples: ReadonlyArray<number>): Spread => ({
  median: median(samples),
  min: samples.length === 0 ? NaN : samples.reduce((a, b) => Math.min(a, b)),
  max: samples.length === 0 ? NaN : samples.reduce((a, b) => Math.max(a, b))
})

/** Of what was measured in the same rounds: of each round, the one divided by the other. */
export const ratios = (ours: ReadonlyArray<number>, theirs: ReadonlyArray<number>): ReadonlyArray<number> =>
  ours.map((value, round) => value / theirs[round])
