import { useParams, useSearch } from "@tanstack/react-router";

import { Empty } from "../../components/Feedback";
import { isProfilerGroup } from "../../lib/metrics";
import { MetricGrid } from "./MetricGrid";
import { StragglerCard } from "./StragglerCard";
import { TimeCard } from "./TimeCard";

export function Profiler() {
  const { id } = useParams({ from: "/trials/$id" });
  const search = useSearch({ from: "/trials/$id/profiler" });
  return (
    <>
      <TimeCard trialId={id} />
      <StragglerCard trialId={id} />
      <MetricGrid
        trialId={id}
        search={search}
        isWanted={isProfilerGroup}
        empty={
          <Empty title="Nothing was profiled" command="profiling: {enabled: true}">
            The trainers record throughput and waits for data by themselves, and the times of each
            part of a step when the config says:
          </Empty>
        }
      />
    </>
  );
}
