/** Media as the pages show them. What a run says of them is a stranger's: all is checked here. */

import type { Media, MediaName } from "../api/types";
import { toNumber } from "./numbers";

export interface MediaFile {
  path: string;
  digest: string;
  size: number | null;
  type: string;
  caption: string | null;
  /** In pixels. */
  width: number | null;
}

export interface Section {
  title: string;
  names: MediaName[];
}

/** Return an id of a name that differs from those of all others. */
export function mediaId({ group, name, kind }: MediaName): string {
  return JSON.stringify([group, name, kind]);
}

/** Return the names that have all words of a filter, in sections by what is before the last slash. */
export function sectionsOf(names: readonly MediaName[], filter = ""): Section[] {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const sections = new Map<string, MediaName[]>();
  for (const one of names) {
    const text = `${one.name} ${one.group} ${one.kind}`.toLowerCase();
    if (!words.every((word) => text.includes(word))) continue;
    const title = one.name.slice(0, Math.max(0, one.name.lastIndexOf("/")));
    sections.set(title, [...(sections.get(title) ?? []), one]);
  }
  return [...sections]
    .sort(([a], [b]) => a.localeCompare(b, "en", { numeric: true }))
    .map(([title, found]) => ({ title, names: found }));
}

/** Return the index of the newest step up to `wanted`, of the newest of all for null; -1 for none. */
export function indexAt(steps: readonly number[], wanted: number | null): number {
  return wanted === null ? steps.length - 1 : steps.findLastIndex((step) => step <= wanted);
}

/** Return the steps of several lists in order, each once. */
export function unionOf(lists: readonly (readonly number[])[]): number[] {
  return [...new Set(lists.flat())].sort((a, b) => a - b);
}

/** Return at most `most` steps, spread evenly, with the first and the last. */
export function spread(steps: readonly number[], most: number): number[] {
  if (steps.length <= most) return [...steps];
  const places = Array.from({ length: most }, (_, i) =>
    Math.round((i * (steps.length - 1)) / (most - 1)),
  );
  return places.flatMap((place) => steps[place] ?? []);
}

/** Return the files of a report; what is none is left out. */
export function filesOf(media: Media): MediaFile[] {
  return media.files.flatMap((raw) => {
    const { path, digest, size, media_type: type, caption } = raw;
    if (typeof path !== "string" || path === "") return [];
    const facts = (raw.facts ?? {}) as Record<string, unknown>;
    return [
      {
        path,
        digest: String(digest ?? ""),
        size: typeof size === "number" ? size : null,
        type: typeof type === "string" ? type : "",
        caption: typeof caption === "string" && caption !== "" ? caption : null,
        width: toNumber(facts.width),
      },
    ];
  });
}

export type View = "image" | "audio" | "video" | "table" | "figure" | "html" | "text" | "file";

/** Return how a file is shown: by its type, and by what it was reported as where types are wide. */
export function viewOf(kind: string, { type, path }: MediaFile): View {
  if (type.startsWith("image/")) return "image";
  if (type.startsWith("audio/")) return "audio";
  if (type.startsWith("video/")) return "video";
  const isJson = type === "application/json" || path.endsWith(".json");
  if ((kind === "table" || kind === "figure") && isJson) return kind;
  if (kind === "html") return "html";
  return type === "text/plain" ? "text" : "file";
}

export interface Table {
  columns: string[];
  rows: unknown[][];
}

/** Return the table in a JSON text, as Paceline or W&B writes it; null if there is none. */
export function tableOf(text: string): Table | null {
  let found: unknown;
  try {
    found = JSON.parse(text);
  } catch {
    return null;
  }
  if (typeof found !== "object" || found === null) return null;
  const { columns, rows, data } = found as Record<string, unknown>;
  const all: unknown = rows ?? data;
  if (!Array.isArray(columns) || !Array.isArray(all)) return null;
  return { columns: columns.map(String), rows: all.filter((row) => Array.isArray(row)) };
}

export interface Histogram {
  /** One more than counts. */
  edges: number[];
  counts: number[];
}

const MOST_BINS = 10_000;

/** Return a reported histogram, null if it is none: edges rise and counts are not negative. */
export function histogramOf(value: unknown): Histogram | null {
  if (typeof value !== "object" || value === null) return null;
  const { bins, counts } = value as Record<string, unknown>;
  if (!Array.isArray(bins) || !Array.isArray(counts)) return null;
  if (counts.length === 0 || counts.length > MOST_BINS || bins.length !== counts.length + 1)
    return null;
  const edges = bins.map((edge) => toNumber(edge) ?? NaN);
  const numbers = counts.map((count) => toNumber(count) ?? NaN);
  const isSound =
    edges.every((edge, i) => Number.isFinite(edge) && (i === 0 || edge >= (edges[i - 1] ?? 0))) &&
    numbers.every((count) => Number.isFinite(count) && count >= 0);
  return isSound ? { edges, counts: numbers } : null;
}

/** Return histograms as shares of common bins: each count is spread evenly over its own bin. */
export function commonBins(
  histograms: readonly Histogram[],
  numBins: number,
): { edges: number[]; shares: number[][] } {
  let low = Infinity;
  let high = -Infinity;
  for (const { edges } of histograms) {
    low = Math.min(low, edges[0] ?? low);
    high = Math.max(high, edges.at(-1) ?? high);
  }
  const width = (high - low) / numBins || 1;
  const edges = Array.from({ length: numBins + 1 }, (_, i) => low + i * width);
  const binOf = (value: number) =>
    Math.min(numBins - 1, Math.max(0, Math.floor((value - low) / width)));
  const shares = histograms.map((one) => {
    const found = new Array<number>(numBins).fill(0);
    const total = one.counts.reduce((sum, count) => sum + count, 0) || 1;
    one.counts.forEach((count, i) => {
      const from = one.edges[i] ?? 0;
      const to = one.edges[i + 1] ?? from;
      const [first, last] = [binOf(from), binOf(to)];
      for (let bin = first; bin <= last; bin++) {
        const left = Math.max(from, edges[bin] ?? from);
        const right = Math.min(to, edges[bin + 1] ?? to);
        const part = to > from ? Math.max(0, right - left) / (to - from) : 1 / (last - first + 1);
        found[bin] = (found[bin] ?? 0) + (count / total) * part;
      }
    });
    return found;
  });
  return { edges, shares };
}
