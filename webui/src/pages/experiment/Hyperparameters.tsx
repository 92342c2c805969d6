import { Group, MultiSelect, SegmentedControl, Stack, Switch, Text } from "@mantine/core";
import { useComputedColorScheme } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams, useSearch } from "@tanstack/react-router";
import { type ReactNode, useMemo } from "react";

import { experimentQuery, hyperparametersQuery } from "../../api/queries";
import type { HparamAxis, HparamTable } from "../../api/types";
import { useSearchChange } from "../../charts/ChartControls";
import { EChart } from "../../charts/EChart";
import {
  brushedRows,
  type Brush,
  heatOptions,
  metricOf,
  parallelOptions,
  scatterOptions,
} from "../../charts/hyperparameters";
import { Empty, ProblemView, Waiting } from "../../components/Feedback";
import { LinkText } from "../../components/links";
import { Scroll } from "../../components/Scroll";
import { formatNumber, formatValue, plural } from "../../lib/numbers";
import type { Brushes } from "../../lib/search";
import { compareValues } from "../../lib/sorting";

const MOST_AXES = 10;
const MOST_PAIRS = 12;
const TABLE_ROWS = 200;
const METRIC_AXIS = "";

export function Hyperparameters() {
  const { id } = useParams({ from: "/experiments/$id" });
  const experiment = useQuery(experimentQuery(id)).data;
  const answer = useQuery(hyperparametersQuery(id));
  if (answer.isPending || !experiment) return <Waiting what="hyperparameters" />;
  if (answer.isError)
    return <ProblemView error={answer.error} onRetry={() => void answer.refetch()} />;
  const { axes, rows } = answer.data;
  if (axes.length === 0)
    return <Empty title="No hyperparameters">The config of this experiment sets none.</Empty>;
  if (rows.length < 2 || !axes.some((axis) => axis.is_varied)) return <Fixed table={answer.data} />;
  return <Varied table={answer.data} />;
}

