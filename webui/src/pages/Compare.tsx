import {
  Group,
  Stack,
  Switch,
  TagsInput,
  Text,
  Title,
  useComputedColorScheme,
} from "@mantine/core";
import { useQueries } from "@tanstack/react-query";
import { useSearch } from "@tanstack/react-router";
import { useMemo } from "react";

import { experimentQuery, trialQuery } from "../api/queries";
import { type SeriesName, useSeries } from "../api/series";
import type { Experiment, Trial } from "../api/types";
import { ChartControls, useSearchChange, zoomOf } from "../charts/ChartControls";
import { CurveCard } from "../charts/CurveCard";
import { type Curve, smoothingSteps } from "../charts/curves";
import { lineStyle } from "../charts/palette";
import { Empty, ProblemView, Waiting } from "../components/Feedback";
import { LinkText } from "../components/links";
import { PageHead } from "../components/PageHead";
import { Scroll } from "../components/Scroll";
import { StateBadge } from "../components/StateBadge";
import { differing, flatten } from "../lib/flatten";
import { isProfilerGroup, lastStep, numericMetrics, xChoices } from "../lib/metrics";
import { formatNumber, formatValue, plural, toNumber } from "../lib/numbers";
import { isId } from "../lib/search";
import { shownTrialState } from "../lib/states";
import { useTitle } from "../lib/title";
import { CompareMedia } from "./CompareMedia";
import { TrialPicker } from "./TrialPicker";

const MOST_COMPARED = 50;
const MOST_NAMED = 10;

export function Compare() {
  useTitle("Compare");
  const search = useSearch({ from: "/compare" });
  const change = useSearchChange();
  const chosen = useMemo(() => [...new Set(search.trials ?? [])], [search.trials]);
  const ids = useMemo(() => chosen.slice(0, MOST_COMPARED), [chosen]);
  const choose = (wanted: readonly number[]) =>
    change({ trials: wanted.length > 0 ? wanted : undefined });
  const answers = useQueries({ queries: ids.map((id) => trialQuery(id)) });
  const trials = answers.flatMap((answer) => (answer.data ? [answer.data] : []));
  const experimentIds = [...new Set(trials.map((trial) => trial.experiment_id))];
  const experiments = useQueries({ queries: experimentIds.map((id) => experimentQuery(id)) });
  const byId = new Map(
    experiments.flatMap((answer) => (answer.data ? [[answer.data.id, answer.data] as const] : [])),
  );
  const failed = answers.find((answer) => answer.isError);
  return (
    <>
      <PageHead title="Compare trials" />
      <TrialPicker chosen={chosen} onChange={choose} />
      <TagsInput
        label="Trials by id"
        description="Type the id of a trial and press Enter."
        value={chosen.map(String)}
        onChange={(values) => choose(values.map(Number).filter(isId))}
        maw={520}
        mb="md"
        clearable
      />
      {chosen.length > ids.length && (
        <Text size="sm" mb="md" role="status">
          The first {ids.length} of {chosen.length} chosen trials are compared. Remove some to
          compare others.
        </Text>
      )}
      {failed && <ProblemView error={failed.error} />}
      {ids.length === 0 && (
        <Empty title="Nothing to compare yet">
          Choose trials above, or select some in the table of an experiment's trials.
        </Empty>
      )}
      {answers.some((answer) => answer.isPending) && <Waiting what="trials" />}
      {trials.length > 0 && (
        <Stack gap="xl">
          <Curves trials={trials} experiments={byId} />
          <CompareMedia runs={trials.map((one) => ({ id: one.id, label: nameOf(one, byId) }))} />
          <Differences
            trials={trials}
            experiments={byId}
            showsAll={search.all === true}
            onShowAll={(all) => change({ all: all || undefined })}
          />
        </Stack>
      )}
    </>
  );
}

interface ComparedProps {
  trials: readonly Trial[];
  experiments: ReadonlyMap<number, Experiment>;
}

function nameOf(trial: Trial, experiments: ReadonlyMap<number, Experiment>): string {
  const name = experiments.get(trial.experiment_id)?.name;
  return name === undefined ? `Trial ${trial.id}` : `Trial ${trial.id} · ${name}`;
}

