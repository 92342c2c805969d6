/** A time as its distance from now, with the full local time at hand. */

import { useSyncExternalStore } from "react";

import { formatAgo, formatDuration, formatTime } from "../lib/times";

const PERIOD_MS = 5000;
const listeners = new Set<() => void>();
let now = Date.now();
let timer: ReturnType<typeof setInterval> | null = null;

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  now = Date.now();
  timer ??= setInterval(() => {
    now = Date.now();
    for (const each of listeners) each();
  }, PERIOD_MS);
  return () => {
    listeners.delete(listener);
    if (listeners.size === 0 && timer !== null) {
      clearInterval(timer);
      timer = null;
    }
  };
}

/** Return the present time in milliseconds, renewed every few seconds. */
export function useNow(): number {
  return useSyncExternalStore(subscribe, () => now);
}

/** With `isShort`, for tables, in as little room as there is. */
export function Ago({ time, isShort }: { time: number; isShort?: boolean }) {
  const present = useNow();
  return (
    <time dateTime={new Date(time * 1000).toISOString()} title={formatTime(time)}>
      {formatAgo(time, present, isShort ? "short" : "long")}
    </time>
  );
}

export function Lasted({ from, to }: { from: number | null; to: number | null | undefined }) {
  const present = useNow();
  if (from === null) return <>–</>;
  return <>{formatDuration((to ?? present / 1000) - from)}</>;
}
