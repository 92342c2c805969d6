/** What a search over everything finds, by kind. */

import { queryOptions } from "@tanstack/react-query";

import { formatValue, plural } from "../lib/numbers";
import { api, unwrap } from "./client";
import { keys } from "./keys";

const SHOWN = 6;
const EXPERIMENTS_WITH_LOGS = 20;
const LONGEST_LINE = 160;

interface Entry {
  to: string;
  name: string;
  detail: string;
}

interface Found {
  title: string;
  entries: Entry[];
  /** Where all of them are listed. */
  all?: { to: string; label: string };
}

/** Tell whether a text is plain words, and no query that names fields. */
export function isPlain(text: string): boolean {
  return !/[<>=:()"']/.test(text);
}

const quoted = (text: string) => `"${text.replaceAll('"', "")}"`;
const listOf = (query: string) => `/experiments?q=${encodeURIComponent(query)}&all=true`;

async function experimentsFor(query: string, title: string): Promise<Found> {
  const { items, total } = await unwrap(
    api.GET("/api/v1/experiments", {
      params: { query: { query, limit: SHOWN, brief: true, archived: "all" } },
    }),
  );
  const count = total ?? items.length;
  return {
    title,
    entries: items.map(({ id, name, labels, is_archived: isArchived }) => ({
      to: `/experiments/${id}${title === "Notes" ? "/notes" : ""}`,
      name: `${name} (${id})`,
      detail: [...labels, ...(isArchived ? ["archived"] : [])].join(", "),
    })),
    ...(count > items.length && {
      all: { to: listOf(query), label: `All ${plural(count, "experiment")}` },
    }),
  };
}

async function trialsFor(query: string): Promise<Found> {
  const { items, total, experiments } = await unwrap(
    api.GET("/api/v1/trials", { params: { query: { query, limit: SHOWN } } }),
  );
  const names = new Map(experiments.map(({ id, name }) => [id, name]));
  return {
    title: "Trials and runs",
    entries: items.map(({ id, experiment_id: of, hparams }) => ({
      to: `/trials/${id}`,
      name: `Trial ${id} of ${names.get(of) ?? of}`,
      detail: Object.entries(hparams)
        .slice(0, 4)
        .map(([name, value]) => `${name} ${formatValue(value)}`)
        .join(", "),
    })),
    ...(total > 0 && {
      all: {
        to: `/compare?runs=${encodeURIComponent(query)}`,
        label: `Compare ${plural(total, "trial")}`,
      },
    }),
  };
}

async function labelsFor(text: string): Promise<Found> {
  const query = `tag:${text}`;
  const { texts } = await unwrap(
    api.GET("/api/v1/query-completions", { params: { query: { query } } }),
  );
  return {
    title: "Labels",
    entries: texts
      .slice(0, SHOWN)
      .map((label) => ({ to: listOf(`tag:${label}`), name: label, detail: "" })),
  };
}

export const foundQuery = (text: string) =>
  queryOptions({
    queryKey: keys.found(text),
    queryFn: async () => {
      const searches = [experimentsFor(text, "Experiments"), trialsFor(text)];
      if (isPlain(text) && !/\s/.test(text)) searches.push(labelsFor(text));
      if (isPlain(text))
        searches.push(
          experimentsFor(`settings:${quoted(text)}`, "Config fields and values"),
          experimentsFor(`notes:${quoted(text)}`, "Notes"),
        );
      return Promise.all(searches);
    },
    retry: false,
    staleTime: 5000,
  });

/** Look for a text in the logs of the newest experiments, one after the other. */
export async function searchLogs(
  text: string,
): Promise<{ lines: Entry[]; numExperiments: number }> {
  const { items } = await unwrap(
    api.GET("/api/v1/experiments", {
      params: { query: { limit: EXPERIMENTS_WITH_LOGS, brief: true } },
    }),
  );
  const lines: Entry[] = [];
  for (const { id, name } of items) {
    const page = await unwrap(
      api.GET("/api/v1/experiments/{experiment_id}/logs", {
        params: { path: { experiment_id: id }, query: { search: text, limit: 1 } },
      }),
    );
    for (const line of page.items)
      lines.push({
        to: `/experiments/${id}/logs?q=${encodeURIComponent(text)}`,
        name: `${name} (${id})`,
        detail: line.text.slice(0, LONGEST_LINE),
      });
  }
  return { lines, numExperiments: items.length };
}