function Curves({ trials, experiments }: ComparedProps) {
  const search = useSearch({ from: "/compare" });
  const isDark = useComputedColorScheme("light") === "dark";
  const names = useMemo(() => {
    const all = trials.flatMap((trial) =>
      numericMetrics(trial.summary ?? {}, (group) => !isProfilerGroup(group)),
    );
    return [...new Map(all.map((name) => [`${name.group}/${name.metric}`, name])).values()];
  }, [trials]);
  const first = trials[0] && experiments.get(trials[0].experiment_id);
  const fallback = names.find((name) => name.metric === first?.metric) ?? names[0];
  const chosen = search.metric ?? (fallback ? `${fallback.group}/${fallback.metric}` : "");
  const [group = "", ...rest] = chosen.split("/");
  const metric = rest.join("/");
  const x = search.x ?? "batches";
  const requests = useMemo<SeriesName[]>(
    () => trials.map((trial) => ({ trialId: trial.id, group, metric })),
    [trials, group, metric],
  );
  const smoothing = smoothingSteps(search.smooth ?? 0, lastStep(trials));
  const { series, isPending, error } = useSeries(requests, x, zoomOf(search), smoothing);
  if (names.length === 0)
    return <Empty title="No metrics">None of these trials has reported any number.</Empty>;
  const curves = trials.flatMap((trial, i): Curve[] => {
    const found = series[i];
    if (found === undefined || found.xs.length === 0) return [];
    return [
      {
        id: String(trial.id),
        label: nameOf(trial, experiments),
        ...found,
        ...lineStyle(i, isDark),
        width: 2,
      },
    ];
  });
  const drawn = new Set(curves.map(({ id }) => id));
  const missing = trials.filter((trial) => !drawn.has(String(trial.id)));
  return (
    <div>
      <ChartControls
        search={search}
        xNames={xChoices(names)}
        metric={chosen}
        metrics={names.map((name) => ({
          value: `${name.group}/${name.metric}`,
          label: `${name.metric} (${name.group})`,
        }))}
      />
      {error !== undefined && <ProblemView error={error} />}
      {isPending && <Waiting what="metrics" />}
      {!isPending && missing.length > 0 && (
        <Text size="sm" mb="xs" role="status">
          {curves.length} of {plural(trials.length, "trial")} {trials.length === 1 ? "is" : "are"}{" "}
          drawn. No points of{" "}
          <code>
            {metric} ({group})
          </code>
          : {listed(missing)}. Another metric may have them.
        </Text>
      )}
      <CurveCard
        title={metric}
        curves={curves}
        series={requests}
        smoothing={smoothing}
        search={search}
        syncKey="compare"
        height={340}
      />
    </div>
  );
}

function listed(trials: readonly Trial[]): string {
  const more = trials.length > MOST_NAMED ? ` and ${trials.length - MOST_NAMED} more` : "";
  return `trial ${trials
    .slice(0, MOST_NAMED)
    .map(({ id }) => id)
    .join(", ")}${more}`;
}

interface DifferencesProps extends ComparedProps {
  showsAll: boolean;
  onShowAll: (showsAll: boolean) => void;
}

function Differences({ trials, experiments, showsAll, onShowAll }: DifferencesProps) {
  const hparams = trials.map((trial) => flatten(trial.hparams));
  const configs = trials.map((trial) => {
    const config = experiments.get(trial.experiment_id)?.config ?? {};
    return flatten({ ...config, hyperparameters: undefined });
  });
  return (
    <section>
      <Group justify="space-between" mb="xs">
        <Title order={2}>What differs</Title>
        <Switch
          size="sm"
          label="Show what is the same too"
          checked={showsAll}
          onChange={(event) => onShowAll(event.currentTarget.checked)}
        />
      </Group>
      <Scroll label="What differs" className="card">
        <table className="plain-table">
          <thead>
            <tr>
              <th>Trial</th>
              {trials.map((trial) => (
                <th key={trial.id}>
                  <LinkText to="/trials/$id" params={{ id: trial.id }}>
                    {nameOf(trial, experiments)}
                  </LinkText>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            <tr>
              <td>State</td>
              {trials.map((trial) => (
                <td key={trial.id}>
                  <StateBadge state={shownTrialState(trial)} />
                </td>
              ))}
            </tr>
            <tr>
              <td>Best metric</td>
              {trials.map((trial) => (
                <td key={trial.id}>{formatNumber(toNumber(trial.best_metric))}</td>
              ))}
            </tr>
            <tr>
              <td>Batches</td>
              {trials.map((trial) => (
                <td key={trial.id}>{formatNumber(trial.steps_completed)}</td>
              ))}
            </tr>
          </tbody>
          <Rows title="Hyperparameters" settings={hparams} showsAll={showsAll} />
          <Rows title="Config" settings={configs} showsAll={showsAll} />
        </table>
      </Scroll>
    </section>
  );
}

interface RowsProps {
  title: string;
  settings: readonly Record<string, unknown>[];
  showsAll: boolean;
}

function Rows({ title, settings, showsAll }: RowsProps) {
  const differ = differing(settings);
  const names = [...new Set(settings.flatMap((one) => Object.keys(one)))].sort();
  const shown = showsAll ? names : names.filter((name) => differ.has(name));
  return (
    <tbody>
      <tr>
        <th colSpan={settings.length + 1} scope="rowgroup" style={{ paddingTop: 16 }}>
          {title}
          {shown.length === 0 && settings.length > 1 && ": no differences"}
          {shown.length === 0 && settings.length === 1 && ": add a trial to see differences"}
        </th>
      </tr>
      {shown.map((name) => (
        <tr key={name} className={showsAll && differ.has(name) ? "differs" : undefined}>
          <td className="setting">{name}</td>
          {settings.map((one, i) => (
            <td key={i} className="mono wrap-anywhere">
              {formatValue(one[name])}
            </td>
          ))}
        </tr>
      ))}
    </tbody>
  );
}
