/** What the addresses carry behind the question mark; what cannot be read is left out. */

import { conditions } from "./conditions";

type Raw = Record<string, unknown>;

/** Without this, links would have to name every part of the address. */
function optional<Parts extends object>(parts: Parts): Partial<Parts> {
  return parts;
}

function text(raw: Raw, name: string): string | undefined {
  const value = raw[name];
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  return typeof value === "string" && value !== "" ? value : undefined;
}

function number(raw: Raw, name: string): number | undefined {
  const value = Number(raw[name]);
  return raw[name] !== undefined && raw[name] !== "" && Number.isFinite(value) ? value : undefined;
}

function oneOf<Choice extends string>(
  raw: Raw,
  name: string,
  choices: readonly Choice[],
): Choice | undefined {
  return choices.find((choice) => choice === raw[name]);
}

function flag(raw: Raw, name: string): true | undefined {
  return raw[name] === true || raw[name] === 1 || raw[name] === "true" ? true : undefined;
}

function texts(raw: Raw, name: string): string[] | undefined {
  const value = raw[name];
  if (!Array.isArray(value)) return undefined;
  const found = value.flatMap((item: unknown) =>
    typeof item === "string" || typeof item === "number" ? [String(item)] : [],
  );
  return found.length > 0 ? found : undefined;
}

function numbers(raw: Raw, name: string): number[] | undefined {
  const value = raw[name];
  const list: unknown[] = Array.isArray(value) ? value : value === undefined ? [] : [value];
  const found = list.map(Number).filter((item) => Number.isInteger(item) && item > 0);
  return found.length > 0 ? found : undefined;
}

/** Tell whether a number of an address can be that of anything. */
export function isId(id: number): boolean {
  return Number.isSafeInteger(id) && id > 0;
}

export const EXPERIMENT_STATES = ["ACTIVE", "PAUSED", "COMPLETED", "CANCELED", "ERROR"] as const;

export const TRIAL_STATES = ["ACTIVE", "COMPLETED", "CANCELED", "ERROR"] as const;

export const signInSearch = (raw: Raw) =>
  optional({
    next: text(raw, "next"),
    problem: text(raw, "problem"),
    code: text(raw, "code"),
  });

export const experimentsSearch = (raw: Raw) =>
  optional({
    selected: numbers(raw, "selected"),
    q: text(raw, "q"),
    state: oneOf(raw, "state", EXPERIMENT_STATES),
    sort: text(raw, "sort"),
    desc: flag(raw, "desc"),
    columns: texts(raw, "columns"),
    where: conditions(raw.where),
    archived: flag(raw, "archived"),
    all: flag(raw, "all"),
    starred: flag(raw, "starred"),
  });

export const USAGE_KEYS = ["month", "user", "project", "pool"] as const;
const MONTH = /^20\d\d-(0[1-9]|1[0-2])$/;

function month(raw: Raw, name: string): string | undefined {
  const value = text(raw, name);
  return value !== undefined && MONTH.test(value) ? value : undefined;
}

export const usageSearch = (raw: Raw) =>
  optional({
    since: month(raw, "since"),
    until: month(raw, "until"),
    by: texts(raw, "by")?.flatMap((key) => USAGE_KEYS.filter((known) => known === key)),
  });

export const newExperimentSearch = (raw: Raw) =>
  optional({
    fork: number(raw, "fork"),
    trial: number(raw, "trial"),
    checkpoint: text(raw, "checkpoint"),
  });

export const trialsSearch = (raw: Raw) =>
  optional({
    sort: text(raw, "sort"),
    desc: flag(raw, "desc"),
    state: oneOf(raw, "state", TRIAL_STATES),
    selected: numbers(raw, "selected"),
  });

/** How a panel differs: further metrics in it, its own x axis, or one number of each run. */
export interface PanelChange {
  add?: string[];
  x?: string;
  as?: "bars" | "box";
  value?: "min" | "max";
}

