/** Curves as plain data: averages, ranges, the nearest point. */

export interface Curve {
  id: string;
  label: string;
  xs: readonly number[];
  /** Null where nothing finite was reported: the line has a gap there. */
  ys: readonly (number | null)[];
  /** The moving average at each point, if there is one. */
  smoothed?: readonly (number | null)[];
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