/** One trial, or values that never change: a table says all. */
function Fixed({ table }: { table: HparamTable }) {
  const values = table.rows[0]?.hparams ?? {};
  return (
    <Scroll label="Hyperparameters" className="card">
      <Text size="sm" c="dimmed" mb="xs">
        Nothing varies between trials here. A search over ranges gives charts.
      </Text>
      <table className="plain-table">
        <thead>
          <tr>
            <th>Hyperparameter</th>
            <th>Value</th>
          </tr>
        </thead>
        <tbody>
          {table.axes.map((axis) => (
            <tr key={axis.name}>
              <td>{axis.name}</td>
              <td className="mono wrap-anywhere">{formatValue(values[axis.name])}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}

function Varied({ table }: { table: HparamTable }) {
  const search = useSearch({ from: "/experiments/$id/hyperparameters" });
  const change = useSearchChange();
  const isDark = useComputedColorScheme("light") === "dark";
  const varied = useMemo(() => table.axes.filter((axis) => axis.is_varied), [table.axes]);
  const hidden = useMemo(() => new Set(search.hide ?? []), [search.hide]);
  const axes = useMemo(
    () => varied.filter((axis) => !hidden.has(axis.name)).slice(0, MOST_AXES),
    [varied, hidden],
  );
  const brushes = useMemo((): Brush[] => {
    const names = [...axes.map(({ name }) => name), METRIC_AXIS];
    return Object.entries(search.brush ?? {}).flatMap(([name, intervals]) => {
      const axis = names.indexOf(name);
      return axis < 0 ? [] : [{ axis, intervals }];
    });
  }, [axes, search.brush]);
  const setBrushes = (chosen: readonly Brush[]) => {
    const named = chosen.map(({ axis, intervals }) => [axes[axis]?.name ?? METRIC_AXIS, intervals]);
    const brush = named.length > 0 ? (Object.fromEntries(named) as Brushes) : undefined;
    if (JSON.stringify(brush) !== JSON.stringify(search.brush)) change({ brush });
  };
  const view = search.view ?? "parallel";
  const isLog = search.log === true;
  const shown = useMemo(() => ({ ...table, axes }), [table, axes]);
  const rows = useMemo(
    () => (view === "parallel" ? brushedRows(table.rows, axes, brushes) : table.rows),
    [table.rows, axes, brushes, view],
  );
  return (
    <Stack gap="md">
      {table.is_sampled && (
        <Text size="sm" c="dimmed">
          Shown are {table.rows.length.toLocaleString("en")} of {plural(table.num_trials, "trial")}.
          Half of them are the best by the searched metric, the others are spread evenly.
        </Text>
      )}
      <Group gap="lg">
        <SegmentedControl
          size="xs"
          aria-label="Chart"
          value={view}
          onChange={(value) => change({ view: value === "parallel" ? undefined : value })}
          data={[
            { value: "parallel", label: "Parallel coordinates" },
            { value: "scatter", label: "Scatter" },
            { value: "heat", label: "Heat map" },
          ]}
        />
        <MultiSelect
          aria-label="Hyperparameters shown"
          size="xs"
          maw={520}
          data={varied.map((axis) => axis.name)}
          value={axes.map((axis) => axis.name)}
          onChange={(names) => {
            const hide = varied.map((axis) => axis.name).filter((name) => !names.includes(name));
            change({ hide: hide.length > 0 ? hide : undefined });
          }}
        />
        <Switch
          size="sm"
          label="Log scale for the metric"
          checked={isLog}
          onChange={(event) => change({ log: event.currentTarget.checked || undefined })}
        />
      </Group>
      {view === "parallel" && (
        <div className="card">
          <Text size="xs" c="dimmed">
            One line per trial, strong colours are better. Drag along an axis to choose trials; the
            table below shows them.
          </Text>
          <Scroll label="Parallel coordinates">
            <div style={{ minWidth: 110 * (axes.length + 1) }}>
              <Parallel
                table={shown}
                isDark={isDark}
                isLog={isLog}
                onBrush={setBrushes}
                {...{ brushes }}
              />
            </div>
          </Scroll>
        </div>
      )}
      {view === "scatter" && (
        <Grid>
          {axes.map((axis) => (
            <section key={axis.name} className="card" aria-label={axis.name}>
              <Scatter table={shown} axis={axis} isDark={isDark} isLog={isLog} />
            </section>
          ))}
        </Grid>
      )}
      {view === "heat" && <HeatMaps table={shown} isDark={isDark} isLog={isLog} />}
      <Rows table={table} rows={rows} isChosen={rows.length < table.rows.length} />
    </Stack>
  );
}

function Grid({ children }: { children: ReactNode }) {
  return (
    <div
      style={{
        display: "grid",
        gap: 12,
        gridTemplateColumns: "repeat(auto-fill, minmax(min(100%, 330px), 1fr))",
      }}
    >
      {children}
    </div>
  );
}

interface ChartProps {
  table: HparamTable;
  isDark: boolean;
  isLog: boolean;
}

function Parallel({
  table,
  isDark,
  isLog,
  brushes,
  onBrush,
}: ChartProps & { brushes: readonly Brush[]; onBrush: (brushes: readonly Brush[]) => void }) {
  const options = useMemo(() => parallelOptions(table, isDark, isLog), [table, isDark, isLog]);
  return (
    <EChart
      label={`Parallel coordinates of ${plural(table.rows.length, "trial")}; the table has the same values.`}
      options={options}
      height={380}
      actions={brushes.map(({ axis, intervals }) => ({
        type: "axisAreaSelect",
        parallelAxisIndex: axis,
        intervals,
      }))}
      onEvent={{
        axisareaselected: (_, chart) => onBrush(brushesOf(chart)),
      }}
    />
  );
}

/** Read the brushed intervals; ECharts tells them nowhere but in its model. */
function brushesOf(chart: unknown): Brush[] {
  const { getModel } = chart as {
    getModel: () => {
      queryComponents: (
        query: object,
      ) => { activeIntervals: [number, number][]; axis: { dim: string } }[];
    };
  };
  const components = getModel.call(chart).queryComponents({ mainType: "parallelAxis" });
  return components.flatMap(({ activeIntervals, axis }) =>
    activeIntervals.length === 0
      ? []
      : [{ axis: Number(axis.dim.replace("dim", "")), intervals: activeIntervals }],
  );
}

function Scatter({ table, axis, isDark, isLog }: ChartProps & { axis: HparamAxis }) {
  const options = useMemo(
    () => scatterOptions(table, axis, isDark, isLog),
    [table, axis, isDark, isLog],
  );
  return (
    <EChart
      label={`${table.metric.name} over ${axis.name}; the table has the same values.`}
      options={options}
      height={260}
    />
  );
}

function HeatMaps({ table, isDark, isLog }: ChartProps) {
  const pairs = table.axes
    .flatMap((x, i) => table.axes.slice(i + 1).map((y) => [x, y] as const))
    .slice(0, MOST_PAIRS);
  if (pairs.length === 0)
    return <Empty title="A heat map needs two hyperparameters">Show one more above.</Empty>;
  return (
    <Grid>
      {pairs.map(([x, y]) => (
        <section
          key={`${x.name} ${y.name}`}
          className="card"
          aria-label={`${x.name} and ${y.name}`}
        >
          <HeatMap table={table} x={x} y={y} isDark={isDark} isLog={isLog} />
        </section>
      ))}
    </Grid>
  );
}

function HeatMap({ table, x, y, isDark, isLog }: ChartProps & { x: HparamAxis; y: HparamAxis }) {
  const options = useMemo(
    () => heatOptions(table, x, y, isDark, isLog),
    [table, x, y, isDark, isLog],
  );
  return (
    <EChart
      label={`Mean ${table.metric.name} by ${x.name} and ${y.name}`}
      options={options}
      height={280}
    />
  );
}

interface RowsProps {
  table: HparamTable;
  rows: HparamTable["rows"];
  isChosen: boolean;
}

function Rows({ table, rows, isChosen }: RowsProps) {
  const sorted = rows.toSorted((a, b) =>
    compareValues(a.metric, b.metric, !table.smaller_is_better),
  );
  return (
    <div className="card">
      <Text size="sm" c="dimmed" mb="xs" role="status">
        {isChosen
          ? `${rows.length.toLocaleString("en")} of ${plural(table.rows.length, "shown trial")} chosen`
          : table.is_sampled
            ? `${rows.length.toLocaleString("en")} of ${plural(table.num_trials, "trial")}`
            : `All ${plural(rows.length, "trial")}`}
        , the best first
      </Text>
      <Scroll label="Trials" style={{ maxHeight: 420, overflowY: "auto" }}>
        <table className="plain-table">
          <thead>
            <tr>
              <th>Trial</th>
              <th className="number">{table.metric.name}</th>
              <th className="number">Batches</th>
              {table.axes.map((axis) => (
                <th key={axis.name} className="number">
                  {axis.name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {sorted.slice(0, TABLE_ROWS).map((row) => (
              <tr key={row.trial_id}>
                <td>
                  <LinkText to="/trials/$id" params={{ id: row.trial_id }} size="sm">
                    {row.trial_id}
                  </LinkText>
                </td>
                <td className="number">{formatNumber(metricOf(row))}</td>
                <td className="number">{formatNumber(row.steps_completed)}</td>
                {table.axes.map((axis) => (
                  <td key={axis.name} className="number">
                    {formatValue(row.hparams[axis.name])}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
        {sorted.length > TABLE_ROWS && (
          <Text size="xs" c="dimmed" p={8}>
            The first {TABLE_ROWS} of {sorted.length.toLocaleString("en")} rows.
          </Text>
        )}
      </Scroll>
    </div>
  );
}
