/** ECharts options for hyperparameters and one metric. */

import type { HparamAxis, HparamRow, HparamTable } from "../api/types";
import { formatNumber, formatValue, toNumber } from "../lib/numbers";
import { compareValues } from "../lib/sorting";
import { scaleColor } from "./palette";

/** Intervals chosen on one axis of the parallel coordinates. */
export interface Brush {
  axis: number;
  intervals: readonly (readonly [number, number])[];
}

const BINS = 8;

/** Return a row's metric, null where it has no finite one. */
export function metricOf(row: HparamRow): number | null {
  const value = toNumber(row.metric);
  return value !== null && Number.isFinite(value) ? value : null;
}

function isNumeric(axis: HparamAxis, rows: readonly HparamRow[]): boolean {
  return (
    axis.type !== "categorical" &&
    rows.every(({ hparams }) => {
      const value = toNumber(hparams[axis.name]);
      return value === null || Number.isFinite(value);
    }) &&
    rows.some(({ hparams }) => toNumber(hparams[axis.name]) !== null)
  );
}

function categories(axis: HparamAxis, rows: readonly HparamRow[]): string[] {
  const values = new Map<string, unknown>();
  for (const { hparams } of rows)
    values.set(formatValue(hparams[axis.name]).slice(0, 60), hparams[axis.name]);
  // By value: as texts, "1.00e-5" would come behind "0.01".
  return [...values].sort(([, a], [, b]) => compareValues(a, b, false)).map(([name]) => name);
}

function valueOn(axis: HparamAxis, row: HparamRow, names: readonly string[] | null): number | null {
  const value = row.hparams[axis.name];
  return names === null ? toNumber(value) : names.indexOf(formatValue(value).slice(0, 60));
}

/** Return how good each row is, from 0 to 1 by rank; null without a metric. */
function goodness(table: HparamTable): Map<number, number> {
  const known = table.rows
    .flatMap((row) => {
      const metric = metricOf(row);
      return metric === null ? [] : [{ id: row.trial_id, metric }];
    })
    .sort((a, b) => (table.smaller_is_better ? b.metric - a.metric : a.metric - b.metric));
  return new Map(known.map(({ id }, i) => [id, known.length > 1 ? i / (known.length - 1) : 1]));
}

export function ink(isDark: boolean) {
  return isDark ? { text: "#a3abb8", line: "#3a424d" } : { text: "#59616d", line: "#c9ced6" };
}

/** Return the rows that lie in one interval of each brushed axis. */
export function brushedRows(
  rows: readonly HparamRow[],
  axes: readonly HparamAxis[],
  brushes: readonly Brush[],
): HparamRow[] {
  const tests = brushes.map(({ axis, intervals }) => {
    const found = axes[axis];
    const names = found && !isNumeric(found, rows) ? categories(found, rows) : null;
    return (row: HparamRow) => {
      const value = found ? valueOn(found, row, names) : metricOf(row);
      return value !== null && intervals.some(([low, high]) => value >= low && value <= high);
    };
  });
  return rows.filter((row) => tests.every((test) => test(row)));
}

