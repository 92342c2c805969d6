/** Which metrics there are, and which belong into one chart. */

import type { MetricSummary } from "../api/types";

export interface MetricName {
  group: string;
  metric: string;
  /** The metric of the group along which its code wants it drawn. */
  xAxis?: string | null;
}

export type Summary = Record<string, Record<string, MetricSummary>>;

const PREFIX = /^(t|train|training|v|val|valid|validation|test|eval)_(?=.)/;
export const AXES = new Set(["epoch", "epochs", "batch", "batches", "step", "steps"]);
// What the x axis may be whatever was reported; trainers report their batches as a metric, too.
const X_ALWAYS = new Set(["batches", "time"]);
// What trainers record of their speed; ranks other than the first have a group each.
const PROFILER = /^(profiling|system)(_rank_\d+)?$/;

/** Tell whether a group has a page of its own, the profiler. */
export function isProfilerGroup(group: string): boolean {
  return PROFILER.test(group);
}

function isNumeric(summary: MetricSummary): boolean {
  return summary.min !== null && summary.min !== undefined;
}

/** Return the numeric metrics of a trial; `isWanted` chooses groups. */
export function numericMetrics(
  summary: Summary,
  isWanted: (group: string) => boolean = () => true,
): MetricName[] {
  return Object.entries(summary)
    .filter(([group]) => isWanted(group))
    .flatMap(([group, metrics]) =>
      Object.entries(metrics)
        .filter(([, one]) => isNumeric(one))
        .map(([metric, one]) => ({ group, metric, xAxis: one.x_axis })),
    );
}

/** Return the metrics that the x axis may be, epochs first, besides what it always may be. */
export function xChoices(names: readonly MetricName[]): string[] {
  const found = [...new Set(names.map(({ metric }) => metric))].filter((one) => !X_ALWAYS.has(one));
  const rank = (name: string) => (AXES.has(name) ? 0 : 1);
  return found.sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
}

/** Return the x axis that code has chosen for all of some metrics and has reported, if any. */
export function chosenX(
  members: readonly MetricName[],
  names: readonly MetricName[],
): string | undefined {
  const x = members[0]?.xAxis ?? undefined;
  const isThere = members.every(
    ({ group, xAxis }) =>
      xAxis === x && names.some((one) => one.group === group && one.metric === x),
  );
  return isThere ? x : undefined;
}

interface ChartAxes {
  /** The x axis of all charts without one of their own. */
  shared: string;
  own: ReadonlyMap<string, string>;
  /** Whether code has chosen any. */
  isChosen: boolean;
}

/** Return the x axes of charts: that of the address, or else what the code has chosen for each. */
export function xAxesOf(
  charts: Iterable<readonly [string, readonly MetricName[]]>,
  names: readonly MetricName[],
  wanted?: string,
): ChartAxes {
  const own = new Map<string, string>();
  const counts = new Map<string, number>();
  let isChosen = false;
  const reported = new Set(names.map(({ metric }) => metric));
  for (const [id, members] of charts) {
    const mayChoose = reported.has(members[0]?.xAxis ?? "");
    const chosen = mayChoose ? chosenX(members, names) : undefined;
    const x = chosen ?? "batches";
    isChosen ||= chosen !== undefined;
    own.set(id, x);
    if (!members.every(({ group }) => isProfilerGroup(group)))
      counts.set(x, (counts.get(x) ?? 0) + 1);
  }
  if (wanted !== undefined) return { shared: wanted, own: new Map(), isChosen };
  const [most] = [...counts].sort(
    ([x, n], [y, m]) => m - n || Number(x === "batches") - Number(y === "batches"),
  );
  const shared = most?.[0] ?? "batches";
  for (const [id, x] of own) if (x === shared) own.delete(id);
  return { shared, own, isChosen };
}

/** Return the metrics that are worth a curve: not those that only count how far training is. */
export function chartable(names: readonly MetricName[]): MetricName[] {
  return names.filter(({ group, metric }) => !AXES.has(metric) && !isProfilerGroup(group));
}

/** Return the charts to draw: training and validation of the same quantity share one. */
export function chartsOf(names: readonly MetricName[]): Map<string, MetricName[]> {
  const charts = new Map<string, MetricName[]>();
  for (const name of names) {
    if (AXES.has(name.metric)) continue;
    const title = name.metric.replace(PREFIX, "");
    charts.set(title, [...(charts.get(title) ?? []), name]);
  }
  return charts;
}

/**
 * Return what a filter finds: each word must be in the text, `*` stands for anything, `a|b` for
 * either. No word costs more than the length of the text for each of its parts.
 */
export function matcher(filter: string): (text: string) => boolean {
  const words = filter
    .toLowerCase()
    .split(/\s+/)
    .filter(Boolean)
    .map((word) => word.split("|").filter(Boolean))
    .filter((either) => either.length > 0);
  const holds = (text: string, pattern: string) => {
    let from = 0;
    for (const piece of pattern.split("*")) {
      const at = text.indexOf(piece, from);
      if (at < 0) return false;
      from = at + piece.length;
    }
    return true;
  };
  return (text) => {
    const lower = text.toLowerCase();
    return words.every((either) => either.some((pattern) => holds(lower, pattern)));
  };
}

/** A longer expression is refused: the browser may need very long for one. */
const LONGEST_EXPRESSION = 200;

/** Return what a regular expression finds, or what is wrong with it. */
export function expressionMatcher(expression: string): ((text: string) => boolean) | string {
  if (expression.length > LONGEST_EXPRESSION)
    return `A regular expression must have at most ${LONGEST_EXPRESSION} characters, but has ${expression.length}.`;
  try {
    const compiled = new RegExp(expression, "i");
    return (text) => compiled.test(text);
  } catch (error) {
    return error instanceof Error ? error.message : String(error);
  }
}

/** Return the charts whose title or metrics a filter finds. */
export function matchingCharts<Chart extends readonly [string, readonly MetricName[]]>(
  charts: readonly Chart[],
  filter: string,
): Chart[] {
  const isFound = matcher(filter);
  return charts.filter(([title, members]) =>
    isFound([title, ...members.map(({ group, metric }) => `${group}/${metric}`)].join("\n")),
  );
}

/** Return the last step of the longest of some trials. */
export function lastStep(
  trials: readonly { steps_completed: number; summary?: Summary }[],
): number {
  let last = 0;
  for (const { steps_completed: steps, summary } of trials) {
    last = Math.max(last, steps);
    for (const group of Object.values(summary ?? {}))
      for (const metric of Object.values(group)) last = Math.max(last, metric.last_step);
  }
  return last;
}
