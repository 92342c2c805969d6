import { Button, Group, Select, Switch, Text } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useSearch } from "@tanstack/react-router";
import { useCallback, useMemo, useState } from "react";

import { experimentsQuery, sessionQuery } from "../api/queries";
import { useStars } from "../api/stars";
import type { Experiment } from "../api/types";
import { useSearchChange } from "../charts/ChartControls";
import { Ago, Lasted } from "../components/Ago";
import { BulkActions } from "../components/BulkActions";
import { type Column, DataTable, widthFor } from "../components/DataTable";
import { Empty, ProblemView, Waiting } from "../components/Feedback";
import { LinkButton, RowLink } from "../components/links";
import { RowStar } from "../components/Marks";
import { PageHead } from "../components/PageHead";
import { isQueryError, QueryBox } from "../components/QueryBox";
import { ProgressCell } from "../components/ProgressCell";
import { Sparkline } from "../components/Sparkline";
import { StateBadge } from "../components/StateBadge";
import { formatNumber, formatValue, plural, toNumber } from "../lib/numbers";
import type { Condition } from "../lib/conditions";
import { EXPERIMENT_STATES } from "../lib/search";
import { shownExperimentState, shownMetric, shownProgress, workWord } from "../lib/states";
import { useTitle } from "../lib/title";
import { ColumnChoice, columnTitle, ConditionChoice } from "./ExperimentColumns";

const MOST_IN_ADDRESS = 100;
const NONE: readonly Experiment[] = [];
const NO_COLUMNS: readonly string[] = [];
const NO_CONDITIONS: readonly Condition[] = [];

