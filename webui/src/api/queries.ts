/** What the pages read. */

import { infiniteQueryOptions, keepPreviousData, queryOptions } from "@tanstack/react-query";

import { api, fetchText, unwrap } from "./client";
import type { BulkArguments, BulkWord } from "./actions";
import { JoinedRequests } from "./joined";
import { keys } from "./keys";
import { noteAnswer } from "./session";
import { noteFirstCursor } from "../live/stream";
import type { Condition } from "../lib/conditions";
import type { MetricName } from "../lib/metrics";
import type { CompareSearch } from "../lib/search";
import { GOING_STATES, TERMINAL_STATES } from "../lib/states";
import type { components } from "./schema";
import type { ExperimentState, TrialState, UsageKey } from "./types";

const PAGE = 200;

export const masterQuery = queryOptions({
  queryKey: keys.master(),
  queryFn: async () => {
    const master = await unwrap(api.GET("/api/v1/master"));
    noteAnswer(true);
    noteFirstCursor(master.events_after);
    return master;
  },
});

/** Who is signed in, and whether there are other users. */
export const sessionQuery = queryOptions({
  queryKey: keys.session(),
  queryFn: () => unwrap(api.GET("/api/v1/session")),
});

export const usersQuery = queryOptions({
  queryKey: keys.users(),
  queryFn: () => unwrap(api.GET("/api/v1/users")),
});

export const projectsQuery = queryOptions({
  queryKey: keys.projects(),
  queryFn: () => unwrap(api.GET("/api/v1/projects")),
});

export const quotasQuery = queryOptions({
  queryKey: keys.quotas(),
  queryFn: () => unwrap(api.GET("/api/v1/quotas")),
});

/** Templates and policies; those that apply are told for a project. */
export const rulesQuery = (project = "") =>
  queryOptions({
    queryKey: keys.rules(project),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/config-rules", {
          params: { query: project === "" ? {} : { project } },
        }),
      ),
  });

export const storagesQuery = queryOptions({
  queryKey: keys.storages(),
  queryFn: () => unwrap(api.GET("/api/v1/storages")),
});

/** The slot hours of some months, with a row for each of what is named. */
export const usageQuery = (since: string, until: string, by: readonly UsageKey[]) =>
  queryOptions({
    queryKey: keys.usage(since, until, by),
    queryFn: () =>
      unwrap(api.GET("/api/v1/usage", { params: { query: { since, until, by: [...by] } } })),
    placeholderData: keepPreviousData,
  });

export const linkQuery = (link: string) =>
  queryOptions({
    queryKey: keys.link(link),
    queryFn: () => unwrap(api.GET("/api/v1/runs", { params: { query: { link } } })),
    retry: false,
  });

export const statusQuery = queryOptions({
  queryKey: keys.status(),
  queryFn: () => unwrap(api.GET("/api/v1/status")),
});

export const slotsQuery = queryOptions({
  queryKey: keys.slots(),
  queryFn: () => unwrap(api.GET("/api/v1/slots")),
});

export interface ExperimentFilter {
  states?: ExperimentState[];
  query?: string;
  isArchived?: boolean;
  owner?: string;
  /** Only these; none of them if the list is empty. */
  only?: number[];
  columns?: string[];
  conditions?: Condition[];
  sortBy?: string;
  order?: "asc" | "desc";
  limit?: number;
}

function asParameters(filter: ExperimentFilter) {
  return {
    state: filter.states,
    query: filter.query,
    archived: filter.isArchived ? ("only" as const) : ("no" as const),
    owner: filter.owner,
    experiment: filter.only?.length === 0 ? [0] : filter.only,
    where: filter.conditions?.map((one) => JSON.stringify(one)),
  };
}

/** What an action would do to all experiments that the filters of the list find. */
export const bulkPreviewQuery = (
  action: BulkWord,
  filter: ExperimentFilter,
  { to, add_labels, remove_labels }: BulkArguments,
) => {
  const asked = { action, to, add_label: add_labels, remove_label: remove_labels };
  const query = { ...asParameters(filter), ...asked };
  return queryOptions({
    queryKey: keys.bulkPreview(query),
    queryFn: () => unwrap(api.GET("/api/v1/bulk-preview", { params: { query } })),
    // Experiments end meanwhile.
    staleTime: 0,
    gcTime: 0,
  });
};

