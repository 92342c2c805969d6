/** Histograms: one as bars, and those of many steps as a heat map. */

import { Text, useComputedColorScheme } from "@mantine/core";
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { useMemo } from "react";

import { mediaQuery, type MediaOf } from "../../api/media";
import { EChart } from "../../charts/EChart";
import { scaleColor } from "../../charts/palette";
import { commonBins, type Histogram, histogramOf, spread } from "../../lib/media";
import { formatNumber, formatPercent } from "../../lib/numbers";
import classes from "./Media.module.css";

const WIDTH = 400;
const HEIGHT = 120;
/** Steps and bins of the heat map. */
const MOST_STEPS = 100;
const NUM_BINS = 40;
const NUM_LABELS = 6;
const HEAT_HEIGHT = 220;

/** The bars' areas are as the counts, also where bins differ in width. */
export function HistogramBars({ histogram, label }: { histogram: Histogram; label: string }) {
  const { edges, counts } = histogram;
  const low = edges[0] ?? 0;
  const high = edges.at(-1) ?? low;
  const scale = high > low ? WIDTH / (high - low) : 0;
  const bars = counts.map((count, i) => {
    const from = edges[i] ?? low;
    const width = scale > 0 ? ((edges[i + 1] ?? from) - from) * scale : WIDTH / counts.length;
    const x = scale > 0 ? (from - low) * scale : i * width;
    return { x, width, density: width > 0 ? count / width : 0 };
  });
  const highest = bars.reduce((most, { density }) => Math.max(most, density), 0) || 1;
  const total = counts.reduce((sum, count) => sum + count, 0);
  const range = `${formatNumber(low)} to ${formatNumber(high)}`;
  return (
    <figure className={classes.histogram}>
      <svg
        viewBox={`0 0 ${WIDTH} ${HEIGHT}`}
        preserveAspectRatio="none"
        role="img"
        aria-label={`Histogram ${label}: ${formatNumber(total)} values from ${range}`}
      >
        {bars.map(({ x, width, density }, i) => (
          <rect
            key={i}
            x={x}
            y={HEIGHT - (density / highest) * HEIGHT}
            width={Math.max(width * 0.94, 0.4)}
            height={(density / highest) * HEIGHT}
          >
            <title>
              {`${formatNumber(edges[i])} to ${formatNumber(edges[i + 1])}: ${formatNumber(counts[i])}`}
            </title>
          </rect>
        ))}
      </svg>
      <figcaption>
        <span>{formatNumber(low)}</span>
        <span>{formatNumber(total)} values</span>
        <span>{formatNumber(high)}</span>
      </figcaption>
    </figure>
  );
}

interface OverStepsProps {
  of: MediaOf;
  steps: readonly number[];
  isVisible: boolean;
}

export function HistogramsOverSteps({ of, steps, isVisible }: OverStepsProps) {
  const isDark = useComputedColorScheme("light") === "dark";
  const chosen = useMemo(() => spread(steps, MOST_STEPS), [steps]);
  const { data } = useQuery({
    ...mediaQuery(of, chosen),
    enabled: isVisible,
    placeholderData: keepPreviousData,
  });
  const found = useMemo(
    () =>
      (data?.items ?? []).flatMap(({ steps_completed: step, value }) => {
        const histogram = histogramOf(value);
        return histogram === null ? [] : [{ step, histogram }];
      }),
    [data],
  );
  const options = useMemo(() => heatOptions(found, isDark), [found, isDark]);
  if (found.length < 2) return null;
  return (
    <>
      <EChart
        label={`${of.name} over ${found.length} steps`}
        options={options}
        height={HEAT_HEIGHT}
      />
      {chosen.length < steps.length && (
        <Text size="xs" c="dimmed">
          {chosen.length} of {steps.length.toLocaleString("en-US")} steps, spread evenly.
        </Text>
      )}
    </>
  );
}

interface AtStep {
  step: number;
  histogram: Histogram;
}

function heatOptions(found: readonly AtStep[], isDark: boolean): object {
  const { edges, shares } = commonBins(
    found.map(({ histogram }) => histogram),
    NUM_BINS,
  );
  const cells = shares.flatMap((one, i) =>
    one.flatMap((share, j) => (share > 0 ? [[i, j, share]] : [])),
  );
  const text = isDark ? "#a3abb8" : "#59616d";
  const axis = (data: string[]) => ({
    type: "category",
    data,
    axisLabel: { color: text, interval: Math.floor(data.length / NUM_LABELS) },
    axisTick: { show: false },
  });
  return {
    animation: false,
    grid: { left: 56, right: 8, top: 8, bottom: 24 },
    tooltip: {
      formatter: ({ value: [i, j, share] }: { value: [number, number, number] }) =>
        `step ${formatNumber(found[i]?.step)}, ${formatNumber(edges[j])} to ` +
        `${formatNumber(edges[j + 1])}: ${formatPercent(share)}`,
    },
    xAxis: axis(found.map(({ step }) => formatNumber(step))),
    yAxis: axis(edges.slice(0, -1).map((edge) => formatNumber(edge, 3))),
    visualMap: {
      show: false,
      min: 0,
      max: cells.reduce((most, [, , share]) => Math.max(most, share ?? 0), 0),
      inRange: { color: [0, 0.25, 0.5, 0.75, 1].map((share) => scaleColor(share, isDark)) },
    },
    series: [{ type: "heatmap", data: cells }],
  };
}