export function Experiments() {
  useTitle("Experiments");
  const search = useSearch({ from: "/experiments" });
  const change = useSearchChange();
  // More than an address takes are kept here alone.
  const [many, setMany] = useState<ReadonlySet<string> | null>(null);
  const selected = useMemo(
    () => new Set(many ?? search.selected?.map(String)),
    [many, search.selected],
  );
  const extra = search.columns ?? NO_COLUMNS;
  const session = useQuery(sessionQuery);
  const isShared = session.data?.is_shared === true;
  const { starred, isKnown, toggle } = useStars();
  const owner =
    isShared && !search.all && !search.starred ? (session.data?.owner ?? undefined) : undefined;
  const filter = {
    states: search.state && [search.state],
    query: search.q,
    isArchived: search.archived,
    owner,
    only: search.starred ? [...starred] : undefined,
    conditions: search.where,
  };
  // Other filters find others: what was chosen by those before is not.
  const [isAllMatching, setIsAllMatching] = useStateOf(JSON.stringify(filter), false);
  const list = useInfiniteQuery({
    ...experimentsQuery({
      ...filter,
      columns: search.columns,
      sortBy: search.sort,
      order: search.sort === undefined || search.desc ? "desc" : "asc",
    }),
    enabled: !search.starred || isKnown,
  });
  const { hasNextPage, isFetching, fetchNextPage } = list;
  const loadMore = useCallback(() => {
    if (hasNextPage && !isFetching) void fetchNextPage();
  }, [hasNextPage, isFetching, fetchNextPage]);
  const rows = useMemo(() => list.data?.pages.flatMap((page) => page.items) ?? NONE, [list.data]);
  const total = list.data?.pages[0]?.total ?? rows.length;
  const columns = useMemo(
    () => columnsFor(extra, isShared, { starred, toggle }),
    [extra, isShared, starred, toggle],
  );
  const isAllLoadedSelected = rows.length > 0 && selected.size >= rows.length;
  const select = (rows: Set<string>) => {
    const isLong = rows.size > MOST_IN_ADDRESS;
    setMany(isLong ? rows : null);
    change({ selected: rows.size > 0 && !isLong ? [...rows].map(Number) : undefined });
    setIsAllMatching(false);
  };
  const numSelected = isAllMatching ? total : selected.size;

  return (
    <>
      <PageHead
        title="Experiments"
        actions={
          <LinkButton to="/new" size="sm">
            New experiment
          </LinkButton>
        }
      />
      <Group gap="sm" mb="sm">
        <QueryBox
          label="Search by name, label or id"
          flex="1 1 260px"
          maw={420}
          value={search.q ?? ""}
          onChange={(q) => change({ q: q || undefined })}
          error={list.error}
        />
        <Select
          aria-label="State"
          placeholder="Any state"
          size="xs"
          w={140}
          clearable
          data={EXPERIMENT_STATES.map((state) => ({
            value: state,
            label:
              state === "ACTIVE"
                ? "Queued, running"
                : state.charAt(0) + state.slice(1).toLowerCase(),
          }))}
          value={search.state ?? null}
          onChange={(state) => change({ state: state ?? undefined })}
        />
        <ColumnChoice
          chosen={extra}
          onChange={(columns) => change({ columns: columns.length > 0 ? columns : undefined })}
        />
        <ConditionChoice
          chosen={search.where ?? NO_CONDITIONS}
          onChange={(where) => change({ where: where.length > 0 ? where : undefined })}
        />
        <Switch
          size="sm"
          label="Archived"
          checked={search.archived === true}
          onChange={(event) => change({ archived: event.currentTarget.checked || undefined })}
        />
        <Switch
          size="sm"
          label="Starred"
          checked={search.starred === true}
          onChange={(event) => change({ starred: event.currentTarget.checked || undefined })}
        />
        {isShared && !search.starred && (
          <Switch
            size="sm"
            label="Mine"
            checked={!search.all}
            onChange={(event) => change({ all: !event.currentTarget.checked || undefined })}
          />
        )}
        <Text size="sm" c="dimmed" role="status">
          {list.isSuccess && plural(total, "experiment")}
          {numSelected > 0 && `, ${numSelected.toLocaleString("en")} selected`}
        </Text>
        {isAllLoadedSelected && hasNextPage && !isAllMatching && (
          <Button size="xs" variant="default" onClick={() => setIsAllMatching(true)}>
            Select all {total.toLocaleString("en")} that match
          </Button>
        )}
        {selected.size > 0 && (
          <>
            <LinkButton
              to="/compare"
              search={{ experiments: [...selected].map(Number) } as never}
              size="xs"
              variant="default"
            >
              Compare
            </LinkButton>
            <BulkActions
              experiments={rows.filter((one) => selected.has(String(one.id)))}
              matching={isAllMatching ? filter : null}
              total={total}
              isShared={isShared}
              onDone={() => select(new Set())}
            />
          </>
        )}
      </Group>
      {list.isPending && <Waiting what="experiments" />}
      {list.isError && !isQueryError(list.error) && (
        <ProblemView error={list.error} onRetry={() => void list.refetch()} />
      )}
      {list.isSuccess && rows.length === 0 && (
        <NothingHere
          isFiltered={Boolean(search.q ?? search.state ?? search.where ?? search.starred ?? owner)}
        />
      )}
      {rows.length > 0 && (
        <DataTable
          label="Experiments"
          rows={rows}
          columns={columns}
          rowId={(one) => String(one.id)}
          rowLabel={(one) => one.name}
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

/** A state that begins anew with each key. */
function useStateOf<Value>(key: string, initial: Value): [Value, (value: Value) => void] {
  const [kept, setKept] = useState({ key, value: initial });
  const set = useCallback((value: Value) => setKept({ key, value }), [key]);
  return [kept.key === key ? kept.value : initial, set];
}

function NothingHere({ isFiltered }: { isFiltered: boolean }) {
  if (isFiltered)
    return (
      <Empty title="No experiment matches">
        Change or clear the search, the state and the filters.
      </Empty>
    );
  return (
    <Empty title="No experiments yet" command="paceline experiment create config.yaml .">
      Create one in the directory of your code:
    </Empty>
  );
}

const OWNER: Column<Experiment> = {
  id: "owner",
  title: "Owner",
  width: 96,
  isSortable: true,
  cell: (one) => one.owner,
};

type Stars = Pick<ReturnType<typeof useStars>, "starred" | "toggle">;

function columnsFor(
  extra: readonly string[],
  isShared: boolean,
  { starred, toggle }: Stars,
): Column<Experiment>[] {
  const fixed: Column<Experiment>[] = [
    { id: "id", title: "Id", width: 48, isNumeric: true, isSortable: true, cell: (one) => one.id },
    {
      id: "name",
      title: "Name",
      width: 156,
      narrowWidth: 146,
      isPinned: true,
      doesGrow: true,
      isSortable: true,
      cell: (one) => (
        <span className="row-name">
          <RowStar name={one.name} is={starred.has(one.id)} onClick={() => toggle(one.id)} />
          <RowLink to={`/experiments/${one.id}`} title={one.name}>
            {one.name}
          </RowLink>
        </span>
      ),
    },
    {
      id: "state",
      title: "State",
      width: 118,
      isSortable: true,
      cell: (one) => <StateBadge state={shownExperimentState(one)} />,
    },
    {
      id: "progress",
      title: "Progress",
      width: 104,
      isSortable: true,
      cell: (one) => <ProgressCell value={shownProgress(one)} label={`Progress of ${one.name}`} />,
    },
    {
      id: "best_metric",
      title: "Best",
      width: 84,
      isNumeric: true,
      isSortable: true,
      cell: (one) => formatNumber(toNumber(one.best_metric)),
    },
    {
      id: "curve",
      title: "Curve",
      width: 92,
      cell: (one) => <Sparkline trialId={one.best_trial_id} metric={shownMetric(one)} />,
    },
    {
      id: "metric",
      title: "Metric",
      width: 112,
      isSortable: true,
      cell: (one) => shownMetric(one) ?? "–",
    },
    {
      id: "num_trials",
      title: "Trials",
      width: 60,
      isNumeric: true,
      isSortable: true,
      cell: (one) => one.num_trials,
    },
    {
      id: "searcher",
      title: "Search",
      width: 118,
      isSortable: true,
      cell: (one) => workWord(one, "no master"),
    },
  ];
  const chosen = extra.map((id): Column<Experiment> => ({
    id,
    title: columnTitle(id),
    width: widthFor(columnTitle(id), 96),
    isNumeric: true,
    isSortable: true,
    cell: (one) => formatValue(one.values?.[id]),
  }));
  return [
    ...fixed,
    ...(isShared ? [OWNER] : []),
    ...chosen,
    {
      id: "created_at",
      title: "Created",
      width: 104,
      isSortable: true,
      cell: (one) => <Ago time={one.created_at} isShort />,
    },
    {
      id: "duration",
      title: "Duration",
      width: 108,
      isNumeric: true,
      cell: (one) => <Lasted from={one.created_at} to={one.ended_at} />,
    },
  ];
}
