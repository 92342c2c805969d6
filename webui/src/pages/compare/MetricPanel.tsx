/** The panel of one metric: a line for each run, or for each group with its spread. */

import { ActionIcon, Title, Tooltip, useComputedColorScheme } from "@mantine/core";
import { IconEyeOff, IconPin, IconPinnedOff } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { memo, useEffect, useMemo, useState } from "react";

import { groupsQuery } from "../../api/queries";
import type { components } from "../../api/schema";
import { type SeriesName, useSeries } from "../../api/series";
import { useSearchChange, zoomOf } from "../../charts/ChartControls";
import { CurveCard } from "../../charts/CurveCard";
import { type Curve, smoothingSteps } from "../../charts/curves";
import { lineStyle } from "../../charts/palette";
import { ProblemView } from "../../components/Feedback";
import { plural } from "../../lib/numbers";
import type { Panel } from "../../lib/panels";
import type { Row } from "../../lib/runs";
import type { CompareSearch } from "../../lib/search";
import classes from "./Compare.module.css";

/** What is scrolled past quickly is neither read nor drawn. */
const READY_MS = 80;
const NAMED = 3;
const FEW_LINES = 12;

interface MetricPanelProps {
  panel: Panel;
  rows: readonly Row[];
  search: CompareSearch;
}

export const MetricPanel = memo(function MetricPanel(props: MetricPanelProps) {
  const [isReady, setReady] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setReady(true), READY_MS);
    return () => clearTimeout(timer);
  }, []);
  if (!isReady)
    return (
      <section className={`card ${classes.waiting}`} aria-label={props.panel.title}>
        <Title order={2} size="h5" className="wrap-anywhere">
          {props.panel.title}
        </Title>
      </section>
    );
  return props.search.group === undefined ? <RunPanel {...props} /> : <GroupPanel {...props} />;
});

/** Return the extent of the average, which is the same in all panels. */
function smoothingOf(rows: readonly Row[], search: CompareSearch): number | null {
  const last = rows.flatMap(({ runs }) => runs.map(({ trial }) => trial.steps_completed));
  return smoothingSteps(search.smooth ?? 0, Math.max(1, ...last));
}

function namesIn(rows: readonly Row[], { group, metric }: Panel): SeriesName[] {
  return rows.flatMap(({ runs }) => runs.map(({ id }) => ({ trialId: id, group, metric })));
}

function RunPanel({ panel, rows, search }: MetricPanelProps) {
  const requests = useMemo(() => namesIn(rows, panel), [rows, panel]);
  const smoothing = smoothingOf(rows, search);
  const x = search.x ?? "batches";
  const { series, isPending, error } = useSeries(requests, x, zoomOf(search), smoothing);
  const found = useMemo(
    () => series.map((one) => (one === undefined || one.xs.length === 0 ? null : one)),
    [series],
  );
  const curves = useCurves(rows, search, found);
  return (
    <Drawn
      {...{ panel, rows, search, curves, smoothing, error }}
      series={requests}
      isWaiting={isPending}
    />
  );
}

function GroupPanel({ panel, rows, search }: MetricPanelProps) {
  const { group, metric } = panel;
  const smoothing = smoothingOf(rows, search);
  const zoom = zoomOf(search);
  const answer = useQuery(
    groupsQuery({
      group,
      name: metric,
      groups: rows.map(({ runs }) => runs.map(({ id }) => id)),
      max_points: 300,
      x: search.x ?? "batches",
      x_min: zoom?.min,
      x_max: zoom?.max,
      smoothing_steps: smoothing,
    }),
  );
  const requests = useMemo(() => namesIn(rows, panel), [rows, panel]);
  const found = useMemo(
    () => rows.map((row, i) => groupCurve(row, answer.data?.groups[i], search.spread)),
    [rows, answer.data, search.spread],
  );
  const curves = useCurves(rows, search, found);
  return (
    <Drawn
      {...{ panel, rows, search, curves, smoothing }}
      error={answer.error ?? undefined}
      series={requests}
      isWaiting={answer.isPending}
    />
  );
}

