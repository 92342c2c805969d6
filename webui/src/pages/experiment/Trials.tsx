import { Button, Group, Select, Text } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useNavigate, useParams, useSearch } from "@tanstack/react-router";
import { useCallback, useMemo } from "react";

import { experimentQuery, trialsQuery } from "../../api/queries";
import { useSearchChange } from "../../charts/ChartControls";
import { Empty, ProblemView, Waiting } from "../../components/Feedback";
import { plural } from "../../lib/numbers";
import { TRIAL_STATES } from "../../lib/search";
import { TrialTable } from "./TrialTable";

export function Trials() {
  const { id } = useParams({ from: "/experiments/$id" });
  const search = useSearch({ from: "/experiments/$id/trials" });
  const change = useSearchChange();
  const navigate = useNavigate();
  const selected = useMemo(() => new Set((search.selected ?? []).map(String)), [search.selected]);
  const select = useCallback(
    (ids: ReadonlySet<string>) =>
      change({ selected: ids.size > 0 ? [...ids].map(Number) : undefined }),
    [change],
  );
  const experiment = useQuery(experimentQuery(id)).data;
  const list = useInfiniteQuery(
    trialsQuery(id, {
      sortBy: search.sort?.replace(/^hp\./, "hparam:") ?? "metric",
      // Without a choice the best is first, whichever direction that is.
      order: search.sort === undefined ? undefined : search.desc ? "desc" : "asc",
      states: search.state && [search.state],
    }),
  );
  const { hasNextPage, isFetching, fetchNextPage } = list;
  const loadMore = useCallback(() => {
    if (hasNextPage && !isFetching) void fetchNextPage();
  }, [hasNextPage, isFetching, fetchNextPage]);
  const rows = useMemo(() => list.data?.pages.flatMap((page) => page.items) ?? [], [list.data]);
  const total = list.data?.pages[0]?.total ?? rows.length;

  if (!experiment || list.isPending) return <Waiting what="trials" />;
  if (list.isError) return <ProblemView error={list.error} onRetry={() => void list.refetch()} />;
  return (
    <>
      <Group justify="space-between" mb="sm">
        <Group>
          <Select
            aria-label="State"
            placeholder="Any state"
            size="xs"
            w={140}
            clearable
            data={TRIAL_STATES.map((state) => ({ value: state, label: label(state) }))}
            value={search.state ?? null}
            onChange={(value) => change({ state: value ?? undefined })}
          />
          <Text size="sm" c="dimmed" role="status">
            {plural(total, "trial")}
            {selected.size > 0 && `, ${selected.size} selected`}
          </Text>
        </Group>
        <Button
          size="xs"
          disabled={rows.length === 0}
          onClick={() =>
            void navigate({
              to: "/compare",
              search: (selected.size > 0
                ? { trials: [...selected].map(Number) }
                : { experiments: [id] }) as never,
            })
          }
        >
          {selected.size > 0 ? "Compare selected" : "Compare all trials"}
        </Button>
      </Group>
      {rows.length === 0 ? (
        <Empty title="No trials here">
          {search.state ? "None is in this state." : "The search creates them as slots come free."}
        </Empty>
      ) : (
        <TrialTable
          experiment={experiment}
          trials={rows}
          sort={{ by: search.sort ?? "", isDescending: search.desc === true }}
          onSort={(sort) => change({ sort: sort.by, desc: sort.isDescending || undefined })}
          selected={selected}
          onSelect={select}
          onNearEnd={loadMore}
        />
      )}
    </>
  );
}

function label(state: string): string {
  if (state === "ACTIVE") return "Not ended";
  return state.charAt(0) + state.slice(1).toLowerCase();
}
