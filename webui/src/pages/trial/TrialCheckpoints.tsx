import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";

import { experimentQuery, trialCheckpointsQuery, trialQuery } from "../../api/queries";
import { CheckpointTable } from "../../components/CheckpointTable";
import { Empty, ProblemView, Waiting } from "../../components/Feedback";
import { shownMetric } from "../../lib/states";

export function TrialCheckpoints() {
  const { id } = useParams({ from: "/trials/$id" });
  const trial = useQuery(trialQuery(id)).data;
  const experiment = useQuery({
    ...experimentQuery(trial?.experiment_id ?? 0),
    enabled: trial !== undefined,
  }).data;
  const answer = useQuery(trialCheckpointsQuery(id));
  if (answer.isPending) return <Waiting what="checkpoints" />;
  if (answer.isError)
    return <ProblemView error={answer.error} onRetry={() => void answer.refetch()} />;
  if (answer.data.length === 0)
    return (
      <Empty title="No checkpoints">
        The trial stored none: in your code, <code>core_context.checkpoint.store_path(...)</code>.
      </Empty>
    );
  const metric = experiment ? shownMetric(experiment) : "Metric";
  return <CheckpointTable checkpoints={answer.data} metric={metric} />;
}
