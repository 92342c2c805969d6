/** What holds up the other ranks, and which GPUs do nothing, from what a trial has recorded. */

import { numericMetrics, type Summary } from "./metrics";
import { toNumber } from "./numbers";

/** The rank that was the slowest most often, and by how much all waited for the slowest. */
export interface Straggler {
  rank: number;
  /** In which part of the reports it was the slowest, from 0 to 1. */
  share: number;
  /** Seconds per batch beyond the mean of the ranks, over its reports. */
  lag: number;
}

export const SLOWEST = { group: "profiling", metric: "slowest_rank" };
export const LAG = { group: "profiling", metric: "slowest_rank_lag_s" };
const GPU = /^gpu_(\d+)_percent$/;
const IDLE_PERCENT = 5;

/** Return how long a batch takes: the means of its parts over all ranks. */
export function batchSeconds(summary: Summary): number {
  const parts = Object.entries(summary[SLOWEST.group] ?? {}).filter(([name]) =>
    /^mean_/.test(name),
  );
  return sum(parts.map(([, { mean }]) => toNumber(mean) ?? 0));
}

export function hasRanks(summary: Summary): boolean {
  return summary[SLOWEST.group]?.[SLOWEST.metric] !== undefined;
}

/** Return who was the slowest; reports of which only one of the two is there count for nothing. */
export function stragglerOf(
  ranks: { xs: readonly number[]; ys: readonly (number | null)[] },
  lags: { xs: readonly number[]; ys: readonly (number | null)[] },
): Straggler | null {
  const lagAt = new Map(lags.xs.map((x, i) => [x, lags.ys[i] ?? null]));
  const found = new Map<number, number[]>();
  let total = 0;
  ranks.xs.forEach((x, i) => {
    const rank = ranks.ys[i];
    const lag = lagAt.get(x);
    if (rank === null || rank === undefined || lag === null || lag === undefined) return;
    total++;
    found.set(rank, [...(found.get(rank) ?? []), lag]);
  });
  const [most] = [...found].sort((a, b) => b[1].length - a[1].length || sum(b[1]) - sum(a[1]));
  if (most === undefined) return null;
  const [rank, own] = most;
  return { rank, share: own.length / total, lag: sum(own) / own.length };
}

function sum(values: readonly number[]): number {
  return values.reduce((all, value) => all + value, 0);
}

/** A GPU of a trial: its place, and how much of the time it was used, in percent. */
export interface GpuUse {
  group: string;
  number: number;
  mean: number;
}

export function gpusOf(summary: Summary): GpuUse[] {
  return numericMetrics(summary, (group) => group.startsWith("system")).flatMap(
    ({ group, metric }) => {
      const number = GPU.exec(metric)?.[1];
      const mean = toNumber(summary[group]?.[metric]?.mean);
      return number === undefined || mean === null ? [] : [{ group, number: Number(number), mean }];
    },
  );
}

export const isIdle = ({ mean }: GpuUse): boolean => mean < IDLE_PERCENT;
