/** Who used how many slot hours: by user, project, pool and month, also as CSV. */

import { Button, Checkbox, Group, Text, TextInput } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useSearch } from "@tanstack/react-router";
import { useState } from "react";

import { usageQuery } from "../api/queries";
import type { Usage as UsageRow, UsageKey } from "../api/types";
import { useSearchChange } from "../charts/ChartControls";
import { Empty, ProblemView, Waiting } from "../components/Feedback";
import { Scroll } from "../components/Scroll";
import { csvOf } from "../lib/csv";
import { download } from "../lib/download";
import { USAGE_KEYS } from "../lib/search";
import { useTitle } from "../lib/title";
import { LabHead } from "./LabHead";

const TITLES: Record<UsageKey, string> = {
  month: "Month",
  user: "User",
  project: "Project",
  pool: "Pool",
};
const AMOUNTS = [
  "slot_hours",
  "wait_hours",
  "num_trials",
  "gpu_hours",
  "training_hours",
  "lost_hours",
  "known_hours",
] as const;
const HOURS = new Intl.NumberFormat("en-US", {
  minimumFractionDigits: 2,
  maximumFractionDigits: 2,
});

/** Return this month of UTC, or another one, as the master names it. */
export function monthOf(time: number, before = 0): string {
  const at = new Date(time);
  return new Date(Date.UTC(at.getUTCFullYear(), at.getUTCMonth() - before))
    .toISOString()
    .slice(0, 7);
}

export function Usage() {
  useTitle("Usage");
  const search = useSearch({ from: "/usage" });
  const change = useSearchChange();
  const [now] = useState(() => Date.now());
  const since = search.since ?? monthOf(now);
  const until = search.until ?? since;
  const by = search.by ?? (["user"] as const);
  const usage = useQuery(usageQuery(since, until, by));
  const rows = usage.data ?? [];
  const shown = USAGE_KEYS.filter((key) => by.includes(key));
  const save = () => download(`usage-${since}-${until}.csv`, usageCsv(rows, shown), "text/csv");
  const month = (name: "since" | "until", label: string, value: string) => (
    <TextInput
      type="month"
      label={label}
      size="xs"
      value={value}
      onChange={(event) => change({ [name]: event.currentTarget.value || undefined })}
    />
  );
  return (
    <>
      <LabHead
        title="Usage"
        actions={
          <Button size="xs" variant="default" disabled={rows.length === 0} onClick={save}>
            Download CSV
          </Button>
        }
      />
      <Group gap="md" mb="sm" align="flex-end">
        {month("since", "From month", since)}
        {month("until", "To month", until)}
        <Checkbox.Group
          label="A row for each"
          size="xs"
          value={[...by]}
          onChange={(keys) => change({ by: keys.length > 0 ? keys : undefined })}
        >
          <Group gap="sm" h={30}>
            {USAGE_KEYS.map((key) => (
              <Checkbox key={key} size="xs" value={key} label={TITLES[key]} />
            ))}
          </Group>
        </Checkbox.Group>
      </Group>
      <Text size="sm" c="dimmed" mb="sm">
        Months are those of UTC. You see the projects that you may read. Goodput is the share of
        steps that were kept, hours lost are work after the last checkpoint before a stop: both in
        slot hours of ended attempts whose trainers tell of their time.
      </Text>
      {usage.isPending && <Waiting what="usage" />}
      {usage.isError && <ProblemView error={usage.error} onRetry={() => void usage.refetch()} />}
      {usage.isSuccess && rows.length === 0 && (
        <Empty title="Nothing was used">No trial had slots in these months.</Empty>
      )}
      {rows.length > 0 && <UsageTable rows={rows} shown={shown} />}
    </>
  );
}

function UsageTable({ rows, shown }: { rows: readonly UsageRow[]; shown: readonly UsageKey[] }) {
  const total = (pick: (row: UsageRow) => number) => rows.reduce((sum, row) => sum + pick(row), 0);
  const hours = total((row) => row.slot_hours);
  return (
    <Scroll label="Usage" className="card">
      <table className="plain-table">
        <thead>
          <tr>
            {shown.map((key) => (
              <th key={key}>{TITLES[key]}</th>
            ))}
            <th className="number">Slot hours</th>
            <th className="number">Share</th>
            <th className="number">GPU hours</th>
            <th className="number">Hours waited</th>
            <th className="number">Hours lost</th>
            <th className="number">Goodput</th>
            <th className="number">Trials</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={shown.map((key) => row[key]).join("\n")}>
              {shown.map((key) => (
                <td key={key} className="setting">
                  {row[key]}
                </td>
              ))}
              <td className="number">{HOURS.format(row.slot_hours)}</td>
              <td className="number">
                {hours > 0 ? `${((100 * row.slot_hours) / hours).toFixed(1)} %` : "–"}
              </td>
              <td className="number">{HOURS.format(row.gpu_hours)}</td>
              <td className="number">{HOURS.format(row.wait_hours)}</td>
              <td className="number">{HOURS.format(row.lost_hours)}</td>
              <td className="number">{goodputOf(row)}</td>
              <td className="number">{row.num_trials.toLocaleString("en")}</td>
            </tr>
          ))}
        </tbody>
        <tfoot>
          <tr>
            <th scope="row" colSpan={shown.length}>
              All
            </th>
            <td className="number">{HOURS.format(hours)}</td>
            <td />
            <td className="number">{HOURS.format(total((row) => row.gpu_hours))}</td>
            <td className="number">{HOURS.format(total((row) => row.wait_hours))}</td>
            <td className="number">{HOURS.format(total((row) => row.lost_hours))}</td>
            <td className="number">
              {goodputOf({
                training_hours: total((row) => row.training_hours),
                known_hours: total((row) => row.known_hours),
              })}
            </td>
            <td className="number">{total((row) => row.num_trials).toLocaleString("en")}</td>
          </tr>
        </tfoot>
      </table>
    </Scroll>
  );
}

/** Return the share of steps that were kept, of what is known. */
export function goodputOf(row: Pick<UsageRow, "training_hours" | "known_hours">): string {
  return row.known_hours > 0
    ? `${((100 * row.training_hours) / row.known_hours).toFixed(1)} %`
    : "–";
}

/** Return rows as CSV, with all digits. */
export function usageCsv(rows: readonly UsageRow[], shown: readonly UsageKey[]): string {
  const names = [...shown, ...AMOUNTS] as const;
  return csvOf([names, ...rows.map((row) => names.map((name) => row[name]))]);
}
