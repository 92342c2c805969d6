/** Panels of a comparison: which there are, in which sections, and which a filter finds. */

import { AXES, isProfilerGroup, type MetricName } from "./metrics";
import type { PanelChange } from "./search";

export interface Panel extends MetricName {
  id: string;
  title: string;
  numTrials: number;
  /** All that it draws, its own metric first. */
  metrics: readonly (MetricName & { id: string; title: string })[];
  /** Its own x axis; undefined for the page's. */
  x?: string;
  as?: PanelChange["as"];
  value?: PanelChange["value"];
}

export interface Section {
  name: string;
  panels: Panel[];
  isClosed: boolean;
}

export const PINNED = "Pinned";

/** Return the panels of metrics; one whose name two groups share says its group. */
export function panelsOf(names: readonly (MetricName & { numTrials: number })[]): Panel[] {
  const shown = names.filter(({ metric }) => !AXES.has(metric));
  const counts = new Map<string, number>();
  for (const { metric } of shown) counts.set(metric, (counts.get(metric) ?? 0) + 1);
  return shown.map((name) => {
    const id = `${name.group}/${name.metric}`;
    const title =
      (counts.get(name.metric) ?? 0) > 1 ? `${name.metric} (${name.group})` : name.metric;
    return { ...name, id, title, metrics: [{ ...name, id, title }] };
  });
}

/** Return panels with further metrics and x axes of their own; what is not there is left out. */
export function changedPanels(
  panels: readonly Panel[],
  changes: Readonly<Record<string, PanelChange>>,
): Panel[] {
  const known = new Map(panels.map((one) => [one.id, one]));
  return panels.map((panel) => {
    const change = changes[panel.id];
    if (change === undefined) return panel;
    const added = [...new Set(change.add)].filter((id) => id !== panel.id);
    const metrics = [panel, ...added.flatMap((id) => known.get(id) ?? [])];
    return {
      ...panel,
      x: change.x,
      as: change.as,
      value: change.value,
      title: metrics.map(({ title }) => title).join(", "),
      metrics: metrics.map(({ id, title, group, metric, xAxis }) => ({
        id,
        title,
        group,
        metric,
        xAxis,
      })),
    };
  });
}

/** Return the section of a metric: what stands before the first slash, or else its group. */
function sectionOf({ group, metric }: MetricName): string {
  const end = isProfilerGroup(group) ? -1 : metric.indexOf("/");
  return end > 0 ? metric.slice(0, end) : group;
}

interface Arrangement {
  pinned: readonly string[];
  hidden: readonly string[];
  /** Sections that are not as they are at first: the profiler's are closed, all others open. */
  folded: readonly string[];
}

/** Return panels in sections: what is pinned first, then validation, training and all others. */
export function sectionsOf(panels: readonly Panel[], arrangement: Arrangement): Section[] {
  const { pinned, hidden, folded } = arrangement;
  const out = new Set(hidden);
  const byId = new Map(panels.map((one) => [one.id, one]));
  const top = [...new Set(pinned)].flatMap((id) => byId.get(id) ?? []);
  const onTop = new Set(top);
  const found = new Map<string, Panel[]>();
  for (const panel of panels) {
    if (out.has(panel.id) || onTop.has(panel)) continue;
    const name = sectionOf(panel);
    const known = found.get(name);
    if (known) known.push(panel);
    else found.set(name, [panel]);
  }
  const isProfiler = (members: readonly Panel[]) =>
    members.every(({ group }) => isProfilerGroup(group));
  const rank = ([name, members]: [string, Panel[]]) =>
    isProfiler(members) ? 3 : name === "validation" ? 0 : name === "training" ? 1 : 2;
  const sections = [...found]
    .sort((a, b) => rank(a) - rank(b) || compareNames(a[0], b[0]))
    .map(([name, members]) => ({
      name,
      panels: members.toSorted((a, b) => compareNames(a.title, b.title)),
      isClosed: isProfiler(members) !== folded.includes(name),
    }));
  if (top.length > 0)
    sections.unshift({ name: PINNED, panels: top, isClosed: folded.includes(PINNED) });
  return sections;
}

function compareNames(a: string, b: string): number {
  return a.localeCompare(b, "en", { numeric: true });
}
