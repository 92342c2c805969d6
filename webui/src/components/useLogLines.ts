/** The lines to show: the last ones, or those around a line, and whatever is printed next. */

import { useCallback, useEffect, useRef, useState } from "react";

import type { LogFilter, LogSource, ReadLines } from "../api/logs";
import type { LiveEvent, LogLine } from "../api/types";
import type { LogsSearch } from "../lib/search";
import { hub } from "../live/hub";

const FIRST_TAIL = 1000;
const LONGEST_TAIL = 10_000;
const CONTEXT = 100;
const PERIOD_MS = 1000;
/** More lines than this are not kept; the download has all of them. */
const MOST_LINES = 50_000;

interface LogLines {
  lines: readonly LogLine[];
  isLoaded: boolean;
  error: unknown;
  /** How many damaged lines were found and left out. */
  numDamaged: number;
  /** How many lines there are in all, where that is known. */
  numLines: number | undefined;
  hasEarlier: boolean;
  loadEarlier: () => void;
}

interface Loaded {
  key: string;
  lines: readonly LogLine[];
  numDamaged: number;
  numLines?: number;
}

export function useLogLines(
  source: LogSource,
  search: LogsSearch,
  isOf: (event: LiveEvent) => boolean,
): LogLines {
  const { q, regex, rank, level, stream, since, until, line } = search;
  const [tail, setTail] = useState(FIRST_TAIL);
  const key = JSON.stringify([q, regex, rank, level, stream, since, until, line, tail]);
  const [loaded, setLoaded] = useState<Loaded>({ key: "", lines: [], numDamaged: 0 });
  const [error, setError] = useState<unknown>(null);
  const wanted = useRef({ source, isOf });
  useEffect(() => {
    wanted.current = { source, isOf };
  });

  useEffect(() => {
    let isStale = false;
    let isReading = false;
    let isBehind = false;
    let known: readonly LogLine[] | null = null;
    let timer: ReturnType<typeof setTimeout> | null = null;
    // Around a line all others are shown.
    const filter: LogFilter =
      line === undefined ? { q, regex, rank, level, stream, since, until } : {};

    const read = async (): Promise<ReadLines> => {
      const { tail: readTail, after } = wanted.current.source;
      const last = known?.at(-1)?.id;
      if (after !== undefined && known !== null && last !== undefined) {
        const added = await after(last, LONGEST_TAIL, filter);
        return { ...added, items: [...known, ...added.items].slice(-MOST_LINES) };
      }
      if (after !== undefined && line !== undefined)
        return after(Math.max(-1, line - CONTEXT), FIRST_TAIL, {});
      return readTail(tail, filter);
    };
    const update = async () => {
      timer = null;
      if (isReading) {
        isBehind = true;
        return;
      }
      isReading = true;
      try {
        const { items: lines, num_damaged: numDamaged = 0, num_lines: all } = await read();
        if (isStale) return;
        known = lines;
        setLoaded({ key, lines, numDamaged, numLines: all ?? undefined });
        setError(null);
      } catch (problem) {
        if (!isStale) setError(problem);
      } finally {
        isReading = false;
        if (isBehind && !isStale) {
          isBehind = false;
          schedule();
        }
      }
    };
    const schedule = () => {
      timer ??= setTimeout(() => void update(), PERIOD_MS);
    };
    void update();
    const leave = [
      hub.listen((event) => {
        if (event.kind === "logs" && wanted.current.isOf(event)) schedule();
      }),
      hub.onResync(schedule),
    ];
    return () => {
      isStale = true;
      if (timer !== null) clearTimeout(timer);
      for (const one of leave) one();
    };
  }, [key, q, regex, rank, level, stream, since, until, line, tail]);

  const loadEarlier = useCallback(() => setTail((now) => Math.min(now * 4, LONGEST_TAIL)), []);
  const hasEarlier = line === undefined && tail < LONGEST_TAIL && loaded.lines.length >= tail;
  return {
    lines: loaded.lines,
    numDamaged: loaded.numDamaged,
    numLines: loaded.numLines,
    isLoaded: loaded.key !== "",
    error,
    hasEarlier,
    loadEarlier,
  };
}