export function parallelOptions(table: HparamTable, isDark: boolean, isLog: boolean): object {
  const { axes, rows } = table;
  const { text, line } = ink(isDark);
  const names = axes.map((axis) => (isNumeric(axis, rows) ? null : categories(axis, rows)));
  const good = goodness(table);
  const look = {
    nameTextStyle: { color: text, fontSize: 12 },
    axisLine: { lineStyle: { color: line, width: 1.5 } },
    axisTick: { lineStyle: { color: line } },
    // Read over the lines that cross them.
    z: 10,
    axisLabel: {
      color: text,
      textBorderColor: isDark ? "#1a1e24" : "#ffffff",
      textBorderWidth: 4,
      formatter: (value: number | string) => formatValue(value),
    },
    areaSelectStyle: {
      width: 18,
      borderWidth: 1,
      borderColor: "#5682de",
      color: "#5682de",
      opacity: 0.3,
    },
  };
  const drawn = rows
    .filter((row) => metricOf(row) !== null)
    .sort((a, b) => (good.get(a.trial_id) ?? 0) - (good.get(b.trial_id) ?? 0));
  return {
    animation: false,
    parallel: { left: 60, right: 70, top: 50, bottom: 30 },
    parallelAxis: [
      ...axes.map((axis, dim) => {
        const found = names[dim];
        return {
          dim,
          name: axis.name,
          ...(found
            ? { type: "category", data: found }
            : { type: axis.is_log ? "log" : "value", scale: true, logBase: 10 }),
          ...look,
        };
      }),
      {
        dim: axes.length,
        name: table.metric.name,
        type: isLog && drawn.every((row) => (metricOf(row) ?? 0) > 0) ? "log" : "value",
        scale: true,
        // The good end is at the top.
        inverse: table.smaller_is_better,
        nameLocation: table.smaller_is_better ? "start" : "end",
        ...look,
      },
    ],
    series: [
      {
        type: "parallel",
        smooth: false,
        inactiveOpacity: 0.04,
        activeOpacity: 1,
        data: drawn.map((row) => {
          const share = good.get(row.trial_id) ?? 0;
          return {
            name: `Trial ${row.trial_id}`,
            value: [
              ...axes.map((axis, i) => {
                const found = names[i];
                return found ? found[valueOn(axis, row, found) ?? 0] : valueOn(axis, row, null);
              }),
              metricOf(row),
            ],
            lineStyle: {
              color: scaleColor(share, isDark),
              width: share === 1 ? 3 : 1.2,
              opacity: 0.5 + 0.5 * share,
            },
          };
        }),
      },
    ],
  };
}

function axisOptions(axis: HparamAxis, rows: readonly HparamRow[], isDark: boolean): object {
  const { text, line } = ink(isDark);
  const look = {
    name: axis.name,
    nameLocation: "middle",
    nameGap: 28,
    nameTextStyle: { color: text, fontSize: 12 },
    axisLine: { lineStyle: { color: line } },
    splitLine: { lineStyle: { color: line, opacity: 0.4 } },
    axisLabel: {
      color: text,
      hideOverlap: true,
      formatter: (v: number | string) => formatValue(v),
    },
  };
  return isNumeric(axis, rows)
    ? { ...look, type: axis.is_log ? "log" : "value", scale: true }
    : { ...look, type: "category", data: categories(axis, rows) };
}

export function scatterOptions(
  table: HparamTable,
  axis: HparamAxis,
  isDark: boolean,
  isLog: boolean,
): object {
  const { text, line } = ink(isDark);
  const { rows } = table;
  const names = isNumeric(axis, rows) ? null : categories(axis, rows);
  const good = goodness(table);
  const points = rows.flatMap((row) => {
    const metric = metricOf(row);
    const value = valueOn(axis, row, names);
    if (metric === null || value === null || (isLog && metric <= 0)) return [];
    const color = scaleColor(good.get(row.trial_id) ?? 0, isDark);
    return [{ value: [value, metric], name: `Trial ${row.trial_id}`, itemStyle: { color } }];
  });
  return {
    animation: false,
    grid: { left: 62, right: 16, top: 28, bottom: 46 },
    tooltip: {
      formatter: ({ name, value }: { name: string; value: [number, number] }) =>
        `${name}: ${formatNumber(value[1])}`,
    },
    xAxis: axisOptions(axis, rows, isDark),
    yAxis: {
      type: isLog ? "log" : "value",
      scale: true,
      name: table.metric.name,
      nameTextStyle: { color: text, align: "left" },
      axisLabel: { color: text, formatter: (v: number) => formatNumber(v, 4) },
      splitLine: { lineStyle: { color: line, opacity: 0.4 } },
    },
    series: [{ type: "scatter", symbolSize: 9, data: points }],
  };
}

