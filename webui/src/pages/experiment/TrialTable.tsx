import { useMemo } from "react";

import type { Experiment, Trial } from "../../api/types";
import { Lasted } from "../../components/Ago";
import { type Column, DataTable, type Sort, widthFor } from "../../components/DataTable";
import { RowLink } from "../../components/links";
import { Sparkline } from "../../components/Sparkline";
import { StateBadge } from "../../components/StateBadge";
import { differing, flatten } from "../../lib/flatten";
import { formatNumber, formatValue, toNumber } from "../../lib/numbers";
import { shownMetric, shownTrialState } from "../../lib/states";

interface TrialTableProps {
  experiment: Experiment;
  trials: readonly Trial[];
  sort?: Sort;
  onSort?: (sort: Sort) => void;
  selected?: ReadonlySet<string>;
  onSelect?: (selected: Set<string>) => void;
  onNearEnd?: () => void;
}

export function TrialTable({ experiment, trials, ...rest }: TrialTableProps) {
  const hparams = useMemo(() => {
    const all = trials.map((trial) => flatten(trial.hparams));
    // What is the same in all trials tells none of them from the others.
    const names = all.length > 1 ? differing(all) : Object.keys(all[0] ?? {});
    return [...names].sort();
  }, [trials]);
  const hasRestarts = trials.some((trial) => trial.restarts > 0);
  const columns = useMemo(
    () => columnsFor(experiment, hparams).filter(({ id }) => id !== "restarts" || hasRestarts),
    [experiment, hparams, hasRestarts],
  );
  return (
    <DataTable
      label={`Trials of ${experiment.name}`}
      rows={trials}
      columns={columns}
      rowId={(trial) => String(trial.id)}
      rowLabel={(trial) => `trial ${trial.id}`}
      highlighted={experiment.best_trial_id === null ? undefined : String(experiment.best_trial_id)}
      {...rest}
    />
  );
}

function columnsFor(experiment: Experiment, hparams: readonly string[]): Column<Trial>[] {
  const metric = shownMetric(experiment);
  const ofMetric: Column<Trial>[] = [
    {
      id: "metric",
      title: `Best ${metric}`,
      width: widthFor(`Best ${metric}`, 104),
      isNumeric: true,
      isSortable: true,
      cell: (trial) => formatNumber(toNumber(trial.best_metric)),
    },
    {
      id: "latest",
      title: "Latest",
      width: 88,
      isNumeric: true,
      isSortable: true,
      cell: (trial) => formatNumber(toNumber(trial.latest_metric)),
    },
    {
      id: "curve",
      title: "Curve",
      width: 92,
      cell: (trial) => <Sparkline trialId={trial.id} metric={metric} />,
    },
  ];
  return [
    {
      id: "id",
      title: "Trial",
      width: 92,
      isPinned: true,
      isSortable: true,
      cell: (trial) => (
        <RowLink to={`/trials/${trial.id}`}>
          {trial.id === experiment.best_trial_id ? `${trial.id} ★ best` : trial.id}
        </RowLink>
      ),
    },
    {
      id: "state",
      title: "State",
      width: 118,
      isSortable: true,
      cell: (trial) => <StateBadge state={shownTrialState(trial, experiment.state)} />,
    },
    ...(metric === null ? [] : ofMetric),
    {
      id: "steps",
      title: "Batches",
      width: 80,
      isNumeric: true,
      isSortable: true,
      cell: (trial) => formatNumber(trial.steps_completed),
    },
    ...hparams.map((name): Column<Trial> => ({
      id: `hp.${name}`,
      title: name,
      width: widthFor(name, 104),
      isNumeric: true,
      isSortable: true,
      cell: (trial) => formatValue(flatten(trial.hparams)[name]),
    })),
    {
      id: "duration",
      title: "Duration",
      width: 108,
      isNumeric: true,
      cell: (trial) => <Lasted from={trial.started_at} to={trial.ended_at} />,
    },
    {
      id: "restarts",
      title: "Restarts",
      width: 90,
      isNumeric: true,
      isSortable: true,
      cell: (trial) => trial.restarts,
    },
    {
      id: "why",
      title: "Why it ended",
      width: 150,
      doesGrow: true,
      cell: (trial) => (
        <span title={trial.error ?? trial.stop_reason ?? undefined}>
          {trial.error ?? trial.stop_reason ?? ""}
        </span>
      ),
    },
  ];
}
