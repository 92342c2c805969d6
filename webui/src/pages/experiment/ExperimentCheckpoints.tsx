import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";

import { experimentCheckpointsQuery, experimentQuery } from "../../api/queries";
import { CheckpointTable } from "../../components/CheckpointTable";
import { Empty, ProblemView, Waiting } from "../../components/Feedback";
import { shownMetric } from "../../lib/states";

export function ExperimentCheckpoints() {
  const { id } = useParams({ from: "/experiments/$id" });
  const experiment = useQuery(experimentQuery(id)).data;
  const list = useInfiniteQuery(experimentCheckpointsQuery(id));
  if (list.isPending) return <Waiting what="checkpoints" />;
  if (list.isError) return <ProblemView error={list.error} onRetry={() => void list.refetch()} />;
  const checkpoints = list.data.pages.flatMap((page) => page.items);
  if (checkpoints.length === 0)
    return (
      <Empty title="No checkpoints">
        No trial stored any: in your code, <code>core_context.checkpoint.store_path(...)</code>.
      </Empty>
    );
  return (
    <CheckpointTable
      checkpoints={checkpoints}
      metric={experiment ? shownMetric(experiment) : "Metric"}
      hasTrials
    />
  );
}
