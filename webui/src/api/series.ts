/** Metric series: what is drawn as curves. */

import { useDebouncedValue } from "@mantine/hooks";
import { useEffect, useMemo, useRef, useState } from "react";

import { hub } from "../live/hub";
import {
  type Points,
  type ReadPoints,
  seriesId,
  type SeriesName,
  SeriesStore,
  type SeriesView,
  type Span,
} from "../live/seriesStore";
import { api, unwrap } from "./client";

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

function reader(x: string, maxPoints: number): ReadPoints {
  return async (wanted, span, smoothing) => {
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
  };
}

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
  useEffect(() => {
    latest.current = names;
    latestSmoothing.current = settled;
  });

  useEffect(() => {
    const made = new SeriesStore(reader(x, maxPoints), maxPoints, setView, latestSmoothing.current);
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
  useEffect(() => store.current?.want(latest.current), [ids, x, maxPoints]);

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
