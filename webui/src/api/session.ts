/** Whether this tab is signed in, as the API's answers tell. */

import { useSyncExternalStore } from "react";

export type Session = "unknown" | "in" | "expired" | "out";

let current: Session = "unknown";
const listeners = new Set<() => void>();

/** Take note of an answer: a session that ends under a page is expired, not out. */
export function noteAnswer(isAuthorized: boolean): void {
  if (isAuthorized) set("in");
  else set(current === "in" || current === "expired" ? "expired" : "out");
}

/** Take note that the user signed out. */
export function noteSignOut(): void {
  set("out");
}

function set(next: Session): void {
  if (next === current) return;
  current = next;
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Return how the session stands. */
export function useSession(): Session {
  return useSyncExternalStore(subscribe, () => current);
}
