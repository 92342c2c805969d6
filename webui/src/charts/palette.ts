/** Colours that people with any colour vision can tell apart, for light and dark pages. */

/** Okabe and Ito's colours, darkened or lightened until lines stand out from the page. */
const CATEGORICAL = {
  light: ["#0072b2", "#b34700", "#00795a", "#a3428a", "#8a6a00", "#5a5a5a", "#6b3fa0"],
  dark: ["#56b4e9", "#f0924a", "#2fc79a", "#e29ac8", "#f0d54a", "#c4c4c4", "#b99af0"],
};

/** Points of the cividis scale, which rises evenly in lightness. */
const CIVIDIS: readonly (readonly [number, number, number])[] = [
  [0, 34, 78],
  [18, 53, 112],
  [59, 73, 108],
  [87, 93, 109],
  [112, 113, 115],
  [138, 134, 120],
  [165, 156, 116],
  [195, 179, 105],
  [225, 204, 85],
  [254, 232, 56],
];

const DASHES: readonly (readonly number[])[] = [[], [6, 4], [2, 3], [10, 4, 2, 4]];

export interface LineStyle {
  color: string;
  dash: readonly number[];
}

/** Return the style of the n-th of a few lines: beyond the colours, dashes tell them apart. */
export function lineStyle(index: number, isDark: boolean): LineStyle {
  const colors = isDark ? CATEGORICAL.dark : CATEGORICAL.light;
  return {
    color: colors[index % colors.length] ?? "#888888",
    dash: DASHES[Math.floor(index / colors.length) % DASHES.length] ?? [],
  };
}

/** Return the colour on a light page of a line that has another one on a dark page. */
export function lightColor(color: string): string {
  return CATEGORICAL.light[CATEGORICAL.dark.indexOf(color)] ?? color;
}

/** Return the style of a run's line for the n-th metric of a chart: dashes tell metrics apart. */
export function metricLineStyle(run: number, metric: number, isDark: boolean): LineStyle {
  const style = lineStyle(run, isDark);
  return metric === 0 ? style : { ...style, dash: DASHES[metric % DASHES.length] ?? [] };
}

/** Return the colour of a share between 0 (the worst) and 1 (the best). */
export function scaleColor(share: number, isDark = false): string {
  // The end of the scale that fades into the page is left out.
  const within = isDark ? 0.25 + 0.75 * clamp(share) : 0.85 * (1 - clamp(share));
  const place = within * (CIVIDIS.length - 1);
  const low = Math.floor(place);
  const from = CIVIDIS[low] ?? [0, 0, 0];
  const to = CIVIDIS[Math.min(low + 1, CIVIDIS.length - 1)] ?? from;
  const mixed = from.map((part, i) => Math.round(part + ((to[i] ?? part) - part) * (place - low)));
  return `rgb(${mixed.join(", ")})`;
}

function clamp(share: number): number {
  return Number.isFinite(share) ? Math.min(1, Math.max(0, share)) : 0;
}
