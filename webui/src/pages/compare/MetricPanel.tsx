/** The panel of one or several metrics: a line for each run, or for each group with its spread. */

import { ActionIcon, Title, useComputedColorScheme } from "@mantine/core";
import { IconAdjustments, IconEyeOff, IconPin, IconPinnedOff } from "@tabler/icons-react";
import { useQueries, type UseQueryResult } from "@tanstack/react-query";
import { memo, Suspense, useMemo, useState } from "react";

import { groupsQuery } from "../../api/queries";
import type { components } from "../../api/schema";
import { type SeriesName, useSeries } from "../../api/series";
import { useSearchChange, zoomOf, zoomSearch } from "../../charts/ChartControls";
import { CurveCard } from "../../charts/CurveCard";
import { type Curve, type Range, smoothingSteps } from "../../charts/curves";
import { metricLineStyle } from "../../charts/palette";
import { ProblemView, Waiting } from "../../components/Feedback";
import { plural } from "../../lib/numbers";
import { lazyPage } from "../../lib/lazyPage";
import type { Panel } from "../../lib/panels";
import { isStill, useReady } from "../../lib/ready";
import type { Row } from "../../lib/runs";
import type { CompareSearch } from "../../lib/search";
import classes from "./Compare.module.css";
import { PanelDialog } from "./PanelDialog";

const ValuePanel = lazyPage(() => import("./ValuePanel"), "ValuePanel");

/** What is scrolled past quickly is neither read nor drawn. */
const READY_MS = 80;
const isInPlace = () => isStill(READY_MS);
const NAMED = 3;
const FEW_LINES = 12;
/** Quantiles below the middle that a spread shows, with the opposite ones. */
const QUANTILES: Record<string, number> = { quartiles: 0.25, deciles: 0.1 };

interface MetricPanelProps {
  panel: Panel;
  rows: readonly Row[];
  search: CompareSearch;
  /** All metrics that a panel can draw, and those that its x axis can be. */
  known: readonly Panel[];
  xNames: readonly string[];
}

export const MetricPanel = memo(function MetricPanel(props: MetricPanelProps) {
  const { panel, search } = props;
  const [zoom, setZoom] = useState<Range | null>(null);
  // Here, as the dialog changes which of the components below is shown.
  const [isOpen, setOpen] = useState(false);
  const hasOwnX = panel.x !== undefined && panel.x !== (search.x ?? "batches");
  // A zoom along another axis means nothing to the other panels.
  const own = useMemo(
    () => (hasOwnX ? { ...search, x: panel.x, ...zoomSearch(zoom) } : search),
    [hasOwnX, panel.x, search, zoom],
  );
  if (!useReady(READY_MS, isInPlace))
    return (
      <section className={`card ${classes.waiting}`} aria-label={panel.title}>
        <Title order={2} size="h5" className="wrap-anywhere">
          {panel.title}
        </Title>
      </section>
    );
  const onDialog = () => setOpen(true);
  const shown = { ...props, onDialog, search: own, onZoom: hasOwnX ? setZoom : undefined };
  return (
    <>
      {isOpen && (
        <PanelDialog
          {...props}
          changes={search.panels ?? {}}
          onClose={() => setOpen(false)}
        />
      )}
      {panel.as !== undefined ? (
        <Suspense fallback={<Waiting what={panel.title} />}>
          <ValuePanel {...props} actions={<PanelActions {...shown} />} />
        </Suspense>
      ) : search.group === undefined ? (
        <RunPanel {...shown} />
      ) : (
        <GroupPanel {...shown} />
      )}
    </>
  );
});

interface ShownProps extends MetricPanelProps {
  onDialog: () => void;
  onZoom?: (zoom: Range | null) => void;
}

/** Return the extent of the average, which is the same in all panels. */
function smoothingOf(rows: readonly Row[], search: CompareSearch): number | null {
  const last = rows.flatMap(({ runs }) => runs.map(({ trial }) => trial.steps_completed));
  return smoothingSteps(search.smooth ?? 0, Math.max(1, ...last));
}

function namesIn(rows: readonly Row[], { metrics }: Panel): SeriesName[] {
  return metrics.flatMap(({ group, metric }) =>
    rows.flatMap(({ runs }) => runs.map(({ id }) => ({ trialId: id, group, metric }))),
  );
}

function RunPanel(props: ShownProps) {
  const { panel, rows, search } = props;
  const requests = useMemo(() => namesIn(rows, panel), [rows, panel]);
  const smoothing = smoothingOf(rows, search);
  const x = search.x ?? "batches";
  const { series, isPending, error } = useSeries(requests, x, zoomOf(search), smoothing);
  const found = useMemo(
    () => series.map((one) => (one === undefined || one.xs.length === 0 ? null : one)),
    [series],
  );
  return (
    <Drawn {...props} {...{ found, smoothing, error }} series={requests} isWaiting={isPending} />
  );
}

type Groups = components["schemas"]["GroupCurve"][];

function combined(answers: UseQueryResult<Groups>[]) {
  return {
    replies: answers.map(({ data }) => data),
    error: answers.find(({ isError }) => isError)?.error ?? undefined,
    isPending: answers.some(({ isPending }) => isPending),
  };
}

