/** Runs beside the charts of all their metrics; the address holds the whole view. */

import { SegmentedControl, Text } from "@mantine/core";
import { useThrottledCallback } from "@mantine/hooks";
import { useQueries, useQuery, useQueryClient } from "@tanstack/react-query";
import { useSearch } from "@tanstack/react-router";
import { useMemo, useState } from "react";

import { keys } from "../api/keys";
import { problemOf } from "../api/problem";
import { experimentQuery, goneQuery, MOST_RUNS, runFilterOf, runsQuery } from "../api/queries";
import { useSearchChange } from "../charts/ChartControls";
import { Empty, Failure, ProblemView, Waiting } from "../components/Feedback";
import { PageHead } from "../components/PageHead";
import { isQueryError } from "../components/QueryBox";
import { namesOf, type Row, rowsOf, type Run, runsOf, sorted, switchedOn } from "../lib/runs";
import type { CompareSearch } from "../lib/search";
import { useTitle } from "../lib/title";
import { useEvents } from "../live/useLive";
import classes from "./compare/Compare.module.css";
import { Differences } from "./compare/Differences";
import { Panels } from "./compare/Panels";
import { FIRST_ON, RunList } from "./compare/RunList";
import { SavedViews } from "./compare/SavedViews";
import { CompareMedia } from "./CompareMedia";

/** What a comparison shows of many runs need not change with each report. */
const LIVE_MS = 5000;
const MOST_NAMED = 10;
const NOTHING: string[] = [];
const NOBODY: number[] = [];

export function Compare() {
  useTitle("Compare");
  const search = useSearch({ from: "/compare" });
  const change = useSearchChange();
  const list = useQuery(runsQuery(runFilterOf(search)));
  // The box in which a query is mended stays while the mended one is answered.
  const [hasAnswered, setAnswered] = useState(false);
  if (!hasAnswered && !list.isPending) setAnswered(true);
  useFollowing();
  const { group = NOTHING, sort, base, on = NOTHING, off = NOTHING, top = NOTHING } = search;
  const first = search.first ?? FIRST_ON;
  const runs = useMemo(
    () => (list.data ? runsOf(list.data.items, list.data.experiments) : []),
    [list.data],
  );
  const rows = useMemo(() => {
    const onTop = new Set(base === undefined ? top : [base, ...top]);
    return sorted(rowsOf(runs, group), sort, onTop);
  }, [runs, group, sort, base, top]);
  const chosen = useMemo(() => switchedOn(rows, first, on, off), [rows, first, on, off]);
  const shown = useMemo(() => rows.filter(({ key }) => chosen.has(key)), [rows, chosen]);
  const gone = useGone(search, runs, list.isSuccess && !list.isPlaceholderData);
  const view = search.view ?? "charts";
  return (
    <>
      <PageHead title="Compare trials" actions={<SavedViews search={search} />} />
      {list.isError && !isQueryError(list.error) && (
        <ProblemView error={list.error} onRetry={() => void list.refetch()} />
      )}
      {gone !== "" && <Failure title="Not here any more" message={gone} />}
      {!hasAnswered && <Waiting what="runs" />}
      {hasAnswered && (!list.isError || isQueryError(list.error)) && (
        <div className={classes.workspace}>
          <RunList
            rows={rows}
            runs={runs}
            total={
              (search.trials?.length ?? 0) > MOST_RUNS
                ? (search.trials?.length ?? 0)
                : (list.data?.total ?? 0)
            }
            error={list.error}
            shown={chosen}
            search={search}
          />
          <section aria-label="Comparison" className={classes.side}>
            <SegmentedControl
              size="xs"
              mb="sm"
              aria-label="View"
              data={[
                { value: "charts", label: "Charts" },
                { value: "media", label: "Media" },
                { value: "differences", label: "What differs" },
              ]}
              value={view}
              onChange={(value) => change({ view: value === "charts" ? undefined : value })}
            />
            {list.isPending ? (
              <Waiting what="runs" />
            ) : runs.length === 0 ? (
              <Empty title="Nothing to compare yet">
                No run is found. Change the search, or start an experiment.
              </Empty>
            ) : shown.length === 0 ? (
              <Empty title="All runs are switched off">Switch some on in the list.</Empty>
            ) : view === "charts" ? (
              <Panels rows={shown} runs={runs} search={search} />
            ) : view === "media" ? (
              <CompareMedia runs={labelled(shown)} />
            ) : (
              <Differences rows={shown} search={search} />
            )}
            {shown.length > 0 && (
              <Text size="xs" c="dimmed" mt="md">
                This view is in the address: copy it to share it, or save it as a view.
              </Text>
            )}
          </section>
        </div>
      )}
    </>
  );
}

/** Return a sentence about the runs that a view names and that are deleted. */
function useGone(search: CompareSearch, runs: readonly Run[], isRead: boolean): string {
  const { trials = [], experiments = [], on = [], top = [], base = "", group } = search;
  const there = new Set(runs.map(({ id }) => id));
  const rows = group === undefined ? [...on, ...top, base] : [];
  const named = [...trials, ...rows.map(Number).filter((id) => Number.isInteger(id) && id > 0)];
  const missing = [...new Set(named)].filter((id) => !there.has(id)).slice(0, MOST_RUNS);
  // A filter may leave them out as well.
  const gone = useQuery(goneQuery(isRead ? missing : NOBODY)).data ?? NOBODY;
  const known = new Set(runs.map(({ experimentId }) => experimentId));
  const unknown = experiments.filter((id) => !known.has(id)).slice(0, MOST_RUNS);
  const answers = useQueries({
    queries: (isRead ? unknown : NOBODY).map((id) => experimentQuery(id)),
  });
  const deleted = unknown.filter((_, i) => problemOf(answers[i]?.error).status === 404);
  return [
    gone.length > 0 ? `There is no trial ${listed(gone)}.` : "",
    deleted.length > 0 ? `There is no experiment ${listed(deleted)}.` : "",
  ]
    .filter(Boolean)
    .join(" ");
}

/** Return the runs of rows with their names. */
function labelled(rows: readonly Row[]): { id: number; label: string }[] {
  const names = namesOf(rows.flatMap(({ runs }) => runs));
  return [...names].map(([id, label]) => ({ id, label }));
}

/** Read anew what has changed, now and then. */
function useFollowing(): void {
  const client = useQueryClient();
  const renew = useThrottledCallback(
    () => void client.invalidateQueries({ queryKey: keys.compared() }, { cancelRefetch: false }),
    LIVE_MS,
  );
  useEvents(({ kind }) => {
    if (kind !== "progress") renew();
  });
}

function listed(ids: readonly number[]): string {
  const more = ids.length > MOST_NAMED ? ` and ${ids.length - MOST_NAMED} more` : "";
  return `${ids.slice(0, MOST_NAMED).join(", ")}${more}`;
}
