/** What differs between runs: hyperparameters and configs, with differences to the baseline. */

import { Group, Switch, Text } from "@mantine/core";
import { useQueries } from "@tanstack/react-query";

import { experimentQuery } from "../../api/queries";
import { useSearchChange } from "../../charts/ChartControls";
import { RowLink } from "../../components/links";
import { Scroll } from "../../components/Scroll";
import { StateBadge } from "../../components/StateBadge";
import { differing, flatten } from "../../lib/flatten";
import { plural } from "../../lib/numbers";
import { type Row, type Run, withDifference } from "../../lib/runs";
import type { CompareSearch } from "../../lib/search";
import { shownTrialState } from "../../lib/states";

const MOST_COLUMNS = 20;

interface Column {
  run: Run;
  name: string;
}

export function Differences({ rows, search }: { rows: readonly Row[]; search: CompareSearch }) {
  const change = useSearchChange();
  const all = rows.flatMap(({ name, runs }): Column[] =>
    runs.map((run) => ({ run, name: runs.length > 1 ? `${name}, trial ${run.id}` : name })),
  );
  const columns = all.slice(0, MOST_COLUMNS);
  const ids = [...new Set(columns.map(({ run }) => run.experimentId))];
  const answers = useQueries({ queries: ids.map((id) => experimentQuery(id)) });
  const configs = new Map(
    answers.flatMap(({ data }) =>
      data ? [[data.id, flatten({ ...data.config, hyperparameters: undefined })] as const] : [],
    ),
  );
  const hasBase = rows.some(({ key }) => key === search.base);
  const showsAll = search.all === true;
  const facts: [string, (run: Run) => unknown][] = [
    ["Best metric", ({ trial }) => trial.best_metric],
    ["Batches", ({ trial }) => trial.steps_completed],
    ["Seed", ({ seed }) => seed],
  ];
  return (
    <>
      <Group justify="space-between" mb="xs">
        <Text size="sm" c="dimmed" role="status">
          {all.length > columns.length
            ? `The first ${columns.length} of ${plural(all.length, "run")}. Switch some off to see others.`
            : plural(columns.length, "run")}
          {hasBase && ", with differences to the baseline"}
        </Text>
        <Switch
          size="sm"
          label="Show what is the same too"
          checked={showsAll}
          onChange={(event) => change({ all: event.currentTarget.checked || undefined })}
        />
      </Group>
      <Scroll label="What differs" className="card">
        <table className="plain-table">
          <thead>
            <tr>
              <th>Run</th>
              {columns.map(({ run, name }) => (
                <th key={run.id}>
                  <RowLink to={`/trials/${run.id}`}>{name}</RowLink>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            <tr>
              <td>State</td>
              {columns.map(({ run }) => (
                <td key={run.id}>
                  <StateBadge state={shownTrialState(run.trial)} />
                </td>
              ))}
            </tr>
            {facts.map(([name, read]) => (
              <Values
                key={name}
                name={name}
                values={columns.map(({ run }) => read(run))}
                hasBase={hasBase}
              />
            ))}
          </tbody>
          <Rows
            title="Hyperparameters"
            settings={columns.map(({ run }) => run.hparams)}
            {...{ showsAll, hasBase }}
          />
          <Rows
            title="Config"
            settings={columns.map(({ run }) => configs.get(run.experimentId) ?? {})}
            {...{ showsAll, hasBase }}
          />
        </table>
      </Scroll>
    </>
  );
}

interface RowsProps {
  title: string;
  settings: readonly Record<string, unknown>[];
  showsAll: boolean;
  hasBase: boolean;
}

function Rows({ title, settings, showsAll, hasBase }: RowsProps) {
  const differ = differing(settings);
  const names = [...new Set(settings.flatMap((one) => Object.keys(one)))].sort();
  const shown = showsAll ? names : names.filter((name) => differ.has(name));
  return (
    <tbody>
      <tr>
        <th colSpan={settings.length + 1} scope="rowgroup" style={{ paddingTop: 16 }}>
          {title}
          {shown.length === 0 && settings.length > 1 && ": no differences"}
          {shown.length === 0 && settings.length === 1 && ": switch on another run to see them"}
        </th>
      </tr>
      {shown.map((name) => (
        <Values
          key={name}
          name={name}
          values={settings.map((one) => one[name])}
          hasBase={hasBase}
          isMarked={showsAll && differ.has(name)}
        />
      ))}
    </tbody>
  );
}

interface ValuesProps {
  name: string;
  values: readonly unknown[];
  /** Whether the first value is the baseline's. */
  hasBase: boolean;
  isMarked?: boolean;
}

function Values({ name, values, hasBase, isMarked }: ValuesProps) {
  return (
    <tr className={isMarked ? "differs" : undefined}>
      <td className="setting">{name}</td>
      {values.map((value, i) => (
        <td key={i} className="mono wrap-anywhere">
          {withDifference(value, hasBase && i > 0 ? values[0] : null)}
        </td>
      ))}
    </tr>
  );
}
