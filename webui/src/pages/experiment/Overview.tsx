import { Stack, Text, Title } from "@mantine/core";
import { useComputedColorScheme } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useNavigate, useParams, useSearch } from "@tanstack/react-router";
import { type ReactNode, useMemo } from "react";

import { bestTrialsQuery, experimentQuery, searchQuery, trialQuery } from "../../api/queries";
import { type Series, type SeriesName, useSeries } from "../../api/series";
import type { Experiment, SearchView, Trial } from "../../api/types";
import { Ago, Lasted } from "../../components/Ago";
import { type Column, DataTable, widthFor } from "../../components/DataTable";
import { Facts } from "../../components/Facts";
import { Empty, NoCurves, ProblemView, Waiting } from "../../components/Feedback";
import { LinkText, RowLink } from "../../components/links";
import { ProgressCell } from "../../components/ProgressCell";
import { ChartControls, zoomOf } from "../../charts/ChartControls";
import { CurveCard } from "../../charts/CurveCard";
import { type Curve, smoothingSteps } from "../../charts/curves";
import { lineStyle, scaleColor } from "../../charts/palette";
import { chartable, chosenX, lastStep, type MetricName, numericMetrics, xChoices } from "../../lib/metrics";
import { flatten } from "../../lib/flatten";
import { formatNumber, formatValue, plural, toNumber } from "../../lib/numbers";
import {
  interactiveKind,
  isTerminal,
  shownMetric,
  shownProgress,
  workWord,
} from "../../lib/states";
import { TrialTable } from "./TrialTable";

const MOST_CURVES = 100;
const FEW_CURVES = 8;
const BEST_ROWS = 5;

export function Overview() {
  const { id } = useParams({ from: "/experiments/$id" });
  const experiment = useQuery(experimentQuery(id)).data;
  const list = useInfiniteQuery(bestTrialsQuery(id));
  const trials = useMemo(() => list.data?.pages.flatMap((page) => page.items) ?? [], [list.data]);
  const total = list.data?.pages[0]?.total ?? trials.length;
  if (!experiment) return <Waiting />;
  return (
    <Stack gap="lg">
      <Summary experiment={experiment} trials={trials} total={total} />
      {hasObjectives(experiment) && <Front experiment={experiment} />}
      {list.isError && <ProblemView error={list.error} onRetry={() => void list.refetch()} />}
      {trials.length > 0 && <Learning experiment={experiment} trials={trials} total={total} />}
      {trials.length > 0 ? (
        <section>
          <Title order={2} mb="xs">
            {hasObjectives(experiment)
              ? `Trials by ${experiment.metric}`
              : trials.length > BEST_ROWS
                ? "Best trials"
                : "Trials"}
          </Title>
          <TrialTable
            experiment={hasObjectives(experiment) ? { ...experiment, best_trial_id: null } : experiment}
            trials={trials.slice(0, BEST_ROWS)}
          />
        </section>
      ) : (
        !list.isPending && (
          <Empty title="No trials yet">The search creates them as slots come free.</Empty>
        )
      )}
    </Stack>
  );
}

interface PartsProps {
  experiment: Experiment;
  /** Those that are loaded, the best first. */
  trials: readonly Trial[];
  /** How many trials there are in all. */
  total: number;
}

function Summary({ experiment, trials, total }: PartsProps) {
  return (
    <div className="card">
      <Facts
        isShort
        items={[
          howFar(experiment, trials, total),
          ...(shownMetric(experiment) === null || hasObjectives(experiment)
            ? []
            : bestOf(experiment)),
          [
            "Trials",
            experiment.ended_at === null
              ? `${plural(experiment.num_trials, "trial")}, ${experiment.num_running} running`
              : plural(experiment.num_trials, "trial"),
          ],
          ...(experiment.is_unmanaged
            ? []
            : [
                [
                  interactiveKind(experiment) === null ? "Search" : "Kind",
                  workWord(experiment, ""),
                ] as const,
              ]),
          ...(experiment.limits ?? []).map(
            (limit) => [LIMITS[limit.name] ?? limit.name, usedOf(limit)] as const,
          ),
          ...(experiment.end_reason ? [["Ended", experiment.end_reason] as const] : []),
          ["Created", <Ago key="s" time={experiment.created_at} />],
          ["Duration", <Lasted key="d" from={experiment.created_at} to={experiment.ended_at} />],
        ]}
      />
    </div>
  );
}

/** A search of several objectives has no best trial, but a Pareto front. */
function hasObjectives({ config }: Experiment): boolean {
  const searcher = config.searcher as { objectives?: unknown[] } | undefined;
  return (searcher?.objectives ?? []).length > 0;
}

