/** Stars of a user: a saved view of comparisons, so that Compare opens all of them at once. */

import { notifications } from "@mantine/notifications";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useMemo } from "react";

import { storedSearch, textOf } from "../lib/views";
import { createView, deleteView, replaceView } from "./actions";
import { keys } from "./keys";
import { problemOf } from "./problem";
import { sessionQuery, viewsQuery } from "./queries";

/** So many are a filter of the list; the oldest stars go. */
const MOST = 500;
const CONFLICTS = ["view_changed", "name_taken", "not_found"];

/** Return the ids of the user's starred experiments, and what changes one. */
export function useStars() {
  const client = useQueryClient();
  const owner = useQuery(sessionQuery).data?.owner;
  const name = owner ? `Starred by ${owner}` : "Starred";
  const { data: views, isSuccess } = useQuery({ ...viewsQuery, refetchOnMount: false });
  const stored = views?.find((view) => view.name === name);
  const starred = useMemo(
    () => new Set(stored === undefined ? [] : storedSearch(stored).experiments),
    [stored],
  );
  const change = useMutation({
    mutationFn: async (id: number) => {
      for (let left = 3; ; left--) {
        const view = (await client.fetchQuery(viewsQuery)).find((one) => one.name === name);
        const before = view === undefined ? [] : (storedSearch(view).experiments ?? []);
        const others = before.filter((one) => one !== id);
        const after = starred.has(id) ? others : [...others, id].slice(-MOST);
        const kept = view === undefined ? {} : storedSearch(view);
        const search = textOf({ ...kept, experiments: after });
        const body = { name, search, is_default: view?.is_default ?? false };
        try {
          if (view === undefined) await createView(body);
          else if (after.length === 0) await deleteView(view);
          else await replaceView(view.id, { ...body, version: view.version });
          return;
        } catch (error) {
          // Another window was quicker: once more from what it has stored.
          if (left === 0 || !CONFLICTS.includes(problemOf(error).code)) throw error;
        }
      }
    },
    onError: (error) => notifications.show({ color: "red", message: problemOf(error).message }),
    onSettled: () => client.invalidateQueries({ queryKey: keys.views() }),
  });
  return {
    starred,
    isKnown: isSuccess && owner !== undefined,
    toggle: change.mutate,
    isPending: change.isPending,
  };
}