function panelChanges(raw: unknown): Record<string, PanelChange> | undefined {
  if (typeof raw !== "object" || raw === null || Array.isArray(raw)) return undefined;
  const found = Object.entries(raw as Record<string, unknown>).flatMap(([id, value]) => {
    if (typeof value !== "object" || value === null) return [];
    const own = value as Raw;
    const change = optional({
      add: texts(own, "add"),
      x: text(own, "x"),
      as: oneOf(own, "as", ["bars", "box"] as const),
      value: oneOf(own, "value", ["min", "max"] as const),
    });
    return Object.values(change).every((part) => part === undefined) ? [] : [[id, change] as const];
  });
  return found.length > 0 ? Object.fromEntries(found) : undefined;
}

/** How curves are drawn: `x` is "batches", "time" or the name of a metric, `q` filters the charts. */
export const metricsSearch = (raw: Raw) =>
  optional({
    metric: text(raw, "metric"),
    q: text(raw, "q"),
    x: text(raw, "x"),
    log: flag(raw, "log"),
    logx: flag(raw, "logx"),
    clip: flag(raw, "clip"),
    smooth: number(raw, "smooth"),
    from: number(raw, "from"),
    to: number(raw, "to"),
    table: flag(raw, "table"),
  });

/** Which media are shown, and at which step; without one, the newest. */
export const mediaSearch = (raw: Raw) =>
  optional({
    q: text(raw, "q"),
    step: number(raw, "step"),
  });

/** Intervals that are chosen on axes, by the name of each; that of the metric has an empty name. */
export type Brushes = Record<string, [number, number][]>;

function brushesOf(raw: unknown): Brushes | undefined {
  if (typeof raw !== "object" || raw === null || Array.isArray(raw)) return undefined;
  const found = Object.entries(raw as Record<string, unknown>).flatMap(([name, value]) => {
    const intervals = (Array.isArray(value) ? value : []).filter(
      (one): one is [number, number] =>
        Array.isArray(one) && one.length === 2 && one.every((end) => Number.isFinite(end)),
    );
    return intervals.length > 0 ? [[name, intervals] as const] : [];
  });
  return found.length > 0 ? Object.fromEntries(found) : undefined;
}

export const hyperparametersSearch = (raw: Raw) =>
  optional({
    brush: brushesOf(raw.brush),
    view: oneOf(raw, "view", ["parallel", "scatter", "heat"] as const),
    hide: texts(raw, "hide"),
    log: flag(raw, "log"),
  });

export const codeSearch = (raw: Raw) => optional({ file: text(raw, "file") });

export const logsSearch = (raw: Raw) =>
  optional({
    q: text(raw, "q"),
    regex: flag(raw, "regex"),
    rank: number(raw, "rank"),
    level: oneOf(raw, "level", ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] as const),
    stream: oneOf(raw, "stream", ["stdout", "stderr"] as const),
    since: number(raw, "since"),
    until: number(raw, "until"),
    line: number(raw, "line"),
  });

/**
 * A view of a comparison: which runs (`trials`, `experiments`, `runs` as a text to look for,
 * `state`, `labels`, `where`), how they are listed, and how the panels are arranged. `saved` is the
 * stored view that it began from, 0 for none, and `version` the version of that.
 */
export const compareSearch = (raw: Raw) =>
  optional({
    ...metricsSearch(raw),
    trials: numbers(raw, "trials"),
    experiments: numbers(raw, "experiments"),
    runs: text(raw, "runs"),
    where: conditions(raw.where),
    state: oneOf(raw, "state", TRIAL_STATES),
    labels: texts(raw, "labels"),
    group: texts(raw, "group"),
    spread: oneOf(raw, "spread", ["std", "quartiles", "deciles", "none"] as const),
    sort: text(raw, "sort"),
    first: number(raw, "first"),
    on: texts(raw, "on"),
    off: texts(raw, "off"),
    top: texts(raw, "top"),
    base: text(raw, "base"),
    pinned: texts(raw, "pinned"),
    hidden: texts(raw, "hidden"),
    folded: texts(raw, "folded"),
    re: flag(raw, "re"),
    panels: panelChanges(raw.panels),
    saved: number(raw, "saved"),
    version: number(raw, "version"),
    view: oneOf(raw, "view", ["differences", "media"] as const),
    all: flag(raw, "all"),
    media: text(raw, "media"),
    step: number(raw, "step"),
  });

export type CompareSearch = ReturnType<typeof compareSearch>;
export type MetricsSearch = ReturnType<typeof metricsSearch>;
export type LogsSearch = ReturnType<typeof logsSearch>;
