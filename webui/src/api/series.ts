/** Metric series: what is drawn as curves. */

import { queryOptions, useQueries } from "@tanstack/react-query";

import { toNumber } from "../lib/numbers";
import { api, unwrap } from "./client";
import { keys } from "./keys";
import type { MetricRow } from "./types";

export interface SeriesRequest {
  trialId: number;
  group: string;
  metric: string;
  /** "batches", "time" (seconds since the trial's first report), or a metric of the same group. */
  x: string;
}

export interface Series {
  xs: number[];
  ys: (number | null)[];
}

const PAGE = 1000;

const rowsQuery = (trialId: number, group: string) =>
  queryOptions({
    queryKey: keys.metrics(trialId, group),
    queryFn: async () => {
      const rows: MetricRow[] = [];
      let cursor: string | undefined;
      do {
        const page = await unwrap(
          api.GET("/api/v1/trials/{trial_id}/metrics", {
            params: { path: { trial_id: trialId }, query: { group, limit: PAGE, cursor } },
          }),
        );
        rows.push(...page.items);
        cursor = page.next_cursor ?? undefined;
      } while (cursor !== undefined);
      return rows;
    },
    meta: { isHistory: true },
  });

/** Return the points of one series, in order of x. */
export function seriesOf(rows: readonly MetricRow[], metric: string, x: string): Series {
  const first = rows[0]?.time ?? 0;
  const points: [number, number | null][] = [];
  for (const row of rows) {
    if (!(metric in row.metrics)) continue;
    const y = toNumber(row.metrics[metric]);
    const at =
      x === "batches"
        ? row.steps_completed
        : x === "time"
          ? row.time - first
          : toNumber(row.metrics[x]);
    if (at === null || !Number.isFinite(at)) continue;
    points.push([at, y !== null && Number.isFinite(y) ? y : null]);
  }
  points.sort((a, b) => a[0] - b[0]);
  return { xs: points.map(([at]) => at), ys: points.map(([, y]) => y) };
}

interface SeriesAnswer {
  series: (Series | undefined)[];
  isPending: boolean;
  error: unknown;
}

/** Read several series at once; those still on their way are undefined. */
export function useSeries(requests: readonly SeriesRequest[]): SeriesAnswer {
  const groups = [...new Set(requests.map(({ trialId, group }) => `${trialId} ${group}`))];
  const answers = useQueries({
    queries: groups.map((one) => {
      const [trial = "0", ...rest] = one.split(" ");
      return rowsQuery(Number(trial), rest.join(" "));
    }),
  });
  const rows = new Map(groups.map((one, i) => [one, answers[i]?.data]));
  return {
    series: requests.map(({ trialId, group, metric, x }) => {
      const found = rows.get(`${trialId} ${group}`);
      return found && seriesOf(found, metric, x);
    }),
    isPending: answers.some((answer) => answer.isPending),
    error: answers.find((answer) => answer.isError)?.error,
  };
}