function GroupPanel(props: ShownProps) {
  const { panel, rows, search } = props;
  const smoothing = smoothingOf(rows, search);
  const zoom = zoomOf(search);
  const { replies, error, isPending } = useQueries({
    queries: panel.metrics.map(({ group, metric }) =>
      groupsQuery(
        { group, name: metric },
        {
          groups: rows.map(({ runs }) => runs.map(({ id }) => id)),
          max_points: 300,
          x: search.x ?? "batches",
          x_min: zoom?.min,
          x_max: zoom?.max,
          smoothing_steps: smoothing,
          quantile: QUANTILES[search.spread ?? ""],
        },
      ),
    ),
    combine: combined,
  });
  const requests = useMemo(() => namesIn(rows, panel), [rows, panel]);
  const found = useMemo(
    () =>
      replies.flatMap((reply) => rows.map((row, i) => groupCurve(row, reply?.[i], search))),
    [rows, replies, search],
  );
  return (
    <Drawn {...props} {...{ found, smoothing, error }} series={requests} isWaiting={isPending} />
  );
}

type Found = (Pick<Curve, "xs" | "ys"> & Partial<Curve>) | null;

function groupCurve(
  { name, runs }: Row,
  found: components["schemas"]["GroupCurve"] | undefined,
  { spread }: CompareSearch,
): Found {
  if (found === undefined || found.x.length === 0) return null;
  const { x: xs, means: ys, counts, lows, highs, num_trials: numTrials } = found;
  const apart = (sign: number) => ys.map((y, i) => y + sign * (found.deviations[i] ?? 0));
  const ends =
    spread === "std"
      ? { lows: apart(-1), highs: apart(1) }
      : spread === "none"
        ? { lows: ys, highs: ys }
        : { lows, highs };
  const label = numTrials < runs.length ? `${name} (${numTrials} of ${runs.length} runs)` : name;
  return { xs, ys, band: { ...ends, counts }, label };
}

/** A line of a panel: a metric of a row. */
interface Line {
  id: string;
  label: string;
  row: Row;
  metric: number;
}

/** Return the lines of a panel, in the order in which their series are read. */
function linesOf(rows: readonly Row[], { metrics }: Panel): Line[] {
  return metrics.flatMap(({ id, title }, metric) =>
    rows.map((row) => ({
      id: metric === 0 ? row.key : `${row.key}\n${id}`,
      label: metrics.length > 1 ? `${row.name}: ${title}` : row.name,
      row,
      metric,
    })),
  );
}

function useCurves(
  lines: readonly Line[],
  { base }: CompareSearch,
  found: readonly Found[],
): Curve[] {
  const isDark = useComputedColorScheme("light") === "dark";
  return useMemo(
    () =>
      lines.flatMap(({ id, label, row, metric }, i): Curve[] => {
        const one = found[i];
        if (one === null || one === undefined) return [];
        const width = row.key === base ? 3.5 : lines.length > FEW_LINES ? 1.25 : 2;
        const style = metricLineStyle(row.place, metric, isDark);
        const own = one.label === undefined ? label : label.replace(row.name, one.label);
        return [{ ...style, width, ...one, id, label: own }];
      }),
    [lines, base, isDark, found],
  );
}

interface DrawnProps extends ShownProps {
  found: readonly Found[];
  series: SeriesName[];
  smoothing: number | null;
  error: unknown;
  isWaiting: boolean;
}

function Drawn(props: DrawnProps) {
  const { panel, rows, search, found, series, smoothing, error, isWaiting, onZoom } = props;
  const lines = useMemo(() => linesOf(rows, panel), [rows, panel]);
  const curves = useCurves(lines, search, found);
  if (error !== undefined) return <ProblemView error={error} />;
  const drawn = new Set(curves.map(({ id }) => id));
  const missing = isWaiting ? [] : lines.filter(({ id }) => !drawn.has(id));
  return (
    <div style={{ minWidth: 0 }}>
      <CurveCard
        title={panel.title}
        curves={curves}
        series={series}
        smoothing={search.group === undefined ? smoothing : null}
        search={search}
        // The cursors of panels with the same x axis move together.
        syncKey={`compare ${search.x ?? "batches"}`}
        height={240}
        note={
          missing.length > 0 && curves.length > 0
            ? `${curves.length} of ${lines.length} drawn. No points of ${listed(missing)}`
            : undefined
        }
        isWaiting={isWaiting}
        actions={<PanelActions {...props} />}
        onZoom={onZoom}
      />
    </div>
  );
}

function listed(lines: readonly Line[]): string {
  const names = lines.slice(0, NAMED).map(({ label }) => label);
  const more = lines.length - names.length;
  return `${names.join("; ")}${more > 0 ? ` and ${plural(more, "other")}` : ""}`;
}

function PanelActions({ panel, search, onDialog }: ShownProps) {
  const change = useSearchChange();
  const { id, title } = panel;
  const { pinned = [], hidden = [] } = search;
  const isPinned = pinned.includes(id);
  const rest = pinned.filter((one) => one !== id);
  const next = isPinned ? rest : [...rest, id];
  const pinLabel = isPinned ? `Unpin ${title}` : `Pin ${title}`;
  return (
    <>
      <ActionIcon
        variant="subtle"
        color="gray"
        title="How it is drawn, metrics, x axis"
        aria-label={`Metrics and x axis of ${title}`}
        onClick={onDialog}
      >
        <IconAdjustments size={16} />
      </ActionIcon>
      <ActionIcon
        variant="subtle"
        color="gray"
        title={isPinned ? "Unpin" : "Pin to the top"}
        aria-label={pinLabel}
        onClick={() => change({ pinned: next.length > 0 ? next : undefined })}
      >
        {isPinned ? <IconPinnedOff size={16} /> : <IconPin size={16} />}
      </ActionIcon>
      <ActionIcon
        variant="subtle"
        color="gray"
        title="Hide"
        aria-label={`Hide ${title}`}
        onClick={() =>
          change({ hidden: [...hidden, id], pinned: rest.length > 0 ? rest : undefined })
        }
      >
        <IconEyeOff size={16} />
      </ActionIcon>
    </>
  );
}
