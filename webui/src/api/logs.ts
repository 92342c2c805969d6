/** Reading output of trials. */

import type { LogsSearch } from "../lib/search";
import { api, unwrap } from "./client";
import type { LogLine } from "./types";

export type LogFilter = Pick<
  LogsSearch,
  "q" | "regex" | "rank" | "level" | "stream" | "since" | "until"
>;

/** A line, by its trial and its id within it. */
export interface LinePlace {
  trial: number;
  line: number;
}

/** Lines, and how many damaged ones were found so far and left out. */
export interface ReadLines {
  items: LogLine[];
  num_damaged?: number;
  num_lines?: number | null;
}

export interface LogSource {
  /** Return the last lines, oldest first. */
  tail: (count: number, filter: LogFilter) => Promise<ReadLines>;
  /** Return lines beyond an id; absent where lines have no common order. */
  after?: (id: number, count: number, filter: LogFilter) => Promise<ReadLines>;
  /** Return the first line that passes, null if none does. */
  first: (filter: LogFilter) => Promise<LinePlace | null>;
}

function queryOf({ q, regex, ...rest }: LogFilter) {
  return regex ? { pattern: q, ...rest } : { search: q, ...rest };
}

/** Return lines; the client's types take the pairs within them for lists. */
async function readLines(answer: Parameters<typeof unwrap<unknown>>[0]): Promise<ReadLines> {
  return (await unwrap(answer)) as ReadLines;
}

function placeOf({ items: [line] }: ReadLines): LinePlace | null {
  return line === undefined ? null : { trial: line.trial_id, line: line.id };
}

export function trialLogs(trialId: number): LogSource {
  const read = (span: object, filter: LogFilter): Promise<ReadLines> =>
    readLines(
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
    readLines(
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

/** Return the text as it was printed, for `less -R` and the like. */
function withColors({ text, colors }: LogLine): string {
  if (!colors?.length) return text;
  const characters = Array.from(text);
  const parts: string[] = [];
  let start = 0;
  for (const [at, codes] of colors) {
    parts.push(characters.slice(start, at).join(""), `\x1b[${codes}m`);
    start = Math.max(start, at);
  }
  return `${parts.join("")}${characters.slice(start).join("")}\x1b[0m`;
}

function textOf(lines: readonly LogLine[]): string {
  return lines
    .map((line) => {
      const rank = line.rank === null ? "" : ` [rank ${line.rank}]`;
      return `${new Date(line.time * 1000).toISOString()}${rank} ${withColors(line)}\n`;
    })
    .join("");
}
