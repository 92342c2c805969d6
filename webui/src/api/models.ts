/** Registered models: names with versions and aliases, by the routes of MLflow's clients. */

import { infiniteQueryOptions, queryOptions } from "@tanstack/react-query";

import { keys } from "./keys";
import { ApiProblem, problemFrom } from "./problem";
import { checkpointQuery } from "./queries";
import { queryClient } from "./queryClient";

const ROUTES = "/api/2.0/mlflow";
const FILES = "/api/2.0/mlflow-artifacts/artifacts";
const CHECKPOINT = "checkpoint:/";
const ARTIFACTS = "mlflow-artifacts:/";
const PAGE = 200;
const MOST_FILES = 1000;

export interface ModelVersion {
  name: string;
  version: string;
  description: string;
  source: string;
  location: string;
  run_id: string;
  user_id: string;
  aliases: string[];
  creation_timestamp: number;
}

export interface RegisteredModel {
  name: string;
  description: string;
  aliases: { alias: string; version: string }[];
  latest_versions: ModelVersion[];
  last_updated_timestamp: number;
}

export interface ModelFile {
  path: string;
  address: string;
  size: number | null;
}

async function call<Answer>(
  method: "GET" | "POST" | "PATCH" | "DELETE",
  route: string,
  given: Record<string, string>,
): Promise<Answer> {
  const isRead = method === "GET";
  const query = isRead ? `?${new URLSearchParams(given).toString()}` : "";
  const response = await fetch(`${route}${query}`, {
    method,
    headers: { accept: "application/json", "content-type": "application/json" },
    body: isRead ? undefined : JSON.stringify(given),
  });
  const body: unknown = await response.json().catch(() => null);
  if (!response.ok) throw problemFrom(response, body);
  return body as Answer;
}

const registry = <Answer>(
  method: "GET" | "POST" | "PATCH" | "DELETE",
  route: string,
  given: Record<string, string>,
) => call<Answer>(method, `${ROUTES}/${route}`, given);

interface ModelPage {
  registered_models: RegisteredModel[];
  next_page_token?: string;
}

export const modelsQuery = infiniteQueryOptions({
  queryKey: keys.models(),
  initialPageParam: undefined as string | undefined,
  queryFn: ({ pageParam }) =>
    registry<ModelPage>("GET", "registered-models/search", {
      max_results: String(PAGE),
      ...(pageParam === undefined ? {} : { page_token: pageParam }),
    }),
  getNextPageParam: (last) => last.next_page_token || undefined,
});

export const modelQuery = (name: string) =>
  queryOptions({
    queryKey: keys.model(name),
    queryFn: async () => {
      const quote = name.includes("'") ? '"' : "'";
      const filter = `name = ${quote}${name}${quote}`;
      const [{ registered_model: model }, { model_versions: versions }] = await Promise.all([
        registry<{ registered_model: RegisteredModel }>("GET", "registered-models/get", { name }),
        registry<{ model_versions: ModelVersion[] }>("GET", "model-versions/search", { filter }),
      ]);
      return { model, versions: versions.toSorted((a, b) => +b.version - +a.version) };
    },
    retry: (count, error) => !(error instanceof ApiProblem && error.status === 404) && count < 3,
  });

/** Return the checkpoint that is the source of a version, null for a logged model. */
export function checkpointOf({ location }: ModelVersion): string | null {
  return location.startsWith(CHECKPOINT) ? location.slice(CHECKPOINT.length) : null;
}

/** The files of a version, each with the address that gives it. */
export const modelFilesQuery = (version: ModelVersion) =>
  queryOptions({
    queryKey: keys.modelFiles(version.name, version.version),
    queryFn: () => filesOf(version),
  });

async function filesOf(version: ModelVersion): Promise<ModelFile[]> {
  const uuid = checkpointOf(version);
  if (uuid !== null) {
    const { resources } = await queryClient.fetchQuery(checkpointQuery(uuid));
    const base = `/api/v1/checkpoints/${encodeURIComponent(uuid)}/files`;
    return Object.entries(resources).map(([path, size]) => ({
      path,
      size,
      address: `${base}/${encodePath(path)}`,
    }));
  }
  const place = await placeOf(version.location);
  const found: ModelFile[] = [];
  await addFiles(place, "", found);
  return found;
}

async function placeOf(location: string): Promise<string> {
  let place = location;
  if (place.startsWith("models:/m-")) {
    const id = encodeURIComponent(place.slice("models:/".length));
    type Logged = { model: { info: { artifact_uri: string } } };
    place = (await registry<Logged>("GET", `logged-models/${id}`, {})).model.info.artifact_uri;
  }
  if (!place.startsWith(ARTIFACTS))
    throw new ApiProblem(0, "elsewhere", "Not here", `The files lie at ${place}.`);
  return place.slice(ARTIFACTS.length).replaceAll(/^\/+|\/+$/g, "");
}

interface Listing {
  files: { path: string; is_dir: boolean; file_size?: number }[];
}

async function addFiles(place: string, below: string, found: ModelFile[]): Promise<void> {
  const path = below === "" ? place : `${place}/${below}`;
  for (const file of (await call<Listing>("GET", FILES, { path })).files) {
    if (found.length >= MOST_FILES) return;
    const name = below === "" ? file.path : `${below}/${file.path}`;
    if (file.is_dir) await addFiles(place, name, found);
    else
      found.push({
        path: name,
        size: file.file_size ?? null,
        address: `${FILES}/${encodePath(`${place}/${name}`)}`,
      });
  }
}

function encodePath(path: string): string {
  return path.split("/").map(encodeURIComponent).join("/");
}

export function setAlias(name: string, alias: string, version: string) {
  return registry("POST", "registered-models/alias", { name, alias, version });
}

export function removeAlias(name: string, alias: string) {
  return registry("DELETE", "registered-models/alias", { name, alias });
}

export function setModelNotes(name: string, description: string) {
  return registry("PATCH", "registered-models/update", { name, description });
}

export function setVersionNotes(name: string, version: string, description: string) {
  return registry("PATCH", "model-versions/update", { name, version, description });
}

export function deleteVersion(name: string, version: string) {
  return registry("DELETE", "model-versions/delete", { name, version });
}

export function deleteModel(name: string) {
  return registry("DELETE", "registered-models/delete", { name });
}

/** Make a checkpoint the next version of a model, which is made if there is none. */
export async function registerCheckpoint(name: string, uuid: string): Promise<ModelVersion> {
  try {
    await registry("GET", "registered-models/get", { name });
  } catch (error) {
    if (!(error instanceof ApiProblem && error.status === 404)) throw error;
    await registry("POST", "registered-models/create", { name });
  }
  const source = `${CHECKPOINT}${uuid}`;
  const given = { name, source };
  type Made = { model_version: ModelVersion };
  return (await registry<Made>("POST", "model-versions/create", given)).model_version;
}
