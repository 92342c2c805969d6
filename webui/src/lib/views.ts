/** Saved views of comparisons: their search as text, as the address has it behind the `?`. */

import { defaultParseSearch, defaultStringifySearch } from "@tanstack/react-router";

import type { View } from "../api/types";
import { compareSearch, type CompareSearch } from "./search";

/** Tell whether an address names nothing, so that the default view is opened. */
export function isBare(search: CompareSearch): boolean {
  return Object.values(search).every((part) => part === undefined);
}

/** Return the view in an address as text, without the stored view that it began from. */
export function textOf(search: CompareSearch): string {
  // The router keeps the order of the address, which says nothing.
  const content = { ...compareSearch(search), saved: undefined, version: undefined };
  return defaultStringifySearch(content).replace(/^\?/, "");
}

/** Return what a stored view shows; what cannot be read is left out. */
export function storedSearch({ search }: Pick<View, "search">): CompareSearch {
  return compareSearch(defaultParseSearch(search) as Record<string, unknown>);
}

/** Return the address's search of a stored view. */
export function searchOf(view: View): CompareSearch {
  return { ...storedSearch(view), saved: view.id, version: view.version };
}
