/** Curves as plain data: averages, ranges, the nearest point. */

export interface Curve {
  id: string;
  label: string;
  xs: readonly number[];
  /** Null where nothing finite was reported: the line has a gap there. */
  ys: readonly (number | null)[];
  /** The moving average at each point, if there is one. */
  smoothed?: readonly (number | null)[];
  /** Of a group: the ends of its spread at each point, and how many runs are in it there. */
  band?: { lows: readonly number[]; highs: readonly number[]; counts: readonly number[] };
  color: string;
  dash?: readonly number[];
  width?: number;
  /** Whether it only stands behind others: not counted, and not to be picked. */
  isFaint?: boolean;
}

/** How much of the steps the slider's unit is. */
const SMOOTHING_UNIT = 1 / 100;

/**
 * Return the extent of a moving average in steps: there the weight of a value has fallen to 1/e.
 *
 * `weight`, from 0 to below 1, is what stays of a value after a hundredth of the steps. Their number
 * is rounded up to a power of two, so that curves that grow seldom change.
 */
export function smoothingSteps(weight: number, numSteps: number): number | null {
  if (weight <= 0) return null;
  const scale = 2 ** Math.ceil(Math.log2(Math.max(1, numSteps)));
  return (SMOOTHING_UNIT * scale) / -Math.log(weight);
}

/** Return the lines to draw: averages over what was reported, which is faint behind them. */
export function withAverages(curves: readonly Curve[]): readonly Curve[] {
  const isSmoothed = ({ xs, smoothed }: Curve) => smoothed?.length === xs.length;
  const behind = curves
    .filter(isSmoothed)
    .map((one) => ({ ...one, id: `${one.id} reported`, isFaint: true, width: 1 }));
  const before = curves.map((one) =>
    isSmoothed(one) ? { ...one, ys: one.smoothed ?? one.ys } : one,
  );
  return [...behind, ...before];
}

export interface Range {
  min: number;
  max: number;
}

/** Return the range of all x, or null if there are none. */
export function xRange(curves: readonly Curve[], isLog = false): Range | null {
  let min = Infinity;
  let max = -Infinity;
  for (const { xs } of curves)
    for (const x of xs) {
      if (isLog && x <= 0) continue;
      if (x < min) min = x;
      if (x > max) max = x;
    }
  return min <= max ? { min, max } : null;
}

/** Return the values to be seen between two x. */
function valuesWithin(curves: readonly Curve[], within: Range, isLog: boolean): number[] {
  const found: number[] = [];
  for (const { xs, ys, band } of curves)
    for (let i = 0; i < xs.length; i += 1) {
      const x = xs[i] ?? NaN;
      if (x < within.min || x > within.max) continue;
      for (const y of band ? [ys[i], band.lows[i], band.highs[i]] : [ys[i]])
        if (y !== null && y !== undefined && !(isLog && y <= 0)) found.push(y);
    }
  return found;
}

/** So many times the range of the middle half of all values lies what is no outlier around it. */
const FENCE = 3;

/** Return the values that are not far from all others (Tukey's outer fences). */
function withoutOutliers(values: readonly number[], isLog: boolean): number[] {
  const place = (value: number) => (isLog ? Math.log(value) : value);
  const rising = values.map(place).sort((a, b) => a - b);
  const low = rising[Math.floor((rising.length - 1) / 4)] ?? 0;
  const high = rising[Math.ceil(((rising.length - 1) * 3) / 4)] ?? 0;
  const room = FENCE * (high - low);
  if (room === 0) return [...values];
  return values.filter((value) => place(value) >= low - room && place(value) <= high + room);
}

/** Return how many of the values to be seen are cut off as outliers. */
export function numClipped(curves: readonly Curve[], within: Range | null, isLog: boolean): number {
  const all = valuesWithin(curves, within ?? { min: -Infinity, max: Infinity }, isLog);
  return all.length - withoutOutliers(all, isLog).length;
}

/** Return the range of the values to be seen between two x, with a little room. */
export function yRange(
  curves: readonly Curve[],
  within: Range,
  isLog: boolean,
  doesClip = false,
): Range {
  let min = Infinity;
  let max = -Infinity;
  const values = valuesWithin(curves, within, isLog);
  for (const y of doesClip ? withoutOutliers(values, isLog) : values) {
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