interface Bins {
  labels: string[];
  indexOf: (row: HparamRow) => number | null;
}

/** Cut an axis into equal parts (of the logarithm for a log axis), or into its categories. */
export function binsOf(axis: HparamAxis, rows: readonly HparamRow[]): Bins {
  if (!isNumeric(axis, rows)) {
    const labels = categories(axis, rows);
    return { labels, indexOf: (row) => valueOn(axis, row, labels) };
  }
  const bend = (value: number) => (axis.is_log ? Math.log10(value) : value);
  const unbend = (value: number) => (axis.is_log ? 10 ** value : value);
  const values = rows.flatMap((row) => toNumber(row.hparams[axis.name]) ?? []).map(bend);
  const min = Math.min(...values);
  const max = Math.max(...values);
  const count = max > min ? Math.min(BINS, new Set(values).size) : 1;
  const width = (max - min) / count || 1;
  return {
    labels: Array.from({ length: count }, (_, i) =>
      formatNumber(unbend(min + (i + 0.5) * width), 2),
    ),
    indexOf: (row) => {
      const value = toNumber(row.hparams[axis.name]);
      return value === null ? null : Math.min(count - 1, Math.floor((bend(value) - min) / width));
    },
  };
}

export function heatOptions(
  table: HparamTable,
  x: HparamAxis,
  y: HparamAxis,
  isDark: boolean,
  isLog: boolean,
): object {
  const { text, line } = ink(isDark);
  const across = binsOf(x, table.rows);
  const up = binsOf(y, table.rows);
  const sums = new Map<string, { i: number; j: number; sum: number; count: number }>();
  for (const row of table.rows) {
    const metric = metricOf(row);
    const i = across.indexOf(row);
    const j = up.indexOf(row);
    if (metric === null || i === null || j === null || (isLog && metric <= 0)) continue;
    const cell = sums.get(`${i} ${j}`) ?? { i, j, sum: 0, count: 0 };
    sums.set(`${i} ${j}`, { i, j, sum: cell.sum + metric, count: cell.count + 1 });
  }
  const cells = [...sums.values()].map(({ i, j, sum, count }) => {
    const mean = sum / count;
    return { value: [i, j, isLog ? Math.log10(mean) : mean], mean, count };
  });
  const colored = cells.map(({ value }) => value[2] ?? 0);
  const shares = [0, 0.25, 0.5, 0.75, 1].map((share) => scaleColor(share, isDark));
  const look = (name: string, data: string[]) => ({
    type: "category",
    name,
    data,
    nameLocation: "middle",
    nameTextStyle: { color: text, fontSize: 12 },
    axisLine: { lineStyle: { color: line } },
    axisLabel: { color: text, hideOverlap: true },
  });
  return {
    animation: false,
    grid: { left: 70, right: 16, top: 10, bottom: 84 },
    tooltip: {
      formatter: ({ data }: { data: { mean: number; count: number } }) =>
        `mean ${formatNumber(data.mean)} of ${data.count}`,
    },
    xAxis: { ...look(x.name, across.labels), nameGap: 26 },
    yAxis: { ...look(y.name, up.labels), nameGap: 52 },
    visualMap: {
      min: Math.min(...colored),
      max: Math.max(...colored),
      orient: "horizontal",
      left: "center",
      bottom: 0,
      itemHeight: 120,
      itemWidth: 12,
      text: [
        formatNumber(Math.max(...cells.map(({ mean }) => mean)), 3),
        `${table.metric.name} ${formatNumber(Math.min(...cells.map(({ mean }) => mean)), 3)}`,
      ],
      textStyle: { color: text },
      formatter: (value: number) => formatNumber(value, 3),
      inRange: { color: table.smaller_is_better ? shares.toReversed() : shares },
    },
    series: [{ type: "heatmap", data: cells }],
  };
}
