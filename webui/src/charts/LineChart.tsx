/** Curves on a canvas: zoom by dragging, a double click shows all, cursors move together. */

import "uplot/dist/uPlot.min.css";

import { useComputedColorScheme } from "@mantine/core";
import { useEffect, useRef, useState } from "react";
import uPlot from "uplot";

import { formatNumber, plural } from "../lib/numbers";
import { formatClock, formatDuration } from "../lib/times";
import { useWidth } from "../lib/width";
import { type Curve, nearestIndex, type Range, xRange, yRange } from "./curves";
import classes from "./LineChart.module.css";

export type XKind = "number" | "seconds";

interface LineChartProps {
  label: string;
  curves: readonly Curve[];
  xName: string;
  xKind?: XKind;
  isLog?: boolean;
  isLogX?: boolean;
  /** Whether the y axis leaves out outliers. */
  doesClip?: boolean;
  zoom?: Range | null;
  onZoom?: (zoom: Range | null) => void;
  syncKey?: string;
  height?: number;
  /** Whether points are still on their way. */
  isWaiting?: boolean;
  onPick?: (id: string) => void;
}

interface HoverRow {
  curve: Curve;
  index: number;
  y: number;
}

/** All curves at a place; `near` is the one under the cursor. */
interface Hover {
  left: number;
  top: number;
  x: number;
  rows: HoverRow[];
  near: HoverRow | null;
}

const NEAR_PIXELS = 40;
const MOST_HOVERED = 12;
const MOST_TIP_PIXELS = 420;
const FAINT = 0.3;
const HEIGHT = 260;

export function LineChart(props: LineChartProps) {
  if (props.curves.length > 0) return <Plot {...props} />;
  return (
    <div className={classes.empty} style={{ height: props.height ?? HEIGHT }}>
      {props.isWaiting ? "Loading …" : "No points yet"}
    </div>
  );
}

function Plot(props: LineChartProps) {
  const { label, curves, xKind = "number", isLog = false, zoom = null, height = HEIGHT } = props;
  const { isLogX = false, doesClip = false } = props;
  const { ref: sizer, width } = useWidth();
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
        { isLog, isLogX, xKind, scheme, syncKey: props.syncKey, width, height },
        setHover,
      ),
      dataFor(latest.current),
      holder.current,
    );
    plot.current = made;
    setScales(made, latest.current);
    return () => {
      made.destroy();
      plot.current = null;
      setHover(null);
    };
  }, [styles, isLog, isLogX, xKind, scheme, props.syncKey, width === 0, height]); // eslint-disable-line react-hooks/exhaustive-deps

  useEffect(() => {
    if (width > 0) plot.current?.setSize({ width, height });
  }, [width, height]);

  useEffect(() => {
    const made = plot.current;
    if (made === null) return;
    made.batch(() => {
      made.setData(dataFor(latest.current), false);
      setScales(made, latest.current);
    });
  }, [curves, zoom?.min, zoom?.max, zoom, doesClip]);

  return (
    <div ref={sizer} className={classes.frame} style={{ height }}>
      <div
        ref={holder}
        role="img"
        aria-label={`${label}: ${count} lines. The table shows the same numbers.`}
        className={props.onPick && hover?.near ? classes.pickable : undefined}
        onClick={() => hover?.near && props.onPick?.(hover.near.curve.id)}
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
  const room = (isRight ? hover.left : width - hover.left) - 14;
  const { x, rows, near } = hover;
  // Those around the one under the cursor; rows fall by value.
  const at = near === null ? 0 : rows.indexOf(near);
  const from = Math.max(0, Math.min(at - MOST_HOVERED / 2, rows.length - MOST_HOVERED));
  const shown = rows.slice(from, from + MOST_HOVERED);
  return (
    <div
      className={classes.tip}
      style={{
        top: 4,
        maxWidth: Math.max(room, Math.min(MOST_TIP_PIXELS, width - 28)),
        ...(isRight ? { right: width - hover.left + 14 } : { left: hover.left + 14 }),
      }}
    >
      <span className="quiet">
        {xKind === "seconds" ? formatDuration(x) : `${xName} ${formatNumber(x, 7)}`}
      </span>
      {shown.map((row) => (
        <div key={row.curve.id} className={classes.row} data-near={row === near || undefined}>
          <span style={{ color: row.curve.color }}>●</span>
          <span className={classes.name}>{row.curve.label}</span>
          <strong>{formatNumber(row.y, 6)}</strong>
          {row.curve.band && <span className="quiet">{spreadAt(row.curve.band, row.index)}</span>}
        </div>
      ))}
      {rows.length > shown.length && (
        <span className="quiet">{rows.length - shown.length} more lines</span>
      )}
    </div>
  );
}

function spreadAt({ lows, highs, counts }: NonNullable<Curve["band"]>, i: number): string {
  return `${formatNumber(lows[i], 4)} to ${formatNumber(highs[i], 4)}, ${plural(counts[i] ?? 0, "run")}`;
}

