import { useParams, useSearch } from "@tanstack/react-router";
import { useMemo } from "react";

import { trialLogs } from "../../api/logs";
import { LogView } from "../../components/LogView";

export function TrialLogs() {
  const { id } = useParams({ from: "/trials/$id" });
  const search = useSearch({ from: "/trials/$id/logs" });
  const source = useMemo(() => trialLogs(id), [id]);
  return (
    <LogView
      key={id}
      source={source}
      search={search}
      name={`trial-${id}`}
      isOf={(event) => event.trial_id === id}
    />
  );
}
