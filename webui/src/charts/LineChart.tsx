/** Curves on a canvas: zoom by dragging, a double click shows all, cursors move together. */

import "uplot/dist/uPlot.min.css";

import { useComputedColorScheme } from "@mantine/core";
import { useElementSize } from "@mantine/hooks";
import { useEffect, useRef, useState } from "react";
import uPlot from "uplot";

import { formatNumber } from "../lib/numbers";
import { formatClock, formatDuration } from "../lib/times";
import { type Curve, nearestIndex, type Range, xRange, yRange } from "./curves";
import classes from "./LineChart.module.css";

export type XKind = "number" | "seconds";

interface LineChartProps {
  label: string;
  curves: readonly Curve[];
  xName: string;
  xKind?: XKind;
  isLog?: boolean;
  zoom?: Range | null;
  onZoom?: (zoom: Range | null) => void;
  syncKey?: string;
  height?: number;
  onPick?: (id: string) => void;
}

interface Hover {
  left: number;
  top: number;
  curve: Curve;
  x: number;
  y: number;
}

const NEAR_PIXELS = 40;
const FAINT = 0.3;
const HEIGHT = 260;

export function LineChart(props: LineChartProps) {
  if (props.curves.length > 0) return <Plot {...props} />;
  return (
    <div className={classes.empty} style={{ height: props.height ?? HEIGHT }}>
      No points yet
    </div>
  );
}

function Plot(props: LineChartProps) {
  const { label, curves, xKind = "number", isLog = false, zoom = null, height = HEIGHT } = props;
  const { ref: sizer, width } = useElementSize();
  const holder = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const [hover, setHover] = useState<Hover | null>(null);
  const scheme = useComputedColorScheme("light");
  const latest = useRef(props);
  useEffect(() => {
    latest.current = props;
  });

  // A chart is made anew when its lines' styles change, not when they grow.
  const styles = JSON.stringify(
    curves.map(({ id, color, dash, width: line, isFaint }) => [id, color, dash, line, isFaint]),
  );
  const count = curves.filter((one) => one.isFaint !== true).length;
  useEffect(() => {
    if (holder.current === null || width === 0) return;
    const made = new uPlot(
      optionsFor(
        latest,
        styles,
        { isLog, xKind, scheme, syncKey: props.syncKey, width, height },
        setHover,
      ),
      dataFor(latest.current.curves),
      holder.current,
    );
    plot.current = made;
    setScales(made, latest.current);
    return () => {
      made.destroy();
      plot.current = null;
      setHover(null);
    };
  }, [styles, isLog, xKind, scheme, props.syncKey, width === 0, height]); // eslint-disable-line react-hooks/exhaustive-deps

  useEffect(() => {
    if (width > 0) plot.current?.setSize({ width, height });
  }, [width, height]);

  useEffect(() => {
    const made = plot.current;
    if (made === null) return;
    made.batch(() => {
      made.setData(dataFor(curves), false);
      setScales(made, latest.current);
    });
  }, [curves, zoom?.min, zoom?.max, zoom]);

  return (
    <div ref={sizer} className={classes.frame} style={{ height }}>
      <div
        ref={holder}
        role="img"
        aria-label={`${label}: ${count} lines. The table shows the same numbers.`}
        className={props.onPick && hover ? classes.pickable : undefined}
        onClick={() => hover && props.onPick?.(hover.curve.id)}
      />
      {hover && <Tip hover={hover} width={width} xName={props.xName} xKind={xKind} />}
    </div>
  );
}

function Tip({
  hover,
  width,
  xName,
  xKind,
}: {
  hover: Hover;
  width: number;
  xName: string;
  xKind: XKind;
}) {
  const isRight = hover.left > width / 2;
  return (
    <div
      className={classes.tip}
      style={{
        top: Math.max(0, hover.top - 20),
        ...(isRight ? { right: width - hover.left + 14 } : { left: hover.left + 14 }),
      }}
    >
      <span style={{ color: hover.curve.color }}>●</span> {hover.curve.label}
      <br />
      <strong>{formatNumber(hover.y, 6)}</strong>{" "}
      <span className="quiet">
        at {xKind === "seconds" ? formatDuration(hover.x) : `${xName} ${formatNumber(hover.x, 7)}`}
      </span>
    </div>
  );
}

function dataFor(curves: readonly Curve[]): uPlot.AlignedData {
  // With `mode: 2` each line brings its own x; uPlot's types know the other mode only.
  return [null, ...curves.map(({ xs, ys }) => [xs, ys])] as unknown as uPlot.AlignedData;
}

function setScales(plot: uPlot, { curves, zoom, isLog = false }: LineChartProps): void {
  const all = xRange(curves) ?? { min: 0, max: 1 };
  const range = zoom ?? (all.min === all.max ? { min: all.min - 0.5, max: all.max + 0.5 } : all);
  plot.setScale("x", range);
  plot.setScale("y", yRange(curves, range, isLog));
}

interface Look {
  isLog: boolean;
  xKind: XKind;
  scheme: "light" | "dark";
  syncKey: string | undefined;
  width: number;
  height: number;
}

