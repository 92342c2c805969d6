import { useParams, useSearch } from "@tanstack/react-router";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useMemo } from "react";

import { experimentLogs, trialLogs } from "../../api/logs";
import { experimentQuery, trialsQuery } from "../../api/queries";
import { LogView, UNMANAGED_NOTE } from "../../components/LogView";
import { Waiting } from "../../components/Feedback";

export function ExperimentLogs() {
  const { id } = useParams({ from: "/experiments/$id" });
  const search = useSearch({ from: "/experiments/$id/logs" });
  // Clients of other trackers have no directory, and send what a script prints.
  const hasDirectory = Boolean(useQuery(experimentQuery(id)).data?.run_dir);
  const list = useInfiniteQuery(trialsQuery(id, {}));
  const trials = list.data?.pages[0]?.items;
  // With one trial its own lines can be followed and searched from an id on.
  const only = trials?.length === 1 ? trials[0]?.id : undefined;
  const source = useMemo(() => (only ? trialLogs(only) : experimentLogs(id)), [only, id]);
  if (list.isPending) return <Waiting what="logs" />;
  return (
    <LogView
      key={`${id}-${only}`}
      source={source}
      search={search}
      name={`experiment-${id}`}
      isOf={(event) => event.experiment_id === id}
      showsTrials={only === undefined}
      note={hasDirectory ? UNMANAGED_NOTE : undefined}
    />
  );
}
