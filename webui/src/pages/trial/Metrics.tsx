import { useParams } from "@tanstack/react-router";
import { useSearch } from "@tanstack/react-router";

import { Empty } from "../../components/Feedback";
import { isProfilerGroup } from "../../lib/metrics";
import { MetricGrid } from "./MetricGrid";

const isMetricGroup = (group: string) => !isProfilerGroup(group);

export function Metrics() {
  const { id } = useParams({ from: "/trials/$id" });
  const search = useSearch({ from: "/trials/$id/" });
  return (
    <MetricGrid
      trialId={id}
      search={search}
      isWanted={isMetricGroup}
      empty={
        <Empty title="No metrics yet">
          Curves appear as soon as the trial reports: in your code,{" "}
          <code>core_context.train.report_training_metrics(...)</code>.
        </Empty>
      }
    />
  );
}
