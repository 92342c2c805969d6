/** Metric series: what is drawn as curves. */

import { useDebouncedValue } from "@mantine/hooks";
import { keepPreviousData, queryOptions } from "@tanstack/react-query";
import { useEffect, useLayoutEffect, useMemo, useRef, useState } from "react";

import { hub } from "../live/hub";
import {
  type Points,
  seriesId,
  type SeriesName,
  SeriesStore,
  type SeriesView,
  type Span,
  type Wanted,
} from "../live/seriesStore";
import { api, unwrap } from "./client";
import { JoinedRequests } from "./joined";
import { keys } from "./keys";

export type { SeriesName } from "../live/seriesStore";

export interface Series {
  xs: number[];
  ys: (number | null)[];
  /** The moving average at each point; empty if none was asked for. */
  smoothed: (number | null)[];
}

interface SeriesAnswer {
  series: (Series | undefined)[];
  isPending: boolean;
  error: unknown;
}

const FEW = 10;
const POINTS_OF_FEW = 1500;
const POINTS_OF_MANY = 400;
/** So many lines cover each other's details; extremes are kept. */
const VERY_MANY = 30;
const POINTS_OF_VERY_MANY = 200;
const ZOOM_DELAY_MS = 150;
const SMOOTHING_DELAY_MS = 150;

interface SeriesOptions {
  x: string;
  maxPoints: number;
  span?: Span | null;
  smoothing?: number | null;
}

/** More would keep the first panel waiting for all others. */
const MOST_JOINED = 100;

async function sendSeries(
  wanted: readonly Wanted[],
  { x, maxPoints, span, smoothing }: SeriesOptions,
): Promise<Points[]> {
  const reply = await unwrap(
    api.POST("/api/v1/metric-series", {
      body: {
        x,
        max_points: maxPoints,
        x_min: span?.min,
        x_max: span?.max,
        smoothing_steps: smoothing,
        series: wanted.map(({ trialId, group, metric, afterStep }) => ({
          trial_id: trialId,
          group,
          name: metric,
          after_step: afterStep,
        })),
      },
    }),
  );
  return reply.series.map((one): Points => ({
    xs: one.x,
    ys: one.y,
    steps: one.steps,
    smoothed: one.smoothed ?? [],
    lastStep: one.last_step,
    isSampled: one.is_sampled,
  }));
}

const joined = new JoinedRequests(sendSeries, MOST_JOINED);

/** Read series; what several charts ask for at a time, in the same way, is one request. */
export function readSeries(wanted: readonly Wanted[], options: SeriesOptions): Promise<Points[]> {
  return joined.read(wanted, options);
}

const SPARK_POINTS = 40;

/** The outline of a metric of a trial, as rows of a table show it. */
export const sparkQuery = (name: SeriesName) =>
  queryOptions({
    queryKey: keys.spark(name.trialId, name.group, name.metric),
    queryFn: async () => {
      const [points] = await readSeries([{ ...name, afterStep: -1 }], {
        x: "batches",
        maxPoints: SPARK_POINTS,
      });
      return { xs: points?.xs ?? [], ys: points?.ys ?? [] };
    },
    placeholderData: keepPreviousData,
  });

/** Return where every point of some series is to be had as CSV, not only those that are drawn. */
export function csvAddress(names: readonly SeriesName[], x: string): string {
  const query = new URLSearchParams({ x });
  for (const { trialId, group, metric } of names)
    query.append("series", [trialId, group, metric].map(encodeURIComponent).join("/"));
  return `/api/v1/metric-series.csv?${query.toString()}`;
}

const NOTHING: SeriesView = { points: new Map(), isPending: true, error: undefined };

/**
 * Read series and follow them; those still on their way are undefined.
 *
 * `x` is "batches", "time" (seconds since the trial's first point) or a metric of the same group.
 * `smoothing` is the extent of the moving average in steps, null for none. `numSeries` counts what
 * the page has in all, where `names` changes as one scrolls.
 */
export function useSeries(
  names: readonly SeriesName[],
  x: string,
  zoom: Span | null,
  smoothing: number | null,
  numSeries = names.length,
): SeriesAnswer {
  const maxPoints =
    names.length > VERY_MANY
      ? POINTS_OF_VERY_MANY
      : numSeries > FEW
        ? POINTS_OF_MANY
        : POINTS_OF_FEW;
  const [view, setView] = useState(NOTHING);
  const store = useRef<SeriesStore | null>(null);
  // While the slider moves, no request is sent.
  const [settled] = useDebouncedValue(smoothing, SMOOTHING_DELAY_MS);
  const latest = useRef(names);
  const latestSmoothing = useRef(settled);
  // Before the paint: the points come the sooner.
  useLayoutEffect(() => {
    latest.current = names;
    latestSmoothing.current = settled;
  });

  useLayoutEffect(() => {
    const made = new SeriesStore(
      (wanted, span, smoothBy) =>
        readSeries(wanted, { x, maxPoints, span, smoothing: smoothBy }),
      maxPoints,
      setView,
      latestSmoothing.current,
    );
    store.current = made;
    made.want(latest.current);
    const leave = [
      hub.listen(({ kind, trial_id: trial }) => {
        if (trial === null || !latest.current.some((name) => name.trialId === trial)) return;
        if (kind === "metrics" || kind === "validation") made.note(trial);
        else if (kind === "attempt_started") made.note(trial, true);
      }),
      hub.onResync(() => made.noteAll()),
    ];
    return () => {
      for (const one of leave) one();
      made.close();
      setView(NOTHING);
    };
  }, [x, maxPoints]);

  useEffect(() => store.current?.smoothBy(settled), [settled, x, maxPoints]);

  const ids = names.map(seriesId).join("\n");
  useLayoutEffect(() => store.current?.want(latest.current), [ids, x, maxPoints]);

  const origins = useMemo(() => (x === "time" ? originsOf(view.points) : null), [x, view]);
  const min = zoom?.min;
  const max = zoom?.max;
  const origin = origins === null ? 0 : Math.min(...origins.values());
  useEffect(() => {
    const span = min === undefined || max === undefined ? null : withOrigin({ min, max }, origin);
    const timer = setTimeout(() => void store.current?.lookAt(span), ZOOM_DELAY_MS);
    return () => clearTimeout(timer);
  }, [min, max, origin, x, maxPoints, view.isPending]);

  const series = useMemo(
    () =>
      names.map((name) => {
        const points = view.points.get(seriesId(name));
        if (points === undefined || origins === null) return points;
        const from = origins.get(name.trialId) ?? 0;
        return { ...points, xs: points.xs.map((at) => at - from) };
      }),
    [names, view, origins],
  );
  return { series, isPending: view.isPending, error: view.error };
}

/** Return when each trial's first point was reported. */
function originsOf(points: ReadonlyMap<string, Points>): Map<number, number> {
  const origins = new Map<number, number>();
  for (const [id, { xs }] of points) {
    const trial = Number(id.slice(0, id.indexOf("/")));
    const first = xs[0];
    if (first !== undefined) origins.set(trial, Math.min(first, origins.get(trial) ?? Infinity));
  }
  return origins;
}

function withOrigin({ min, max }: Span, origin: number): Span {
  return Number.isFinite(origin) ? { min: min + origin, max: max + origin } : { min, max };
}
