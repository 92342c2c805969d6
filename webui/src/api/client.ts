/** The client generated from the master's OpenAPI document. */

import createClient from "openapi-fetch";

import { ApiProblem, problemFrom } from "./problem";
import type { paths } from "./schema";

export const api = createClient<paths>({
  baseUrl: "",
  headers: { accept: "application/json" },
  fetch: (request) => globalThis.fetch(request),
});

interface Answer<Data> {
  data?: Data;
  error?: unknown;
  response: Response;
}

/** Return the data of an answer, or throw the problem that it tells. */
export async function unwrap<Data>(answer: Promise<Answer<Data>>): Promise<Data> {
  const { data, error, response } = await answer;
  if (!response.ok) throw problemFrom(response, error);
  return data as Data;
}

/** Fetch text of a path of the API, for what is not JSON; `check` may refuse it before it is read. */
export async function fetchText(
  path: string,
  check?: (numBytes: number) => void | Promise<void>,
): Promise<string> {
  const response = await fetch(path);
  if (!response.ok) {
    const body: unknown = await response.json().catch(() => null);
    throw body === null
      ? new ApiProblem(response.status, "error", `Error ${response.status}`, response.statusText)
      : problemFrom(response, body);
  }
  try {
    await check?.(Number(response.headers.get("content-length")));
  } catch (error) {
    await response.body?.cancel();
    throw error;
  }
  return response.text();
}
