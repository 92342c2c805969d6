import { useParams, useSearch } from "@tanstack/react-router";

import { Empty } from "../../components/Feedback";
import { PROFILER_GROUPS } from "../../lib/metrics";
import { MetricGrid } from "./MetricGrid";

const isProfilerGroup = (group: string) => PROFILER_GROUPS.has(group);

export function Profiler() {
  const { id } = useParams({ from: "/trials/$id" });
  const search = useSearch({ from: "/trials/$id/profiler" });
  return (
    <MetricGrid
      trialId={id}
      search={search}
      isWanted={isProfilerGroup}
      empty={
        <Empty title="Nothing was profiled" command="profiling: {enabled: true}">
          Throughput, waits for data and timings of each part of a step are recorded when the config
          says:
        </Empty>
      }
    />
  );
}
