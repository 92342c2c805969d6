/** Reading output of trials. */

import type { LogsSearch } from "../lib/search";
import { api, unwrap } from "./client";
import type { LogLine } from "./types";

export type LogFilter = Pick<LogsSearch, "q" | "rank" | "level" | "stream" | "since" | "until">;

/** A line, by its trial and its id within it. */
export interface LinePlace {
  trial: number;
  line: number;
}

/** Lines, and how many damaged ones were found so far and left out. */
export interface ReadLines {
  items: LogLine[];
  num_damaged?: number;
}

export interface LogSource {
  /** Return the last lines, oldest first. */
  tail: (count: number, filter: LogFilter) => Promise<ReadLines>;
  /** Return lines beyond an id; absent where lines have no common order. */
  after?: (id: number, count: number, filter: LogFilter) => Promise<ReadLines>;
  /** Return the first line that passes, null if none does. */
  first: (filter: LogFilter) => Promise<LinePlace | null>;
}

function queryOf({ q, ...rest }: LogFilter) {
  return { search: q, ...rest };
}

function placeOf({ items: [line] }: ReadLines): LinePlace | null {
  return line === undefined ? null : { trial: line.trial_id, line: line.id };
}

export function trialLogs(trialId: number): LogSource {
  const read = (span: object, filter: LogFilter): Promise<ReadLines> =>
    unwrap(
      api.GET("/api/v1/trials/{trial_id}/logs", {
        params: { path: { trial_id: trialId }, query: { ...span, ...queryOf(filter) } },
      }),
    );
  return {
    tail: (count, filter) => read({ tail: count }, filter),
    after: (id, count, filter) => read({ after: id, limit: count }, filter),
    first: async (filter) => placeOf(await read({ limit: 1 }, filter)),
  };
}

export function experimentLogs(experimentId: number): LogSource {
  const read = (span: object, filter: LogFilter): Promise<ReadLines> =>
    unwrap(
      api.GET("/api/v1/experiments/{experiment_id}/logs", {
        params: { path: { experiment_id: experimentId }, query: { ...span, ...queryOf(filter) } },
      }),
    );
  return {
    tail: (count, filter) => read({ tail: count }, filter),
    first: async (filter) => placeOf(await read({ limit: 1 }, filter)),
  };
}

/** Return the first line that tells of an error, null if none does. */
export async function firstError(source: LogSource): Promise<LinePlace | null> {
  return (await source.first({ level: "ERROR" })) ?? source.first({ q: "Traceback" });
}

const DOWNLOAD_PAGE = 10_000;

/** Return all output as text. */
export async function allText(source: LogSource): Promise<string> {
  const { after } = source;
  if (after === undefined) return textOf((await source.tail(DOWNLOAD_PAGE, {})).items);
  const parts: string[] = [];
  let last = -1;
  for (;;) {
    const { items: lines } = await after(last, DOWNLOAD_PAGE, {});
    parts.push(textOf(lines));
    if (lines.length < DOWNLOAD_PAGE) return parts.join("");
    last = lines.at(-1)?.id ?? last;
  }
}

function textOf(lines: readonly LogLine[]): string {
  return lines
    .map((line) => {
      const rank = line.rank === null ? "" : ` [rank ${line.rank}]`;
      return `${new Date(line.time * 1000).toISOString()}${rank} ${line.text}\n`;
    })
    .join("");
}