type FrontTrial = NonNullable<SearchView["front"]>[number];

/** Show the trials that no other one dominates, with the values of all objectives. */
function Front({ experiment }: { experiment: Experiment }) {
  const search = useQuery(searchQuery(experiment.id));
  const columns = useMemo(() => frontColumns(search.data), [search.data]);
  if (search.isError)
    return <ProblemView error={search.error} onRetry={() => void search.refetch()} />;
  if (search.isPending) return <Waiting what="Pareto front" />;
  const { front = [] } = search.data;
  const total = search.data.num_in_front ?? 0;
  return (
    <section>
      <Title order={2} mb="xs">
        Pareto front
      </Title>
      <Text size="sm" c="dimmed" maw={760} mb="xs">
        {total === 0
          ? "No trial has reported a finite value of every objective yet."
          : `${plural(total, "trial")}: no other trial is better in one objective and worse in none.`}
        {front.length < total && ` The first ${front.length} are shown.`}
      </Text>
      {front.length > 0 && (
        <DataTable
          label="Pareto front"
          rows={front}
          columns={columns}
          rowId={(one) => String(one.trial_id)}
          rowLabel={(one) => `trial ${one.trial_id}`}
        />
      )}
    </section>
  );
}

function frontColumns(search: SearchView | undefined): Column<FrontTrial>[] {
  const names = new Set((search?.front ?? []).flatMap((one) => Object.keys(flatten(one.hparams))));
  return [
    {
      id: "id",
      title: "Trial",
      width: 92,
      isPinned: true,
      cell: ({ trial_id: id }) => (
        <RowLink to={`/trials/${id}`}>{id}</RowLink>
      ),
    },
    ...(search?.objectives ?? []).map(
      ({ metric, smaller_is_better: isSmaller }, index): Column<FrontTrial> => {
        const title = `${metric} ${isSmaller ? "↓" : "↑"}`;
        return {
          id: `objective-${index}`,
          title,
          width: widthFor(title, 104),
          isNumeric: true,
          cell: (one) => formatNumber(toNumber(one.values[index] ?? null)),
        };
      },
    ),
    ...[...names].sort().map(
      (name): Column<FrontTrial> => ({
        id: `hparam-${name}`,
        title: name,
        width: widthFor(name, 96),
        cell: (one) => formatValue(flatten(one.hparams)[name]),
      }),
    ),
  ];
}

const LIMITS: Record<string, string> = {
  max_trials: "Most trials",
  max_slot_hours: "Most slot hours",
  max_wall_time: "Most time in seconds",
  target: "Target",
  max_failures: "Most failed trials",
};

/** Say what is used of a limit, and left; of a target, how near the best value is. */
function usedOf({ limit, used, left }: NonNullable<Experiment["limits"]>[number]): string {
  const most = formatNumber(limit);
  if (left === null) return used === null ? most : `${most}, best so far ${formatNumber(used)}`;
  return left === 0 ? `${most}, used up` : `${formatNumber(used ?? 0)} of ${most} used`;
}

/** Say how far it is; where nothing says how long training goes on, what was trained. */
function howFar(
  experiment: Experiment,
  trials: readonly Trial[],
  total: number,
): readonly [string, ReactNode] {
  const progress = shownProgress(experiment);
  if (progress === null) {
    const steps = trials.reduce((sum, trial) => sum + trial.steps_completed, 0);
    const part = trials.length < total ? ` in the best ${trials.length} trials` : "";
    return ["Batches", `${formatNumber(steps)}${part}`];
  }
  return ["Progress", <ProgressCell key="p" value={progress} label="Progress of the experiment" />];
}

function bestOf(experiment: Experiment): readonly (readonly [string, ReactNode])[] {
  const best = toNumber(experiment.best_metric);
  const none = experiment.ended_at === null ? "none yet" : "none";
  const { metric, best_trial_id: trial } = experiment;
  return [
    [
      `Best ${metric} (${experiment.smaller_is_better ? "smaller" : "larger"} is better)`,
      best === null ? none : formatNumber(best),
    ],
    [
      "Best trial",
      trial === null ? (
        none
      ) : (
        <LinkText key="b" to="/trials/$id" params={{ id: trial }}>
          Trial {trial}
        </LinkText>
      ),
    ],
  ];
}

