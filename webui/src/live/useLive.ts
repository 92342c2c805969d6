/** React's side of the event stream. */

import { useQueryClient } from "@tanstack/react-query";
import { useEffect, useRef, useSyncExternalStore } from "react";

import type { LiveEvent } from "../api/types";
import { patch, staleAfter, StaleMarker } from "./apply";
import { hub } from "./hub";
import { SharedStream } from "./sharedStream";
import { firstCursor, type StreamHandlers, type StreamState } from "./stream";

/** Follow the events while the tab is visible, and update the query cache from them. */
export function useEventStream(isSignedIn: boolean): void {
  const client = useQueryClient();
  useEffect(() => {
    if (!isSignedIn) return;
    const marker = new StaleMarker(client);
    const handlers: StreamHandlers = {
      onEvent: (event) => {
        patch(client, event);
        marker.mark(staleAfter(event));
        hub.publish(event);
      },
      onResync: () => {
        void client.invalidateQueries({ predicate: (query) => query.meta?.isHistory !== true });
        hub.publishResync();
      },
      onState: (state) => {
        hub.publishState(state);
        // The stream cannot say why it failed; this question finds out whether one is signed out.
        if (state === "lost") void client.invalidateQueries({ queryKey: ["master"] });
      },
    };
    const stream = new SharedStream(handlers, undefined, firstCursor);
    const follow = () => (document.hidden ? stream.hide() : stream.show());
    follow();
    document.addEventListener("visibilitychange", follow);
    return () => {
      document.removeEventListener("visibilitychange", follow);
      stream.hide();
      marker.stop();
    };
  }, [client, isSignedIn]);
}

/** Call `listener` with each event. */
export function useEvents(listener: (event: LiveEvent) => void): void {
  const latest = useRef(listener);
  useEffect(() => {
    latest.current = listener;
  });
  useEffect(() => hub.listen((event) => latest.current(event)), []);
}

/** Return how the stream stands. */
export function useStreamState(): StreamState {
  return useSyncExternalStore(hub.subscribe, () => hub.state);
}