export const experimentsQuery = (filter: ExperimentFilter) =>
  infiniteQueryOptions({
    queryKey: keys.experimentList(filter),
    initialPageParam: undefined as string | undefined,
    queryFn: ({ pageParam }) =>
      unwrap(
        api.GET("/api/v1/experiments", {
          params: {
            query: {
              ...asParameters(filter),
              limit: filter.limit ?? PAGE,
              cursor: pageParam,
              column: filter.columns,
              sort_by: filter.sortBy,
              order: filter.order,
              brief: true,
            },
          },
        }),
      ),
    getNextPageParam: (last) => last.next_cursor ?? undefined,
    placeholderData: keepPreviousData,
  });

/** How many experiments the home page shows of those that have ended. */
export const RECENT = 8;

export const goingQuery = experimentsQuery({ states: [...GOING_STATES] });

export const recentQuery = experimentsQuery({
  states: [...TERMINAL_STATES],
  sortBy: "ended_at",
  order: "desc",
  limit: RECENT,
});

export const experimentQuery = (id: number) =>
  queryOptions({
    queryKey: keys.experiment(id),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/experiments/{experiment_id}", { params: { path: { experiment_id: id } } }),
      ),
  });

export interface TrialFilter {
  sortBy?: string;
  order?: "asc" | "desc";
  states?: TrialState[];
}

export const trialsQuery = (experimentId: number, filter: TrialFilter) =>
  infiniteQueryOptions({
    queryKey: keys.trialList(experimentId, filter),
    initialPageParam: undefined as string | undefined,
    queryFn: ({ pageParam }) =>
      unwrap(
        api.GET("/api/v1/experiments/{experiment_id}/trials", {
          params: {
            path: { experiment_id: experimentId },
            query: {
              limit: PAGE,
              cursor: pageParam,
              sort_by: filter.sortBy,
              order: filter.order,
              state: filter.states,
            },
          },
        }),
      ),
    getNextPageParam: (last) => last.next_cursor ?? undefined,
    placeholderData: keepPreviousData,
  });

/** The trials of an experiment, the best first. */
export const bestTrialsQuery = (experimentId: number) =>
  trialsQuery(experimentId, { sortBy: "metric" });

export const trialQuery = (id: number) =>
  queryOptions({
    queryKey: keys.trial(id),
    queryFn: () =>
      unwrap(api.GET("/api/v1/trials/{trial_id}", { params: { path: { trial_id: id } } })),
  });

const NAMES_PAGE = 1000;
/** Names beyond these are not offered. */
const MOST_NAMES = 100_000;

/** The names of all metrics of an experiment, for trials that have too many for a summary. */
export const metricNamesQuery = (experimentId: number) =>
  queryOptions({
    queryKey: keys.metricNames(experimentId),
    queryFn: async () => {
      const found: MetricName[] = [];
      let cursor: string | undefined;
      do {
        const page = await unwrap(
          api.GET("/api/v1/experiments/{experiment_id}/metric-names", {
            params: {
              path: { experiment_id: experimentId },
              query: { limit: NAMES_PAGE, cursor },
            },
          }),
        );
        for (const { group, name, x_axis: xAxis } of page.items)
          found.push({ group, metric: name, xAxis });
        cursor = page.next_cursor ?? undefined;
      } while (cursor !== undefined && found.length < MOST_NAMES);
      return found;
    },
  });

/** A comparison has at most so many runs; the list says of how many. */
export const MOST_RUNS = 1000;

export interface RunFilter {
  trials?: number[];
  experiments?: number[];
  query?: string;
  states?: TrialState[];
  labels?: string[];
  conditions?: Condition[];
}

/** Return which runs the address of a comparison asks for. */
export function runFilterOf(search: CompareSearch): RunFilter {
  return {
    trials: search.trials,
    experiments: search.experiments,
    query: search.runs,
    states: search.state && [search.state],
    labels: search.labels,
    conditions: search.where,
  };
}