type Found = (Pick<Curve, "xs" | "ys"> & Partial<Curve>) | null;

function groupCurve(
  { name, runs }: Row,
  found: components["schemas"]["GroupCurve"] | undefined,
  spread: CompareSearch["spread"],
): Found {
  if (found === undefined || found.x.length === 0) return null;
  const { x: xs, means: ys, counts, num_trials: numTrials } = found;
  const apart = (sign: number) => ys.map((y, i) => y + sign * (found.deviations[i] ?? 0));
  const ends = {
    range: { lows: found.lows, highs: found.highs },
    std: { lows: apart(-1), highs: apart(1) },
    none: { lows: ys, highs: ys },
  }[spread ?? "range"];
  const label = numTrials < runs.length ? `${name} (${numTrials} of ${runs.length} runs)` : name;
  return { xs, ys, band: { ...ends, counts }, label };
}

function useCurves(rows: readonly Row[], search: CompareSearch, found: readonly Found[]): Curve[] {
  const isDark = useComputedColorScheme("light") === "dark";
  const { base } = search;
  return useMemo(
    () =>
      rows.flatMap((row, i): Curve[] => {
        const one = found[i];
        if (one === null || one === undefined) return [];
        const width = row.key === base ? 3.5 : rows.length > FEW_LINES ? 1.25 : 2;
        return [{ id: row.key, label: row.name, ...lineStyle(row.place, isDark), width, ...one }];
      }),
    [rows, base, isDark, found],
  );
}

interface DrawnProps extends MetricPanelProps {
  curves: Curve[];
  series: SeriesName[];
  smoothing: number | null;
  error: unknown;
  isWaiting: boolean;
}

function Drawn({ panel, rows, search, curves, series, smoothing, error, isWaiting }: DrawnProps) {
  if (error !== undefined) return <ProblemView error={error} />;
  const drawn = new Set(curves.map(({ id }) => id));
  const missing = isWaiting ? [] : rows.filter(({ key }) => !drawn.has(key));
  return (
    <div style={{ minWidth: 0 }}>
      <CurveCard
        title={panel.title}
        curves={curves}
        series={series}
        smoothing={search.group === undefined ? smoothing : null}
        search={search}
        syncKey="compare"
        height={240}
        note={
          missing.length > 0 && curves.length > 0
            ? `${curves.length} of ${rows.length} drawn. No points of ${listed(missing)}`
            : undefined
        }
        isWaiting={isWaiting}
        actions={<PanelActions panel={panel} search={search} />}
      />
    </div>
  );
}

function listed(rows: readonly Row[]): string {
  const names = rows.slice(0, NAMED).map(({ name }) => name);
  const more = rows.length - names.length;
  return `${names.join("; ")}${more > 0 ? ` and ${plural(more, "other")}` : ""}`;
}

function PanelActions({
  panel: { id, title },
  search,
}: Pick<MetricPanelProps, "panel" | "search">) {
  const change = useSearchChange();
  const { pinned = [], hidden = [] } = search;
  const isPinned = pinned.includes(id);
  const rest = pinned.filter((one) => one !== id);
  const next = isPinned ? rest : [...rest, id];
  const pinLabel = isPinned ? `Unpin ${title}` : `Pin ${title}`;
  return (
    <>
      <Tooltip label={isPinned ? "Unpin" : "Pin to the top"}>
        <ActionIcon
          variant="subtle"
          color="gray"
          aria-label={pinLabel}
          onClick={() => change({ pinned: next.length > 0 ? next : undefined })}
        >
          {isPinned ? <IconPinnedOff size={16} /> : <IconPin size={16} />}
        </ActionIcon>
      </Tooltip>
      <Tooltip label="Hide">
        <ActionIcon
          variant="subtle"
          color="gray"
          aria-label={`Hide ${title}`}
          onClick={() =>
            change({ hidden: [...hidden, id], pinned: rest.length > 0 ? rest : undefined })
          }
        >
          <IconEyeOff size={16} />
        </ActionIcon>
      </Tooltip>
    </>
  );
}
