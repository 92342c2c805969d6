/** Runs of a comparison: names by what differs, rows of runs or groups, their order. */

import type { Experiment, Trial } from "../api/types";
import { differing, flatten } from "./flatten";
import { formatNumber, formatValue, plural, toNumber } from "./numbers";
import { compareValues } from "./sorting";

export interface Run {
  id: number;
  experimentId: number;
  experiment: string;
  hparams: Record<string, unknown>;
  seed: number;
  best: number | null;
  isSmallerBetter: boolean;
  trial: Trial;
}

/** A line of the list: a run, or a group of runs. */
export interface Row {
  key: string;
  name: string;
  runs: readonly Run[];
  /** Place among all rows by age, for the colour. */
  place: number;
}

const PARTS_SHOWN = 4;
const SEED = /^(.*[._])?seed$/i;
/** Groups by all that differs but the seed. */
export const ALL_BUT_SEED = "*";
export const BY_EXPERIMENT = "experiment";

export function runsOf(trials: readonly Trial[], experiments: readonly Experiment[]): Run[] {
  const known = new Map(experiments.map((one) => [one.id, one]));
  return trials.map((trial) => {
    const experiment = known.get(trial.experiment_id);
    return {
      id: trial.id,
      experimentId: trial.experiment_id,
      experiment: experiment?.name ?? `Experiment ${trial.experiment_id}`,
      hparams: flatten(trial.hparams),
      seed: trial.seed,
      best: toNumber(trial.best_metric),
      isSmallerBetter: experiment?.smaller_is_better ?? true,
      trial,
    };
  });
}

/** Return the hyperparameters that differ, those that only some runs have last, seeds before them. */
export function differingHparams(runs: readonly Run[]): string[] {
  const all = runs.map(({ hparams }) => hparams);
  const names = [...differing(all)].sort();
  const rank = (name: string) => {
    if (differing(all.filter((one) => one[name] !== undefined)).has(name))
      return SEED.test(name) ? 1 : 0;
    return 2;
  };
  const ranks = new Map(names.map((name) => [name, rank(name)]));
  return names.sort((a, b) => (ranks.get(a) ?? 0) - (ranks.get(b) ?? 0));
}

/** Return a name of each run: its experiment's, or by what differs, never the same twice. */
export function namesOf(runs: readonly Run[]): Map<number, string> {
  const parts = new Map<number, string[]>(runs.map(({ id }) => [id, []]));
  const add = (part: (run: Run) => string) => {
    for (const run of runs) parts.get(run.id)?.push(part(run));
  };
  const text = (run: Run) => parts.get(run.id)?.join("\n") ?? "";
  const numNames = () => new Set(runs.map(text)).size;
  const numExperiments = new Set(runs.map(({ experiment }) => experiment)).size;
  if (numExperiments > 1) add(({ experiment }) => experiment);
  if (numNames() < runs.length) {
    const differ = differingHparams(runs);
    const short = shortNames(differ);
    const chosen = differ.slice(0, PARTS_SHOWN);
    for (const name of chosen)
      add(({ hparams }) => `${short.get(name)} ${formatValue(hparams[name])}`);
    // Beyond the first ones only what tells more runs apart.
    for (const name of differ.slice(PARTS_SHOWN)) {
      if (numNames() === runs.length) break;
      const apart = new Set(runs.map((run) => `${text(run)}\n${formatValue(run.hparams[name])}`));
      if (apart.size > numNames())
        add(({ hparams }) => `${short.get(name)} ${formatValue(hparams[name])}`);
    }
  }
  const counts = new Map<string, number>();
  for (const run of runs) counts.set(text(run), (counts.get(text(run)) ?? 0) + 1);
  return new Map(
    runs.map((run) => {
      const known = parts.get(run.id) ?? [];
      const own = known.length > 0 ? known : [run.experiment];
      const isAlone = counts.get(text(run)) === 1;
      return [run.id, [...own, ...(isAlone ? [] : [`trial ${run.id}`])].join(", ")];
    }),
  );
}