/** The runs to compare, the newest first, with their experiments. */
export const runsQuery = (filter: RunFilter) =>
  queryOptions({
    queryKey: keys.comparedRuns(filter),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/trials", {
          params: {
            query: {
              limit: MOST_RUNS,
              trial: filter.trials?.slice(0, MOST_RUNS),
              experiment: filter.experiments?.slice(0, MOST_RUNS),
              query: filter.query,
              state: filter.states,
              label: filter.labels,
              where: filter.conditions?.map((one) => JSON.stringify(one)),
            },
          },
        }),
      ),
    placeholderData: keepPreviousData,
  });

/** Which of some trials are deleted. */
export const goneQuery = (trialIds: number[]) =>
  queryOptions({
    queryKey: keys.comparedGone(trialIds),
    queryFn: async () => {
      const query = { trial: trialIds, limit: MOST_RUNS };
      const { items } = await unwrap(api.GET("/api/v1/trials", { params: { query } }));
      const there = new Set(items.map(({ id }) => id));
      return trialIds.filter((id) => !there.has(id));
    },
    enabled: trialIds.length > 0,
  });

/** The saved views of comparisons. */
export const viewsQuery = queryOptions({
  queryKey: keys.views(),
  queryFn: () => unwrap(api.GET("/api/v1/views")),
  staleTime: 0,
  refetchOnWindowFocus: true,
});

/** The numeric metrics of some trials, and how many of them have each. */
export const namesOfTrialsQuery = (trialIds: readonly number[]) => {
  const ids = [...trialIds].sort((a, b) => a - b);
  return queryOptions({
    queryKey: keys.comparedNames(ids),
    queryFn: () =>
      ids.length === 0
        ? []
        : unwrap(api.POST("/api/v1/metric-names", { body: { trial_ids: ids } })),
    placeholderData: keepPreviousData,
  });
};

type GroupsRequest = components["schemas"]["GroupsRequest"];
type GroupedName = components["schemas"]["GroupedName"];

/** Each metric is of up to a thousand runs. */
const MOST_METRICS = 4;

const joinedGroups = new JoinedRequests(
  async (metrics: readonly GroupedName[], options: Omit<GroupsRequest, "metrics">) => {
    const body = { ...options, metrics: [...metrics] };
    return (await unwrap(api.POST("/api/v1/metric-groups", { body }))).metrics;
  },
  MOST_METRICS,
);

/** A metric of groups of trials, with their spread; panels share a request. */
export const groupsQuery = (metric: GroupedName, options: Omit<GroupsRequest, "metrics">) =>
  queryOptions({
    queryKey: keys.comparedGroups({ metric, options }),
    queryFn: async () => (await joinedGroups.read([metric], options))[0]?.groups ?? [],
    placeholderData: keepPreviousData,
  });

export const trialTimeQuery = (id: number) =>
  queryOptions({
    queryKey: keys.trialTime(id),
    queryFn: () =>
      unwrap(api.GET("/api/v1/trials/{trial_id}/time", { params: { path: { trial_id: id } } })),
  });

export const trialEnvironmentsQuery = (id: number) =>
  queryOptions({
    queryKey: keys.trialEnvironments(id),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/trials/{trial_id}/environments", { params: { path: { trial_id: id } } }),
      ),
  });

/** A large rung answers with trials that are spread evenly over its ranks. */
const RUNG_ROWS = 200;

export const searchQuery = (experimentId: number) =>
  queryOptions({
    queryKey: keys.search(experimentId),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/experiments/{experiment_id}/search", {
          params: { path: { experiment_id: experimentId }, query: { limit: RUNG_ROWS } },
        }),
      ),
  });

export const trialCheckpointsQuery = (trialId: number) =>
  queryOptions({
    queryKey: keys.checkpoints("trial", trialId),
    queryFn: async () => {
      const page = await unwrap(
        api.GET("/api/v1/trials/{trial_id}/checkpoints", {
          params: { path: { trial_id: trialId }, query: { limit: 1000 } },
        }),
      );
      return page.items;
    },
  });

export const experimentCheckpointsQuery = (experimentId: number) =>
  infiniteQueryOptions({
    queryKey: keys.checkpoints("experiment", experimentId),
    initialPageParam: undefined as string | undefined,
    queryFn: ({ pageParam }) =>
      unwrap(
        api.GET("/api/v1/experiments/{experiment_id}/checkpoints", {
          params: {
            path: { experiment_id: experimentId },
            query: { limit: PAGE, cursor: pageParam, sort_by: "metric" },
          },
        }),
      ),
    getNextPageParam: (last) => last.next_cursor ?? undefined,
  });