function Learning({ experiment, trials, total }: PartsProps) {
  const asked = useSearch({ from: "/experiments/$id/" });
  const navigate = useNavigate();
  const isDark = useComputedColorScheme("light") === "dark";
  const sample = useQuery(trialQuery(experiment.best_trial_id ?? trials[0]?.id ?? 0));
  const names = useMemo(() => numericMetrics(sample.data?.summary ?? {}), [sample.data]);
  const chosen = asked.metric ?? preferredMetric(names, experiment.metric);
  const [group = "validation", ...rest] = chosen.split("/");
  const metric = rest.join("/");
  const drawnName = names.filter((name) => name.group === group && name.metric === metric);
  const ownX = chosenX(drawnName, names);
  const x = asked.x ?? ownX ?? "batches";
  const search = { ...asked, x };
  const drawn = useMemo(
    () => trials.filter((trial) => trial.num_attempts > 0).slice(0, MOST_CURVES),
    [trials],
  );
  const requests = useMemo<SeriesName[]>(
    () => drawn.map((trial) => ({ trialId: trial.id, group, metric })),
    [drawn, group, metric],
  );
  const numStarted = trials.filter((trial) => trial.num_attempts > 0).length;
  // Of trials that are not loaded nobody knows here whether they have started.
  const numAll = numStarted < trials.length || trials.length === total ? numStarted : total;
  const longest = lastStep(sample.data === undefined ? drawn : [sample.data, ...drawn]);
  const smoothing = smoothingSteps(search.smooth ?? 0, longest);
  const { series, error, ...answer } = useSeries(requests, x, zoomOf(search), smoothing);
  const isWaiting = answer.isPending || sample.isPending;
  const curves = useMemo(
    () => toCurves(drawn, series, isDark, experiment.best_trial_id),
    [drawn, series, isDark, experiment.best_trial_id],
  );
  const options = names.map((name) => ({
    value: `${name.group}/${name.metric}`,
    label: `${name.metric} (${name.group})`,
  }));
  if (names.length === 0 && !isWaiting)
    return (
      <NoCurves
        who="a trial"
        call="report_validation_metrics"
        hasEnded={isTerminal(experiment.state)}
        hasReported={Object.keys(sample.data?.summary ?? {}).length > 0}
      />
    );
  return (
    <div>
      <ChartControls
        search={asked}
        xNames={xChoices(names)}
        metrics={options}
        metric={chosen}
        isXChosen={ownX !== undefined}
      />
      {error !== undefined && <ProblemView error={error} />}
      <CurveCard
        title={`Learning curves: ${metric}`}
        curves={curves}
        series={requests}
        smoothing={smoothing}
        search={search}
        syncKey={`experiment-${experiment.id}`}
        height={320}
        onPick={(trial) => void navigate({ to: "/trials/$id", params: { id: Number(trial) } })}
        legendNote={noteOn(drawn.length, numAll, experiment)}
        isWaiting={isWaiting}
      />
    </div>
  );
}

/** Return the searched metric, or where nobody reports it the first one that is reported. */
function preferredMetric(names: readonly MetricName[], searched: string): string {
  const isSearched = (name: MetricName) => name.group === "validation" && name.metric === searched;
  const ranked = chartable(names);
  const found =
    names.find(isSearched) ?? ranked.find(({ group }) => group === "validation") ?? ranked[0];
  return found ? `${found.group}/${found.metric}` : `validation/${searched}`;
}

export function noteOn(drawn: number, all: number, experiment: Experiment): string | undefined {
  const most = drawn < all ? `The best ${drawn} of ${plural(all, "trial")}. ` : "";
  if (drawn <= FEW_CURVES) return most || undefined;
  const best = experiment.best_trial_id;
  return `${most}Colours go from worse (faint) to better (strong)${best === null ? "" : `; the thick line is trial ${best}, the best`}. Click a line to open its trial.`;
}

function toCurves(
  trials: readonly Trial[],
  series: readonly (Series | undefined)[],
  isDark: boolean,
  best: number | null,
): Curve[] {
  const isFew = trials.length <= FEW_CURVES;
  const curves = trials.flatMap((trial, i): Curve[] => {
    const found = series[i];
    if (found === undefined || found.xs.length === 0) return [];
    const isBest = trial.id === best;
    const style = isFew
      ? lineStyle(i, isDark)
      : { color: scaleColor(1 - i / Math.max(1, trials.length - 1), isDark), dash: [] };
    const color = isBest && !isFew ? (isDark ? "#ff8a5c" : "#b45309") : style.color;
    const width = isBest ? 3 : 1.5;
    return [{ id: String(trial.id), label: `Trial ${trial.id}`, ...found, ...style, color, width }];
  });
  // The best is drawn last, over the others.
  return isFew ? curves : curves.reverse();
}