function dataFor({ curves, isLogX = false }: LineChartProps): uPlot.AlignedData {
  const shown = ({ xs, ys }: Curve) => {
    // A logarithm has no place for what is not positive; `xs` rises.
    const from = isLogX ? xs.findIndex((x) => x > 0) : 0;
    if (from === 0) return [xs, ys];
    return from < 0 ? [[], []] : [xs.slice(from), ys.slice(from)];
  };
  // With `mode: 2` each line brings its own x; uPlot's types know the other mode only.
  return [null, ...curves.map(shown)] as unknown as uPlot.AlignedData;
}

function setScales(plot: uPlot, props: LineChartProps): void {
  const { curves, zoom, isLog = false, isLogX = false, doesClip } = props;
  const all = xRange(curves, isLogX) ?? (isLogX ? { min: 1, max: 10 } : { min: 0, max: 1 });
  const whole = isLogX
    ? { min: all.min * 0.9, max: all.max * 1.1 }
    : { min: all.min - 0.5, max: all.max + 0.5 };
  const isZoomed = zoom !== null && zoom !== undefined && !(isLogX && zoom.min <= 0);
  const range = isZoomed ? zoom : all.min === all.max ? whole : all;
  plot.setScale("x", range);
  plot.setScale("y", yRange(curves, range, isLog, doesClip));
}

/** Draw the spreads of groups behind all lines. */
function drawBands(plot: uPlot, { curves, isLog = false, isLogX = false }: LineChartProps): void {
  const { ctx, bbox } = plot;
  const place = (y: number) => plot.valToPos(isLog ? Math.max(y, Number.MIN_VALUE) : y, "y", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  for (const { xs, band, color, isFaint } of curves) {
    if (band === undefined || isFaint === true) continue;
    const area = new Path2D();
    const places = xs.flatMap((x, i) => (isLogX && x <= 0 ? [] : [i]));
    for (const i of places)
      area.lineTo(plot.valToPos(xs[i] ?? 0, "x", true), place(band.highs[i] ?? 0));
    for (const i of places.reverse())
      area.lineTo(plot.valToPos(xs[i] ?? 0, "x", true), place(band.lows[i] ?? 0));
    ctx.globalAlpha = 0.18;
    ctx.fillStyle = color;
    ctx.fill(area);
  }
  ctx.restore();
}

interface Look {
  isLog: boolean;
  isLogX: boolean;
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
      x: { time: false, auto: false, distr: look.isLogX ? 3 : 1 },
      y: { auto: false, distr: look.isLog ? 3 : 1 },
    },
    axes: [
      {
        ...axis,
        size: 34,
        values: (_: uPlot, splits: (number | null)[]) =>
          splits.map((x: number | null) => {
            if (x === null) return "";
            return look.xKind === "seconds" ? shortDuration(x) : formatNumber(x, 6);
          }),
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
      drawAxes: [(plot: uPlot) => drawBands(plot, latest.current)],
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
          followFingers(plot);
        },
      ],
    },
  };
  return options as unknown as uPlot.Options;
}

const MOUSE = { pointerdown: "mousedown", pointermove: "mousemove", pointerup: "mouseup" } as const;

/** Let a finger that moves sideways zoom as a mouse does; up or down it scrolls the page. */
function followFingers(plot: uPlot): void {
  const tell = (type: string, { clientX, clientY }: PointerEvent) =>
    // uPlot overlooks a move of no length, which is what a finger's are told to be.
    plot.over.dispatchEvent(
      new MouseEvent(type, { clientX, clientY, movementX: 1, bubbles: true }),
    );
  for (const [type, asMouse] of Object.entries(MOUSE))
    plot.over.addEventListener(type as keyof typeof MOUSE, (event) => {
      if (event.pointerType === "touch") tell(asMouse, event);
    });
  plot.over.addEventListener("pointercancel", (event) => {
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    tell("mouseup", event);
    tell("mouseleave", event);
  });
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
  const near = { row: null as HoverRow | null, distance: NEAR_PIXELS };
  const rows: HoverRow[] = [];
  for (const curve of curves) {
    if (curve.isFaint === true) continue;
    const { xs, ys } = curve;
    const index = nearestIndex(xs, at);
    const x = xs[index];
    const y = ys[index];
    if (x === undefined || y === null || y === undefined) continue;
    const across = Math.abs(plot.valToPos(x, "x") - left);
    // A curve that has ended, or not begun, has no value here.
    if (across > NEAR_PIXELS && (at < (xs[0] ?? 0) || at > (xs.at(-1) ?? 0))) continue;
    const row = { curve, index, y };
    rows.push(row);
    const distance = Math.hypot(across / 2, plot.valToPos(y, "y") - top);
    if (top >= 0 && distance < near.distance) {
      near.row = row;
      near.distance = distance;
    }
  }
  const first = near.row ?? rows[0];
  if (first === undefined) return null;
  rows.sort((a, b) => b.y - a.y);
  const x = first.curve.xs[first.index] ?? at;
  return { left: left + plot.over.offsetLeft, top, x, rows, near: near.row };
}

function shortDuration(seconds: number): string {
  return seconds > 1e8 ? formatClock(seconds) : formatDuration(seconds);
}
