/** The charts of a trial's metrics, one per quantity; only those in sight are read and drawn. */

import { SimpleGrid, Text, useComputedColorScheme } from "@mantine/core";
import { useMediaQuery } from "@mantine/hooks";
import { useQuery } from "@tanstack/react-query";
import { useWindowVirtualizer } from "@tanstack/react-virtual";
import { type ReactNode, useCallback, useMemo, useState } from "react";

import { metricNamesQuery, trialQuery } from "../../api/queries";
import { type Series, type SeriesName, useSeries } from "../../api/series";
import type { Trial } from "../../api/types";
import { ChartControls, zoomOf, zoomSearch } from "../../charts/ChartControls";
import { ChartFilter } from "../../charts/ChartFilter";
import { CurveCard } from "../../charts/CurveCard";
import { type Curve, type Range, smoothingSteps } from "../../charts/curves";
import { lineStyle } from "../../charts/palette";
import { Empty, ProblemView, Waiting } from "../../components/Feedback";
import { freshAttempt } from "../../lib/attempts";
import {
  chartsOf,
  lastStep,
  matchingCharts,
  type MetricName,
  numericMetrics,
  xAxesOf,
  xChoices,
} from "../../lib/metrics";
import type { MetricsSearch } from "../../lib/search";
import { whyEnded } from "./Attempts";

type Chart = [title: string, members: MetricName[]];

interface MetricGridProps {
  trialId: number;
  search: MetricsSearch;
  isWanted: (group: string) => boolean;
  empty: ReactNode;
}

/** With fewer charts one sees at once which there are. */
const FEW_CHARTS = 6;
const CARD_HEIGHT = 350;
const ROW_GAP = 16;

export function MetricGrid({ trialId, search, isWanted, empty }: MetricGridProps) {
  const trial = useQuery(trialQuery(trialId)).data;
  const names = useNames(trial, isWanted);
  const charts = useMemo<Chart[]>(() => [...chartsOf(names)], [names]);
  const xNames = useMemo(() => xChoices(names), [names]);
  const axes = useMemo(() => xAxesOf(charts, names, search.x), [charts, names, search.x]);
  const matching = useMemo(() => matchingCharts(charts, search.q ?? ""), [charts, search.q]);
  if (trial === undefined || names.length === 0) return empty;
  return (
    <>
      <ChartControls search={search} xNames={xNames} isXChosen={axes.isChosen} />
      <Superseded trial={trial} />
      {(charts.length > FEW_CHARTS || search.q !== undefined) && (
        <ChartFilter value={search.q ?? ""} numShown={matching.length} numAll={charts.length} />
      )}
      {charts.length > 0 && matching.length === 0 && (
        <Empty title="No metric matches">Change or clear the filter.</Empty>
      )}
      <ChartRows
        trial={trial}
        charts={matching}
        numSeries={names.length}
        search={{ ...search, x: axes.shared }}
        ownX={axes.own}
      />
    </>
  );
}

/** Says why curves end before the batches that the trial had reached once. */
function Superseded({ trial }: { trial: Trial }) {
  const fresh = freshAttempt(trial);
  const before = trial.attempts?.at(-2);
  if (fresh === null || before === undefined) return null;
  const why = whyEnded(before);
  return (
    <Text size="sm" c="dimmed" mb="sm" role="note">
      Attempt {fresh.number} began again from the beginning, as there was no checkpoint. The points
      of attempt {before.number}
      {why && ` (${why})`} are not drawn.
    </Text>
  );
}

/** Return the trial's metrics: the names come apart where there are too many for its summary. */
function useNames(trial: Trial | undefined, isWanted: (group: string) => boolean): MetricName[] {
  const hasMore = trial?.has_more_metrics === true;
  const all = useQuery({
    ...metricNamesQuery(trial?.experiment_id ?? 0),
    enabled: hasMore,
  }).data;
  const summary = trial?.summary;
  return useMemo(
    () =>
      hasMore && all !== undefined
        ? all.filter(({ group }) => isWanted(group))
        : numericMetrics(summary ?? {}, isWanted),
    [summary, isWanted, hasMore, all],
  );
}

interface ChartRowsProps {
  trial: Trial;
  charts: readonly Chart[];
  /** How many metrics the page has in all. */
  numSeries: number;
  search: MetricsSearch;
  /** The x axes of charts that have another one than the page. */
  ownX: ReadonlyMap<string, string>;
}

