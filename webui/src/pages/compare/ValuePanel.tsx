/** The panel of a metric with one number of each run: bars or box plots. */

import { Group, Text, Title, useComputedColorScheme } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { type ReactNode, useMemo } from "react";

import { groupsQuery } from "../../api/queries";
import { DownloadMenu } from "../../charts/DownloadMenu";
import { EChart } from "../../charts/EChart";
import { lightColor, lineStyle } from "../../charts/palette";
import { fiveOf, meanOf, type ValueRow, valueOptions } from "../../charts/values";
import { ProblemView, Waiting } from "../../components/Feedback";
import { Scroll } from "../../components/Scroll";
import { csvOf } from "../../lib/csv";
import { download } from "../../lib/download";
import { formatNumber, plural } from "../../lib/numbers";
import type { Panel } from "../../lib/panels";
import { namesOf, type Row } from "../../lib/runs";
import type { CompareSearch } from "../../lib/search";

const HEIGHT = 270;
export const VALUES = { last: "last", min: "least", max: "greatest" };

interface ValuePanelProps {
  panel: Panel;
  rows: readonly Row[];
  search: CompareSearch;
  actions: ReactNode;
}

export function ValuePanel({ panel, rows, search, actions }: ValuePanelProps) {
  const isDark = useComputedColorScheme("light") === "dark";
  const { as: shown = "bars", value = "last" } = panel;
  const { rows: found, error, isPending } = useValues(panel, rows, search, isDark);
  const isLog = search.log === true;
  const options = useMemo(
    () => valueOptions({ rows: found, as: shown, isLog, isDark }),
    [found, shown, isLog, isDark],
  );
  const empty = found.filter(({ values }) => values.length === 0).length;
  const word = `${VALUES[value]} ${panel.title}`;
  const kind = shown === "bars" ? "bars" : "box plots";
  return (
    <section className="card" aria-label={panel.title}>
      <Group justify="space-between" wrap="nowrap" align="flex-start">
        <Title order={2} size="h5" className="wrap-anywhere">
          {panel.title}
        </Title>
        <Group gap={0} wrap="nowrap">
          {actions}
          <DownloadMenu
            title={word}
            csvName="CSV, each run"
            onCsv={() => download(`${word}.csv`, valuesAsCsv(found, word), "text/csv")}
            drawn={async () => {
              const { svgOfOptions } = await import("../../charts/picture");
              const light = found.map((row) => ({ ...row, color: lightColor(row.color) }));
              return svgOfOptions(
                valueOptions({ rows: light, as: shown, isLog, isDark: false, axisName: word }),
              );
            }}
          />
        </Group>
      </Group>
      <Text size="xs" c="dimmed">
        The {VALUES[value]} value of each run
        {shown === "bars" && search.group !== undefined && ", the mean of a group"}
        {!isPending && empty > 0 && `; none of ${plural(empty, "row")}`}
      </Text>
      {error !== null ? (
        <ProblemView error={error} />
      ) : isPending ? (
        <Waiting what={panel.title} />
      ) : search.table ? (
        <ValueTable rows={found} caption={word} />
      ) : (
        <EChart
          label={`${word}: ${kind} of ${plural(found.length, "row")}`}
          options={options}
          height={HEIGHT}
        />
      )}
    </section>
  );
}

/** Return the wanted number of each run of each row; without groups a box holds all runs. */
function useValues(panel: Panel, rows: readonly Row[], search: CompareSearch, isDark: boolean) {
  const { value = "last", as } = panel;
  const runs = useMemo(() => rows.flatMap((row) => row.runs), [rows]);
  const { data, error, isPending } = useQuery(
    groupsQuery(
      { group: panel.group, name: panel.metric },
      // Whatever is down-sampled, the least, the greatest and the last values are kept.
      { groups: runs.map(({ id }) => [id]), max_points: 4, x: "batches" },
    ),
  );
  const found = useMemo((): ValueRow[] => {
    const names = namesOf(runs);
    const numbers = new Map(
      runs.map(({ id }, i) => {
        const { means = [], lows = [], highs = [] } = data?.[i] ?? {};
        const known = { last: means.at(-1), min: Math.min(...lows), max: Math.max(...highs) };
        return [id, known[value]] as const;
      }),
    );
    const valuesOf = (members: Row["runs"]) =>
      members.flatMap(({ id }) => {
        const number = numbers.get(id);
        const isThere = number !== undefined && Number.isFinite(number);
        return isThere ? [{ run: names.get(id) ?? `Trial ${id}`, value: number }] : [];
      });
    const color = (place: number) => lineStyle(place, isDark).color;
    if (as === "box" && search.group === undefined)
      return [{ name: "All runs", color: color(0), values: valuesOf(runs) }];
    return rows.map((row) => ({
      name: row.name,
      color: color(row.place),
      values: valuesOf(row.runs),
    }));
  }, [runs, rows, data, value, as, search.group, isDark]);
  return { rows: found, error, isPending };
}

function valuesAsCsv(rows: readonly ValueRow[], word: string): string {
  const lines = rows.flatMap(({ name, values }) =>
    values.map(({ run, value }) => [name, run, value] as const),
  );
  return csvOf([["Run or group", "Run", word], ...lines]);
}

function ValueTable({ rows, caption }: { rows: readonly ValueRow[]; caption: string }) {
  return (
    <Scroll label={caption}>
      <table className="plain-table">
        <thead>
          <tr>
            {["Run or group", "Runs", "Mean", "Least", "25 %", "Middle", "75 %", "Greatest"].map(
              (title) => (
                <th key={title}>{title}</th>
              ),
            )}
          </tr>
        </thead>
        <tbody>
          {rows.map(({ name, values }) => {
            const numbers = values.map(({ value }) => value);
            const five = fiveOf(numbers) ?? [];
            return (
              <tr key={name}>
                <td>{name}</td>
                <td className="number">{values.length}</td>
                <td className="number">
                  {values.length > 0 ? formatNumber(meanOf(numbers)) : "–"}
                </td>
                {five.map((one, i) => (
                  <td key={i} className="number">
                    {formatNumber(one)}
                  </td>
                ))}
              </tr>
            );
          })}
        </tbody>
      </table>
    </Scroll>
  );
}