/** Return each name's last part, or all of it where another one ends alike. */
function shortNames(names: readonly string[]): Map<string, string> {
  const last = (name: string) => name.slice(name.lastIndexOf(".") + 1);
  const isShared = (name: string) => names.some((one) => one !== name && last(one) === last(name));
  return new Map(names.map((name) => [name, isShared(name) ? name : last(name)]));
}

/** Return the rows of runs, or of groups by hyperparameters or experiment, the oldest first. */
export function rowsOf(runs: readonly Run[], groupBy: readonly string[]): Row[] {
  const byAge = runs.toSorted((a, b) => a.id - b.id);
  if (groupBy.length === 0) {
    const names = namesOf(byAge);
    return byAge.map((run, place) => ({
      key: String(run.id),
      name: names.get(run.id) ?? "",
      runs: [run],
      place,
    }));
  }
  const differ = differingHparams(byAge);
  const isAll = groupBy.includes(ALL_BUT_SEED);
  const hparams = isAll
    ? differ.filter((name) => !SEED.test(name))
    : groupBy.filter((one) => one !== BY_EXPERIMENT);
  const byName = new Set(byAge.map(({ experiment }) => experiment)).size > 1;
  const hasExperiment = groupBy.includes(BY_EXPERIMENT) || (isAll && byName);
  const short = shortNames(hparams);
  const groups = new Map<string, Run[]>();
  for (const run of byAge) {
    const parts = [
      ...(hasExperiment ? [run.experiment] : []),
      ...hparams.map((name) => `${short.get(name)} ${formatValue(run.hparams[name])}`),
    ];
    const name = parts.join(", ") || "All runs";
    groups.set(name, [...(groups.get(name) ?? []), run]);
  }
  return [...groups].map(([name, members], place) => ({ key: name, name, runs: members, place }));
}

/** Return the value that a row is sorted by and shows: the best metric, or a hyperparameter. */
export function valueOf(row: Row, sort: string | undefined): unknown {
  const run = row.runs[0];
  if (sort?.startsWith("hp.")) return run?.hparams[sort.slice(3)];
  const known = row.runs.flatMap(({ best }) => (best === null || Number.isNaN(best) ? [] : [best]));
  if (known.length === 0) return null;
  return run?.isSmallerBetter ? Math.min(...known) : Math.max(...known);
}

/** Return rows in the wanted order: those on top first, then newest, by name or by value. */
export function sorted(
  rows: readonly Row[],
  sort: string | undefined,
  onTop: ReadonlySet<string>,
): Row[] {
  const isDescending = sort === "metric" && rows[0]?.runs[0]?.isSmallerBetter === false;
  const inOrder =
    sort === undefined
      ? rows.toReversed()
      : rows.toSorted((a, b) =>
          sort === "name"
            ? a.name.localeCompare(b.name, "en", { numeric: true })
            : compareValues(valueOf(a, sort), valueOf(b, sort), isDescending),
        );
  const top = inOrder.filter(({ key }) => onTop.has(key));
  return top.length === 0 ? inOrder : [...top, ...inOrder.filter(({ key }) => !onTop.has(key))];
}

/** Return the keys of the rows that are switched on: the first few, and what was chosen. */
export function switchedOn(
  rows: readonly Row[],
  first: number,
  on: readonly string[],
  off: readonly string[],
): Set<string> {
  const keys = [...rows.slice(0, first).map(({ key }) => key), ...on];
  const there = new Set(rows.map(({ key }) => key));
  const without = new Set(off);
  return new Set(keys.filter((key) => there.has(key) && !without.has(key)));
}

/** Return a row's value, with the difference to another one where both are numbers. */
export function withDifference(value: unknown, base: unknown): string {
  const [own, other] = [toNumber(value), toNumber(base)];
  if (own === null || other === null || own === other || !Number.isFinite(own - other))
    return formatValue(value);
  return `${formatNumber(own)} (${own > other ? "+" : "−"}${formatNumber(Math.abs(own - other))})`;
}

export function describeRow({ runs }: Row): string {
  return runs.length > 1 ? plural(runs.length, "run") : "";
}
