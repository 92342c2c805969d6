/** Charts as pictures for papers and slides: in light colours, whatever the page has. */

import { BarChart, BoxplotChart, CustomChart, LineChart, ScatterChart } from "echarts/charts";
import { GridComponent, LegendComponent } from "echarts/components";
import { init, use as register } from "echarts/core";
import { SVGRenderer } from "echarts/renderers";

import { formatNumber } from "../lib/numbers";
import { formatDuration } from "../lib/times";
import { type Curve, type Range, xRange, yRange } from "./curves";
import { lightColor } from "./palette";

register([
  BarChart,
  BoxplotChart,
  CustomChart,
  LineChart,
  ScatterChart,
  GridComponent,
  LegendComponent,
  SVGRenderer,
]);

export interface Picture {
  title: string;
  xName: string;
  curves: readonly Curve[];
  isLog?: boolean;
  isLogX?: boolean;
  doesClip?: boolean;
  zoom: Range | null;
}

const WIDTH = 720;
const PLOT_HEIGHT = 400;
const LEGEND_ROW = 22;
/** Pixels of a PNG for each of the picture: enough for print. */
const PNG_SCALE = 3;
const TEXT = "#1f2328";
const GRID = "#e3e6ea";
const FONT = "Helvetica, Arial, sans-serif";

/** Return curves as the text of an SVG file. */
export function svgOf(picture: Picture): string {
  const named = namedCurves(picture.curves);
  const height = PLOT_HEIGHT + LEGEND_ROW * Math.ceil(named.length / 2);
  return svgOfOptions(optionsOf(picture, named), height);
}

/** Return a chart of ECharts as the text of an SVG file. */
export function svgOfOptions(options: object, height = PLOT_HEIGHT): string {
  const chart = init(null, null, { renderer: "svg", ssr: true, width: WIDTH, height });
  chart.setOption({ backgroundColor: "#ffffff", ...options });
  const text = chart.renderToSVGString({ useViewBox: true });
  chart.dispose();
  return text;
}

/** Return an SVG file as a PNG file. */
export async function pngOf(svg: string): Promise<Blob> {
  const address = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
  try {
    const image = new Image();
    image.src = address;
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = WIDTH * PNG_SCALE;
    canvas.height = (canvas.width * image.naturalHeight) / image.naturalWidth;
    canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
    return await new Promise((done, fail) =>
      canvas.toBlob((file) => (file ? done(file) : fail(new Error("no picture"))), "image/png"),
    );
  } finally {
    URL.revokeObjectURL(address);
  }
}

/** Return the curves of the legend: what was reported stands faint behind an average. */
function namedCurves(curves: readonly Curve[]): readonly Curve[] {
  return curves.filter((one) => one.isFaint !== true);
}

function optionsOf(picture: Picture, named: readonly Curve[]): Record<string, unknown> {
  const { title, xName, curves, isLog = false, isLogX = false, doesClip, zoom } = picture;
  const x = zoom ?? xRange(curves, isLogX) ?? { min: 0, max: 1 };
  const y = yRange(curves, x, isLog, doesClip);
  const axis = {
    nameLocation: "middle",
    nameTextStyle: { color: TEXT, fontFamily: FONT, fontSize: 14 },
    axisLine: { show: true, lineStyle: { color: TEXT }, onZero: false },
    splitLine: { lineStyle: { color: GRID } },
  };
  const label = { color: TEXT, fontFamily: FONT, fontSize: 12, showMinLabel: false };
  return {
    animation: false,
    grid: { left: 76, right: 24, top: 20, height: PLOT_HEIGHT - 76 },
    legend: {
      top: PLOT_HEIGHT,
      data: named.map(({ id }) => id),
      formatter: (id: string) => named.find((one) => one.id === id)?.label ?? id,
      textStyle: { color: TEXT, fontFamily: FONT, fontSize: 13, width: 280, overflow: "truncate" },
    },
    xAxis: {
      ...axis,
      ...x,
      type: isLogX ? "log" : "value",
      name: xName,
      nameGap: 30,
      axisLabel: {
        ...label,
        showMaxLabel: false,
        formatter: (at: number) => (xName === "time" ? formatDuration(at) : formatNumber(at, 6)),
      },
    },
    yAxis: {
      ...axis,
      ...y,
      type: isLog ? "log" : "value",
      name: title,
      nameGap: 56,
      axisLabel: { ...label, showMaxLabel: false, formatter: (at: number) => formatNumber(at, 3) },
    },
    series: [
      ...curves.filter((one) => one.band !== undefined && one.isFaint !== true).map(bandOf),
      ...curves.map(lineOf),
    ],
  };
}

function lineOf(curve: Curve): object {
  const { id, xs, ys, color, dash, width = 1.5, isFaint = false } = curve;
  const own = lightColor(color);
  const isPoint = ys.filter((y) => y !== null).length === 1;
  return {
    type: "line",
    name: id,
    data: xs.map((x, i) => [x, ys[i]]),
    showSymbol: isPoint,
    symbol: "circle",
    itemStyle: { color: own },
    lineStyle: {
      color: own,
      width,
      type: dash?.length ? [...dash] : "solid",
      opacity: isFaint ? 0.3 : 1,
    },
  };
}

function bandOf({ xs, band, color }: Curve): object {
  interface Axes {
    coord: (point: number[]) => number[];
  }
  const edge = [
    ...xs.map((x, i) => [x, band?.lows[i] ?? 0]),
    ...xs.map((x, i) => [x, band?.highs[i] ?? 0]).reverse(),
  ];
  return {
    type: "custom",
    silent: true,
    clip: true,
    data: [0],
    // One shape for the whole spread, so it is drawn with the only item.
    renderItem: (_: unknown, { coord }: Axes) => ({
      type: "polygon",
      shape: { points: edge.map((point) => coord(point)) },
      style: { fill: lightColor(color), opacity: 0.18 },
    }),
  };
}
