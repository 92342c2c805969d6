import { useQuery } from "@tanstack/react-query";
import { useParams, useSearch } from "@tanstack/react-router";
import { useMemo } from "react";

import { trialLogs } from "../../api/logs";
import { experimentQuery, trialQuery } from "../../api/queries";
import { LogView, UNMANAGED_NOTE } from "../../components/LogView";

export function TrialLogs() {
  const { id } = useParams({ from: "/trials/$id" });
  const search = useSearch({ from: "/trials/$id/logs" });
  const trial = useQuery(trialQuery(id)).data;
  const experiment = useQuery({
    ...experimentQuery(trial?.experiment_id ?? 0),
    enabled: trial !== undefined,
  }).data;
  const source = useMemo(() => trialLogs(id), [id]);
  return (
    <LogView
      key={id}
      source={source}
      search={search}
      name={`trial-${id}`}
      isOf={(event) => event.trial_id === id}
      note={experiment?.run_dir ? UNMANAGED_NOTE : undefined}
    />
  );
}
