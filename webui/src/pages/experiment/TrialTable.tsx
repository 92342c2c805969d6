import { useMemo } from "react";

import type { Experiment, Trial } from "../../api/types";
import { Lasted } from "../../components/Ago";
import { type Column, DataTable, type Sort } from "../../components/DataTable";
import { RowLink } from "../../components/links";
import { StateBadge } from "../../components/StateBadge";
import { flatten } from "../../lib/flatten";
import { formatNumber, formatValue, toNumber } from "../../lib/numbers";
import { shownTrialState } from "../../lib/states";

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
  const hparams = useMemo(
    () => [...new Set(trials.flatMap((trial) => Object.keys(flatten(trial.hparams))))].sort(),
    [trials],
  );
  const columns = useMemo(() => columnsFor(experiment, hparams), [experiment, hparams]);
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
  const isPaused = experiment.state === "PAUSED";
  return [
    {
      id: "id",
      title: "Trial",
      width: 100,
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
      width: 138,
      isSortable: true,
      cell: (trial) => <StateBadge state={shownTrialState(trial, isPaused)} />,
    },
    {
      id: "metric",
      title: `Best ${experiment.metric}`,
      width: 140,
      isNumeric: true,
      isSortable: true,
      cell: (trial) => formatNumber(toNumber(trial.best_metric)),
    },
    {
      id: "latest",
      title: "Latest",
      width: 100,
      isNumeric: true,
      isSortable: true,
      cell: (trial) => formatNumber(toNumber(trial.latest_metric)),
    },
    {
      id: "steps",
      title: "Batches",
      width: 95,
      isNumeric: true,
      isSortable: true,
      cell: (trial) => formatNumber(trial.steps_completed),
    },
    ...hparams.map((name): Column<Trial> => ({
      id: `hp.${name}`,
      title: name,
      width: 125,
      isNumeric: true,
      isSortable: true,
      cell: (trial) => formatValue(flatten(trial.hparams)[name]),
    })),
    {
      id: "duration",
      title: "Duration",
      width: 110,
      isNumeric: true,
      cell: (trial) => <Lasted from={trial.created_at} to={trial.ended_at} />,
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
      width: 240,
      doesGrow: true,
      cell: (trial) => (
        <span title={trial.error ?? trial.stop_reason ?? undefined}>
          {trial.error ?? trial.stop_reason ?? ""}
        </span>
      ),
    },
  ];
}