function ChartRows({ trial, charts, numSeries, search, ownX }: ChartRowsProps) {
  const isDark = useComputedColorScheme("light") === "dark";
  const isWide = useMediaQuery("(min-width: 75em)", true, { getInitialValueInEffect: false });
  const numColumns = isWide && charts.length > 1 ? 2 : 1;
  const [top, setTop] = useState(0);
  const place = useCallback((list: HTMLDivElement | null) => {
    if (list !== null) setTop(list.getBoundingClientRect().top + window.scrollY);
  }, []);
  const virtual = useWindowVirtualizer({
    count: Math.ceil(charts.length / numColumns),
    estimateSize: () => CARD_HEIGHT,
    gap: ROW_GAP,
    overscan: 1,
    scrollMargin: top,
    initialRect: { width: window.innerWidth, height: window.innerHeight },
    getItemKey: (index) => charts[index * numColumns]?.[0] ?? index,
  });
  const rows = virtual.getVirtualItems();
  const first = (rows[0]?.index ?? 0) * numColumns;
  const end = ((rows.at(-1)?.index ?? -1) + 1) * numColumns;
  const trialId = trial.id;
  const requests = useMemo<SeriesName[]>(
    () =>
      charts
        .slice(first, end)
        .filter(([title]) => !ownX.has(title))
        .flatMap(([, members]) => members.map(({ group, metric }) => ({ trialId, group, metric }))),
    [charts, first, end, trialId, ownX],
  );
  const x = search.x ?? "batches";
  const smoothing = smoothingSteps(search.smooth ?? 0, lastStep([trial]));
  const answer = useSeries(requests, x, zoomOf(search), smoothing, numSeries);
  const byName = new Map(requests.map((one, i) => [nameId(one), answer.series[i]]));
  const isFirstRead = answer.isPending && answer.series.every((one) => one === undefined);
  return (
    <>
      {answer.error !== undefined && <ProblemView error={answer.error} />}
      {isFirstRead && requests.length > 0 && <Waiting what="metrics" />}
      <div ref={place} style={{ position: "relative", height: virtual.getTotalSize() }}>
        {rows.map((row) => (
          <div
            key={row.key}
            ref={virtual.measureElement}
            data-index={row.index}
            style={{
              position: "absolute",
              top: 0,
              left: 0,
              right: 0,
              transform: `translateY(${row.start - top}px)`,
            }}
          >
            <SimpleGrid cols={numColumns}>
              {charts
                .slice(row.index * numColumns, (row.index + 1) * numColumns)
                .map(([title, members]) =>
                  ownX.has(title) ? (
                    <OwnAxisCard
                      key={title}
                      {...{ title, members, trialId, smoothing, search }}
                      x={ownX.get(title) ?? x}
                    />
                  ) : (
                    <CurveCard
                      key={title}
                      title={title}
                      curves={curvesOf(members, byName, isDark)}
                      smoothing={smoothing}
                      series={members.map(({ group, metric }) => ({ trialId, group, metric }))}
                      search={search}
                      syncKey={`trial-${trialId}`}
                      isWaiting={answer.isPending}
                    />
                  ),
                )}
            </SimpleGrid>
          </div>
        ))}
      </div>
    </>
  );
}

interface OwnAxisCardProps {
  title: string;
  members: readonly MetricName[];
  trialId: number;
  smoothing: number | null;
  search: MetricsSearch;
  x: string;
}

/** A chart with another x axis than the page: a zoom along it means nothing to the others. */
function OwnAxisCard({ title, members, trialId, smoothing, search, x }: OwnAxisCardProps) {
  const isDark = useComputedColorScheme("light") === "dark";
  const [zoom, setZoom] = useState<Range | null>(null);
  const series = useMemo(
    () => members.map(({ group, metric }) => ({ trialId, group, metric })),
    [members, trialId],
  );
  const answer = useSeries(series, x, zoom, smoothing);
  if (answer.error !== undefined) return <ProblemView error={answer.error} />;
  const byName = new Map(series.map((one, i) => [nameId(one), answer.series[i]]));
  return (
    <CurveCard
      {...{ title, series, smoothing }}
      curves={curvesOf(members, byName, isDark)}
      search={{ ...search, x, ...zoomSearch(zoom) }}
      syncKey={`trial-${trialId} ${x}`}
      isWaiting={answer.isPending}
      onZoom={setZoom}
    />
  );
}

function nameId({ group, metric }: MetricName): string {
  return `${group}/${metric}`;
}

function curvesOf(
  members: readonly MetricName[],
  byName: ReadonlyMap<string, Series | undefined>,
  isDark: boolean,
): Curve[] {
  return members.flatMap((name, i): Curve[] => {
    const id = nameId(name);
    const found = byName.get(id);
    if (found === undefined || found.xs.length === 0) return [];
    const label = `${name.metric} (${name.group})`;
    return [{ id, label, ...found, ...lineStyle(i, isDark), width: 2 }];
  });
}
