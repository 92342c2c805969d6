/** Curves as plain data: smoothing, ranges, the nearest point. */

export interface Curve {
  id: string;
  label: string;
  xs: readonly number[];
  /** Null where nothing finite was reported: the line has a gap there. */
  ys: readonly (number | null)[];
  color: string;
  dash?: readonly number[];
  width?: number;
}

/** Return exponentially smoothed values; `weight` is what stays of the past, from 0 to below 1. */
export function smooth(ys: readonly (number | null)[], weight: number): (number | null)[] {
  if (weight <= 0) return [...ys];
  let past = 0;
  let mass = 0;
  return ys.map((y) => {
    if (y === null) return null;
    past = past * weight + y * (1 - weight);
    mass = mass * weight + (1 - weight);
    return past / mass;
  });
}

export interface Range {
  min: number;
  max: number;
}

/** Return the range of all x, or null if there are none. */
export function xRange(curves: readonly Curve[]): Range | null {
  let min = Infinity;
  let max = -Infinity;
  for (const { xs } of curves)
    for (const x of xs) {
      if (x < min) min = x;
      if (x > max) max = x;
    }
  return min <= max ? { min, max } : null;
}

/** Return the range of the values to be seen between two x, with a little room. */
export function yRange(curves: readonly Curve[], within: Range, isLog: boolean): Range {
  let min = Infinity;
  let max = -Infinity;
  for (const { xs, ys } of curves)
    for (let i = 0; i < xs.length; i += 1) {
      const x = xs[i] ?? NaN;
      const y = ys[i];
      if (y === null || y === undefined || x < within.min || x > within.max) continue;
      if (isLog && y <= 0) continue;
      if (y < min) min = y;
      if (y > max) max = y;
    }
  if (min > max) return isLog ? { min: 0.1, max: 1 } : { min: 0, max: 1 };
  if (isLog) return { min: min / 1.15, max: max * 1.15 };
  const room = max > min ? (max - min) * 0.06 : Math.abs(max) * 0.1 || 1;
  return { min: min - room, max: max + room };
}

/** Return the index whose x is nearest; `xs` rises. */
export function nearestIndex(xs: readonly number[], x: number): number {
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((xs[middle] ?? 0) < x) low = middle + 1;
    else high = middle;
  }
  const before = xs[low - 1];
  const here = xs[low];
  return before !== undefined && here !== undefined && x - before < here - x ? low - 1 : low;
}
