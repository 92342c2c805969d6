/** One chart with its title, legend, table and download. */

import { Group, Text, Title } from "@mantine/core";
import { type ReactNode, useMemo } from "react";

import { csvAddress, type SeriesName } from "../api/series";
import { downloadFrom } from "../lib/download";
import { formatNumber, plural } from "../lib/numbers";
import { Scroll } from "../components/Scroll";
import { formatDuration } from "../lib/times";
import type { MetricsSearch } from "../lib/search";
import { useSearchChange, zoomOf, zoomSearch } from "./ChartControls";
import { type Curve, numClipped, type Range, withAverages } from "./curves";
import { DownloadMenu } from "./DownloadMenu";
import { LineChart } from "./LineChart";
import type { Picture } from "./picture";

const LEGEND_ENTRIES = 8;
const TABLE_ROWS = 500;

interface CurveCardProps {
  title: string;
  curves: readonly Curve[];
  /** What the curves show, for the download. */
  series: readonly SeriesName[];
  /** The extent of the moving average in batches, null for none. */
  smoothing: number | null;
  search: MetricsSearch;
  syncKey: string;
  height?: number;
  onPick?: (id: string) => void;
  legendNote?: string;
  /** What is not drawn. */
  note?: string;
  isWaiting?: boolean;
  /** Buttons beside the title. */
  actions?: ReactNode;
  /** Zooms this chart alone; by default all charts of the page. */
  onZoom?: (zoom: Range | null) => void;
}

export function CurveCard(props: CurveCardProps) {
  const { title, curves, series, smoothing, search, syncKey, height, onPick, legendNote, actions } =
    props;
  const { note, isWaiting = false, onZoom } = props;
  const change = useSearchChange();
  const xName = search.x ?? "batches";
  const shown = useMemo(
    () => (smoothing === null ? curves : withAverages(curves)),
    [curves, smoothing],
  );
  const zoom = zoomOf(search);
  const picture: Picture = {
    title,
    xName,
    curves: shown,
    isLog: search.log,
    isLogX: search.logx,
    doesClip: search.clip,
    zoom,
  };
  const clipped = search.clip ? numClipped(shown, zoom, search.log === true) : 0;
  return (
    <section className="card curve-card" aria-label={title}>
      <Group justify="space-between" wrap="nowrap" mb={4}>
        <Title order={2} size="h5" className="wrap-anywhere">
          {title}
        </Title>
        <Group gap={2} wrap="nowrap">
          {actions}
          <DownloadMenu
            title={title}
            csvName="CSV, every point"
            onCsv={() => downloadFrom(`${title}.csv`, csvAddress(series, xName))}
            drawn={async () => (await import("./picture")).svgOf(picture)}
          />
        </Group>
      </Group>
      {legendNote ? (
        <Text size="xs" c="dimmed" mb={4}>
          {legendNote}
        </Text>
      ) : (
        <Legend curves={curves} />
      )}
      {smoothing !== null && (
        <Text size="xs" c="dimmed" mb={4}>
          Averages over about {formatNumber(Number(smoothing.toPrecision(2)))} batches
          {search.table ? "" : "; reported values are faint"}
        </Text>
      )}
      {note !== undefined && (
        <Text size="xs" c="dimmed" mb={4} className="wrap-anywhere">
          {note}
        </Text>
      )}
      {clipped > 0 && (
        <Text size="xs" c="dimmed" mb={4}>
          {plural(clipped, "outlier")} beyond the edges
        </Text>
      )}
      {search.table ? (
        <CurveTable curves={curves} xName={xName} title={title} isSmoothed={smoothing !== null} />
      ) : (
        <LineChart
          label={title}
          isWaiting={isWaiting}
          {...picture}
          xKind={xName === "time" ? "seconds" : "number"}
          onZoom={onZoom ?? ((next) => change(zoomSearch(next), true))}
          syncKey={syncKey}
          height={height}
          onPick={onPick}
        />
      )}
    </section>
  );
}

function Legend({ curves }: { curves: readonly Curve[] }) {
  if (curves.length > LEGEND_ENTRIES) return null;
  return (
    <Group
      gap="2px 16px"
      mb={4}
      component="ul"
      style={{ listStyle: "none", padding: 0, margin: 0 }}
    >
      {curves.map(({ id, label, color, dash }) => (
        <li
          key={id}
          style={{ display: "flex", alignItems: "center", gap: 6, fontSize: "0.8125rem" }}
        >
          <LineMark color={color} dash={dash} />
          <span className="wrap-anywhere">{label}</span>
        </li>
      ))}
    </Group>
  );
}

export function LineMark({ color, dash }: Pick<Curve, "color" | "dash">) {
  return (
    <svg width="22" height="8" aria-hidden>
      <line
        x1="0"
        y1="4"
        x2="22"
        y2="4"
        stroke={color}
        strokeWidth="3"
        strokeDasharray={dash?.join(" ")}
      />
    </svg>
  );
}

function CurveTable({
  curves,
  xName,
  title,
  isSmoothed,
}: {
  curves: readonly Curve[];
  xName: string;
  title: string;
  isSmoothed: boolean;
}) {
  const rows = useMemo(
    () =>
      curves.flatMap(({ label, xs, ys, smoothed }) =>
        xs.map((x, i) => ({ label, x, y: ys[i], average: smoothed?.[i] })),
      ),
    [curves],
  );
  return (
    <Scroll label={`Table of ${title}`} style={{ maxHeight: 320, overflowY: "auto" }}>
      <table className="plain-table" aria-label={title}>
        <thead>
          <tr>
            <th>Series</th>
            <th className="number">{xName}</th>
            <th className="number">Value</th>
            {isSmoothed && <th className="number">Average</th>}
          </tr>
        </thead>
        <tbody>
          {rows.slice(-TABLE_ROWS).map((row, i) => (
            <tr key={i}>
              <td>{row.label}</td>
              <td className="number">
                {xName === "time" ? formatDuration(row.x) : formatNumber(row.x, 7)}
              </td>
              <td className="number">{formatNumber(row.y, 7)}</td>
              {isSmoothed && <td className="number">{formatNumber(row.average, 7)}</td>}
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > TABLE_ROWS && (
        <Text size="xs" c="dimmed" p={8}>
          The last {TABLE_ROWS} of {formatNumber(rows.length)} points drawn; the download has every
          point.
        </Text>
      )}
    </Scroll>
  );
}