function optionsFor(
  latest: { current: LineChartProps },
  styles: string,
  look: Look,
  onHover: (hover: Hover | null) => void,
): uPlot.Options {
  const lines = JSON.parse(styles) as [
    string,
    string,
    number[] | null,
    number | null,
    boolean | null,
  ][];
  const text = look.scheme === "dark" ? "#a3abb8" : "#59616d";
  const grid = look.scheme === "dark" ? "#2a3039" : "#e8ebef";
  const axis = {
    stroke: text,
    font: "12px system-ui, sans-serif",
    grid: { stroke: grid, width: 1 },
    ticks: { stroke: grid, width: 1 },
  };
  const options = {
    mode: 2,
    width: look.width,
    height: look.height,
    legend: { show: false },
    padding: [10, 26, 0, 0],
    scales: {
      x: { time: false, auto: false },
      y: { auto: false, distr: look.isLog ? 3 : 1 },
    },
    axes: [
      {
        ...axis,
        size: 34,
        values: (_: uPlot, splits: number[]) =>
          splits.map((x) => (look.xKind === "seconds" ? shortDuration(x) : formatNumber(x, 6))),
      },
      {
        ...axis,
        size: 62,
        values: (_: uPlot, splits: (number | null)[]) =>
          splits.map((y) => (y === null ? "" : formatNumber(y, 3))),
      },
    ],
    cursor: {
      points: { show: false },
      drag: { x: true, y: false, setScale: false },
      dataIdx: () => null,
      ...(look.syncKey === undefined
        ? {}
        : { sync: { key: look.syncKey, scales: ["x", null], setSeries: false } }),
    },
    series: [
      null,
      ...lines.map(([, color, dash, width, isFaint]) => ({
        stroke: color,
        alpha: isFaint === true ? FAINT : 1,
        width: width ?? 1.5,
        dash: dash ?? undefined,
        points: { show: false },
        facets: [
          { scale: "x", auto: false },
          { scale: "y", auto: false },
        ],
        paths: lineOrDots(latest),
      })),
    ],
    hooks: {
      setCursor: [(plot: uPlot) => onHover(hoverOf(plot, latest.current.curves))],
      setSelect: [
        (plot: uPlot) => {
          if (plot.select.width < 4) return;
          const min = plot.posToVal(plot.select.left, "x");
          const max = plot.posToVal(plot.select.left + plot.select.width, "x");
          plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          latest.current.onZoom?.({ min, max });
        },
      ],
      ready: [
        (plot: uPlot) => {
          plot.over.addEventListener("dblclick", () => latest.current.onZoom?.(null));
          plot.over.addEventListener("mouseleave", () => onHover(null));
        },
      ],
    },
  };
  return options as unknown as uPlot.Options;
}

/** Draw lines; where a curve has a single point between gaps, a line would not show it. */
function lineOrDots(latest: { current: LineChartProps }): uPlot.Series.PathBuilder {
  const linear = uPlot.paths.linear?.();
  return (plot, index, from, to) => {
    const paths = linear?.(plot, index, from, to) ?? null;
    const curve = latest.current.curves[index - 1];
    if (paths === null || curve === undefined) return paths;
    const lonely = lonelyPoints(curve);
    if (lonely.length === 0) return paths;
    const dots = new Path2D(paths.stroke instanceof Path2D ? paths.stroke : undefined);
    const radius = 2 * devicePixelRatio;
    for (const i of lonely) {
      const x = plot.valToPos(curve.xs[i] ?? 0, "x", true);
      const y = plot.valToPos(curve.ys[i] ?? 0, "y", true);
      dots.moveTo(x + radius, y);
      dots.arc(x, y, radius, 0, 2 * Math.PI);
    }
    return { ...paths, stroke: dots };
  };
}

function lonelyPoints({ ys }: Curve): number[] {
  const found: number[] = [];
  const isGap = (y: number | null | undefined) => y === null || y === undefined;
  for (let i = 0; i < ys.length; i += 1)
    if (!isGap(ys[i]) && isGap(ys[i - 1]) && isGap(ys[i + 1])) found.push(i);
  return found;
}

function hoverOf(plot: uPlot, curves: readonly Curve[]): Hover | null {
  const { left = -1, top = -1 } = plot.cursor;
  if (left < 0) return null;
  const at = plot.posToVal(left, "x");
  let best: Hover | null = null;
  let nearest = NEAR_PIXELS;
  for (const curve of curves) {
    if (curve.isFaint === true) continue;
    const i = nearestIndex(curve.xs, at);
    const x = curve.xs[i];
    const y = curve.ys[i];
    if (x === undefined || y === null || y === undefined) continue;
    const pointLeft = plot.valToPos(x, "x");
    const pointTop = plot.valToPos(y, "y");
    const distance = Math.hypot((pointLeft - left) / 2, pointTop - top);
    if (distance < nearest) {
      nearest = distance;
      const { offsetLeft, offsetTop } = plot.over;
      best = { left: pointLeft + offsetLeft, top: pointTop + offsetTop, curve, x, y };
    }
  }
  return best;
}

function shortDuration(seconds: number): string {
  return seconds > 1e8 ? formatClock(seconds) : formatDuration(seconds);
}
