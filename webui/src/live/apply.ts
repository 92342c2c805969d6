/** Bringing events into the query cache: states at once, the rest by marking what is stale. */

import type { QueryClient, QueryKey } from "@tanstack/react-query";

import { keys } from "../api/keys";
import type { Experiment, LiveEvent } from "../api/types";

/** Which cached answers an event makes stale. */
export function staleAfter(event: LiveEvent): QueryKey[] {
  const { experiment_id: experiment, trial_id: trial } = event;
  const ofTrial: QueryKey[] = trial === null ? [] : [keys.trial(trial), keys.trials(experiment)];
  const ofMedia: QueryKey[] = trial === null ? [] : [keys.media(trial)];
  switch (event.kind) {
    case "experiment_state":
      return [
        keys.experiment(experiment),
        keys.experiments(),
        keys.master(),
        keys.slots(),
        keys.queue(),
      ];
    case "experiment_changed":
      return [keys.experiment(experiment), keys.experiments(), keys.queue()];
    case "experiment_deleted":
      return [keys.experiments(), keys.experiment(experiment), keys.master(), keys.slots()];
    case "trial_created":
      return [
        keys.trials(experiment),
        keys.experiment(experiment),
        keys.experiments(),
        keys.queue(),
      ];
    case "trial_state":
      return [...ofTrial, keys.experiment(experiment), keys.experiments(), keys.search(experiment)];
    case "attempt_started":
    case "attempt_ended":
      return [
        ...ofTrial,
        ...ofMedia,
        keys.experiment(experiment),
        keys.slots(),
        keys.master(),
        keys.queue(),
      ];
    case "media":
      return ofMedia;
    case "validation":
      return [
        ...ofTrial,
        ...(trial === null ? [] : [keys.spark(trial)]),
        keys.experiment(experiment),
        keys.search(experiment),
        keys.hyperparameters(experiment),
      ];
    case "alert":
    case "workers_restarted":
    case "metrics":
      return ofTrial;
    case "checkpoint":
      return trial === null
        ? []
        : [
            keys.checkpoints("trial", trial),
            keys.checkpoints("experiment", experiment),
            ...ofTrial,
          ];
    default:
      return [];
  }
}

/** Write what the event itself says into the cache. */
export function patch(client: QueryClient, event: LiveEvent): void {
  const change = changeOf(event);
  if (change === null) return;
  client.setQueryData<Experiment>(keys.experiment(event.experiment_id), (known) =>
    known === undefined ? known : { ...known, ...change },
  );
  client.setQueriesData<{ pages: { items: Experiment[] }[] }>(
    { queryKey: keys.experiments() },
    (known) =>
      known?.pages === undefined ? known : patchPages(known, event.experiment_id, change),
  );
}

function patchPages<Pages extends { pages: { items: Experiment[] }[] }>(
  known: Pages,
  id: number,
  change: Partial<Experiment>,
): Pages {
  if (!known.pages.some((page) => page.items.some((item) => item.id === id))) return known;
  const pages = known.pages.map((page) => ({
    ...page,
    items: page.items.map((item) => (item.id === id ? { ...item, ...change } : item)),
  }));
  return { ...known, pages };
}

function changeOf(event: LiveEvent): Partial<Experiment> | null {
  if (event.kind === "experiment_state") return { state: event.data.state as Experiment["state"] };
  if (event.kind === "progress") return { progress: Number(event.data.progress) };
  return null;
}

/** Marks answers as stale, each at most once per period, however many events come. */
export class StaleMarker {
  private waiting = new Map<string, QueryKey>();
  private timer: ReturnType<typeof setTimeout> | null = null;

  constructor(
    private readonly client: QueryClient,
    private readonly periodMs = 1000,
  ) {}

  mark(found: readonly QueryKey[]): void {
    for (const key of found) this.waiting.set(JSON.stringify(key), key);
    if (this.waiting.size > 0) this.timer ??= setTimeout(() => this.flush(), this.periodMs);
  }

  stop(): void {
    if (this.timer !== null) clearTimeout(this.timer);
    this.timer = null;
    this.waiting.clear();
  }

  private flush(): void {
    this.timer = null;
    const found = [...this.waiting.values()];
    this.waiting.clear();
    for (const queryKey of found)
      // A refetch under way stays: cancelling it at each event could starve it for ever.
      void this.client.invalidateQueries({ queryKey }, { cancelRefetch: false });
  }
}
