/** The charts of a trial's metrics, one per quantity. */

import { Code, SimpleGrid, Text, useComputedColorScheme } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { type ReactNode, useMemo } from "react";

import { trialQuery } from "../../api/queries";
import { type SeriesName, useSeries } from "../../api/series";
import { ChartControls, zoomOf } from "../../charts/ChartControls";
import { CurveCard } from "../../charts/CurveCard";
import { type Curve, smoothingSteps } from "../../charts/curves";
import { lineStyle } from "../../charts/palette";
import { ProblemView, Waiting } from "../../components/Feedback";
import { chartsOf, lastStep, type MetricName, numericMetrics, xChoices } from "../../lib/metrics";
import type { MetricsSearch } from "../../lib/search";

interface MetricGridProps {
  trialId: number;
  search: MetricsSearch;
  isWanted: (group: string) => boolean;
  empty: ReactNode;
}

export function MetricGrid({ trialId, search, isWanted, empty }: MetricGridProps) {
  const trial = useQuery(trialQuery(trialId)).data;
  const isDark = useComputedColorScheme("light") === "dark";
  const summary = trial?.summary;
  const names = useMemo(() => numericMetrics(summary ?? {}, isWanted), [summary, isWanted]);
  const x = search.x ?? "batches";
  const requests = useMemo<SeriesName[]>(
    () => names.map(({ group, metric }) => ({ trialId, group, metric })),
    [names, trialId],
  );
  const smoothing = smoothingSteps(search.smooth ?? 0, lastStep(trial ? [trial] : []));
  const { series, isPending, error } = useSeries(requests, x, zoomOf(search), smoothing);
  const charts = useMemo(() => [...chartsOf(names)], [names]);
  if (names.length === 0) return empty;
  const curvesOf = (members: readonly MetricName[]): Curve[] =>
    members.flatMap((name, i): Curve[] => {
      const found = series[names.indexOf(name)];
      if (found === undefined || found.xs.length === 0) return [];
      const id = `${name.group}/${name.metric}`;
      return [
        {
          id,
          label: `${name.metric} (${name.group})`,
          ...found,
          ...lineStyle(i, isDark),
          width: 2,
        },
      ];
    });
  return (
    <>
      <ChartControls search={search} xNames={xChoices(names)} />
      {error !== undefined && <ProblemView error={error} />}
      {isPending && <Waiting what="metrics" />}
      {trial?.has_more_metrics && (
        <Text c="dimmed" size="sm">
          The first {names.length.toLocaleString("en")} metrics are drawn. All of them:{" "}
          <Code>paceline t metrics {trialId}</Code>
        </Text>
      )}
      <SimpleGrid cols={{ base: 1, lg: charts.length === 1 ? 1 : 2 }}>
        {charts.map(([title, members]) => (
          <CurveCard
            key={title}
            title={title}
            curves={curvesOf(members)}
            smoothing={smoothing}
            series={members.map(({ group, metric }) => ({ trialId, group, metric }))}
            search={search}
            syncKey={`trial-${trialId}`}
          />
        ))}
      </SimpleGrid>
    </>
  );
}
