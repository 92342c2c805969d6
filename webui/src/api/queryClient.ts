/** The query cache's settings. */

import { MutationCache, QueryCache, QueryClient } from "@tanstack/react-query";

import { problemOf } from "./problem";
import { noteAnswer } from "./session";

const RETRIES = 2;

function noteError(error: unknown): void {
  if (problemOf(error).isUnauthorized) noteAnswer(false);
}

export const queryClient = new QueryClient({
  queryCache: new QueryCache({ onError: noteError }),
  mutationCache: new MutationCache({ onError: noteError }),
  defaultOptions: {
    mutations: { networkMode: "always" },
    queries: {
      // A master on this machine answers without any network.
      networkMode: "always",
      // The event stream says what is stale; without it nothing changes.
      staleTime: 30_000,
      gcTime: 5 * 60_000,
      refetchOnWindowFocus: false,
      retry: (count, error) => {
        const { status } = problemOf(error);
        return (status === 0 || status >= 500) && count < RETRIES;
      },
    },
  },
});
