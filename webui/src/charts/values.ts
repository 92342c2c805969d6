/** One number of each run: as bars, or as a box for each group. */

import { formatNumber } from "../lib/numbers";
import { ink } from "./hyperparameters";

/** A row of the comparison with the numbers of its runs. */
export interface ValueRow {
  name: string;
  color: string;
  values: readonly { run: string; value: number }[];
}

/** The least, the lower quartile, the middle, the upper quartile and the greatest. */
export type Five = [number, number, number, number, number];

/** Return the five numbers of a box plot; between two values the quartiles lie on the line. */
export function fiveOf(values: readonly number[]): Five | null {
  if (values.length === 0) return null;
  const order = values.toSorted((a, b) => a - b);
  const at = (share: number) => {
    const place = share * (order.length - 1);
    const low = order[Math.floor(place)] ?? 0;
    return low + ((order[Math.ceil(place)] ?? low) - low) * (place % 1);
  };
  return [at(0), at(0.25), at(0.5), at(0.75), at(1)];
}

export function meanOf(values: readonly number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}

interface ValueOptions {
  rows: readonly ValueRow[];
  as: "bars" | "box";
  isLog: boolean;
  isDark: boolean;
  /** The name of the axis, for a picture that stands alone. */
  axisName?: string;
}

interface Hovered {
  name: string;
  dataIndex: number;
  seriesType: string;
  value: number | number[];
}

/** Return the options of a chart with rows from top to bottom. */
export function valueOptions({ rows, as, isLog, isDark, axisName }: ValueOptions): object {
  const { text, line } = ink(isDark);
  const names = rows.map(({ name }) => name);
  const isDrawn = (value: number) => !isLog || value > 0;
  const points = rows.flatMap(({ values }, row) =>
    values.flatMap(({ run, value }) =>
      isDrawn(value) ? [{ name: run, value: [value, row], itemStyle: { color: text } }] : [],
    ),
  );
  const boxes = rows.map(({ values, color }) => {
    const five = fiveOf(values.map(({ value }) => value).filter(isDrawn));
    return { value: five ?? [], itemStyle: { color: `${color}40`, borderColor: color } };
  });
  const bars = rows.map(({ values, color }) => {
    const mean = meanOf(values.map(({ value }) => value));
    return { value: values.length > 0 && isDrawn(mean) ? mean : null, itemStyle: { color } };
  });
  return {
    animation: false,
    grid: { left: 8, right: 16, top: 8, bottom: axisName ? 32 : 8, containLabel: true },
    tooltip: {
      confine: true,
      formatter: ({ name, dataIndex, seriesType, value }: Hovered) => {
        if (seriesType !== "boxplot") return `${encode(name)}: ${formatNumber([value].flat()[0])}`;
        const values = rows[dataIndex]?.values.map((one) => one.value) ?? [];
        const five = fiveOf(values)?.map((one) => formatNumber(one)) ?? [];
        return `${encode(name)}, ${values.length} runs: ${five.join(", ")}`;
      },
    },
    xAxis: {
      type: isLog ? "log" : "value",
      ...(axisName && { name: axisName, nameLocation: "middle", nameGap: 30 }),
      nameTextStyle: { color: text, fontSize: 14 },
      // Bars that do not begin at 0 lie.
      scale: as === "box",
      axisLabel: { color: text, hideOverlap: true, formatter: (v: number) => formatNumber(v, 4) },
      splitLine: { lineStyle: { color: line, opacity: 0.4 } },
    },
    yAxis: {
      type: "category",
      inverse: true,
      data: names,
      axisLine: { lineStyle: { color: line } },
      axisLabel: { color: text, width: 130, overflow: "truncate", hideOverlap: true },
    },
    series:
      as === "bars"
        ? [{ type: "bar", data: bars, barMaxWidth: 22 }]
        : [
            { type: "boxplot", data: boxes, boxWidth: [6, 26] },
            { type: "scatter", data: points, symbolSize: 5 },
          ],
  };
}

/** Return a text as ECharts' tooltips take it, which are HTML. */
function encode(text: string): string {
  return text.replace(/[&<>"']/g, (mark) => `&#${mark.charCodeAt(0)};`);
}