/** More lines than these cover each other; a large experiment answers with a part of its trials. */
const HPARAM_ROWS = 2000;

export const hyperparametersQuery = (experimentId: number) =>
  queryOptions({
    queryKey: keys.hyperparameters(experimentId),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/experiments/{experiment_id}/hyperparameters", {
          params: { path: { experiment_id: experimentId }, query: { limit: HPARAM_ROWS } },
        }),
      ),
  });

/** What deleting an experiment would take away. */
export const lossQuery = (experimentId: number) =>
  queryOptions({
    queryKey: keys.loss(experimentId),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/experiments/{experiment_id}/loss", {
          params: { path: { experiment_id: experimentId } },
        }),
      ),
    staleTime: 0,
  });

export const columnsQuery = queryOptions({
  queryKey: keys.columns(),
  queryFn: () => unwrap(api.GET("/api/v1/experiment-columns")),
});

/** What an experiment came from and all that came of it, parents before children. */
export const treeQuery = (experimentId: number) =>
  queryOptions({
    queryKey: keys.tree(experimentId),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/experiments/{experiment_id}/tree", {
          params: { path: { experiment_id: experimentId } },
        }),
      ),
    staleTime: 0,
  });

/** The versions of an experiment's notes, read anew for each version of the stored ones. */
export const notesHistoryQuery = (experimentId: number, version: string) =>
  queryOptions({
    queryKey: keys.notesHistory(experimentId, version),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/experiments/{experiment_id}/notes-history", {
          params: { path: { experiment_id: experimentId } },
        }),
      ),
    placeholderData: keepPreviousData,
  });

/** What the last word of a query may become. */
export const completionsQuery = (query: string) =>
  queryOptions({
    queryKey: keys.completions(query),
    queryFn: () => unwrap(api.GET("/api/v1/query-completions", { params: { query: { query } } })),
  });

export const configQuery = (experimentId: number) =>
  queryOptions({
    queryKey: keys.config(experimentId),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/experiments/{experiment_id}/config", {
          params: { path: { experiment_id: experimentId } },
        }),
      ),
  });

export const filesQuery = (experimentId: number) =>
  queryOptions({
    queryKey: keys.files(experimentId),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/experiments/{experiment_id}/files", {
          params: { path: { experiment_id: experimentId } },
        }),
      ),
    staleTime: Infinity,
  });

/** The address of a file of an experiment's code. */
export function fileAddress(experimentId: number, path: string): string {
  const parts = path.split("/").map(encodeURIComponent).join("/");
  return `/api/v1/experiments/${experimentId}/files/${parts}`;
}

export const fileQuery = (experimentId: number, path: string) =>
  queryOptions({
    queryKey: keys.file(experimentId, path),
    queryFn: () => fetchText(fileAddress(experimentId, path)),
    staleTime: Infinity,
  });

export const schemaQuery = queryOptions({
  queryKey: keys.schema(),
  queryFn: () => unwrap(api.GET("/api/v1/config-schema")),
  staleTime: Infinity,
});

export const queueQuery = queryOptions({
  queryKey: keys.queue(),
  queryFn: () => unwrap(api.GET("/api/v1/queue")),
});

/** Why a trial waits for slots; null if it does not. */
export const queuedQuery = (trialId: number) =>
  queryOptions({
    queryKey: keys.queued(trialId),
    queryFn: async () => {
      const query = { trial_id: trialId };
      const found = await unwrap(api.GET("/api/v1/queue", { params: { query } }));
      return found[0] ?? null;
    },
  });

export const checkpointQuery = (uuid: string) =>
  queryOptions({
    queryKey: keys.checkpoint(uuid),
    queryFn: () => unwrap(api.GET("/api/v1/checkpoints/{uuid}", { params: { path: { uuid } } })),
  });

export const nodesQuery = queryOptions({
  queryKey: keys.nodes(),
  queryFn: () => unwrap(api.GET("/api/v1/nodes", { params: { query: { include_local: true } } })),
});

export const poolsQuery = queryOptions({
  queryKey: keys.pools(),
  queryFn: () => unwrap(api.GET("/api/v1/pools")),
});
