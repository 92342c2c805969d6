import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";
import { useSearch } from "@tanstack/react-router";

import { trialQuery } from "../../api/queries";
import { NoCurves } from "../../components/Feedback";
import { isProfilerGroup } from "../../lib/metrics";
import { isTerminal } from "../../lib/states";
import { MetricGrid } from "./MetricGrid";

const isMetricGroup = (group: string) => !isProfilerGroup(group);

export function Metrics() {
  const { id } = useParams({ from: "/trials/$id" });
  const search = useSearch({ from: "/trials/$id/" });
  const trial = useQuery(trialQuery(id)).data;
  return (
    <MetricGrid
      trialId={id}
      search={search}
      isWanted={isMetricGroup}
      empty={
        <NoCurves
          who="the trial"
          call="report_training_metrics"
          hasEnded={trial !== undefined && isTerminal(trial.state)}
          hasReported={Object.keys(trial?.summary ?? {}).some(isMetricGroup)}
        />
      }
    />
  );
}
