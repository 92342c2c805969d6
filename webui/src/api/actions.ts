/** What the pages change. */

import { type CodeFile, digestOf, packCode } from "../lib/packCode";
import { api, unwrap } from "./client";
import { problemFrom } from "./problem";
import type { components } from "./schema";
import type { BulkRequest, ConfigRule, Experiment, Quota, Reservation, Role, View } from "./types";

type Schemas = components["schemas"];

export type ExperimentAction = "pause" | "activate" | "cancel" | "kill" | "archive" | "unarchive";

/** The master takes no more at once. */
const IDS_PER_REQUEST = 1000;

export type BulkWord = BulkRequest["action"];
/** The project of `move`, and the labels of `label`. */
export type BulkArguments = Pick<BulkRequest, "to" | "add_labels" | "remove_labels">;

/** Carry one action out on several experiments, and return what did not work. */
export async function actOnAll(
  action: BulkWord,
  ids: readonly number[],
  given: BulkArguments = {},
): Promise<string[]> {
  const failures: string[] = [];
  for (let from = 0; from < ids.length; from += IDS_PER_REQUEST) {
    const part = ids.slice(from, from + IDS_PER_REQUEST);
    const results = await unwrap(
      api.POST("/api/v1/bulk-actions", { body: { action, experiment_ids: part, ...given } }),
    );
    for (const { experiment_id: id, error } of results)
      if (error) failures.push(`Experiment ${id}: ${error}`);
  }
  return failures;
}

export function addUser(name: string, role: Role | null) {
  return unwrap(api.POST("/api/v1/users", { body: { name, role } }));
}

export function removeUser(name: string) {
  return unwrap(api.DELETE("/api/v1/users/{name}", { params: { path: { name } } }));
}

export function setAdmin(name: string, isAdmin: boolean) {
  const params = { path: { name } };
  return unwrap(api.PATCH("/api/v1/users/{name}", { params, body: { is_admin: isAdmin } }));
}

export type QuotaLimits = Omit<Schemas["SetQuota"], "revision">;
export type Owner = Pick<Quota, "user" | "group" | "project">;

/** Set share and limits of a user, a group or a project; `revision` is the one that the change began from. */
export function setQuota(of: Owner, wanted: QuotaLimits & { revision: number }) {
  const { weight, max_slots, slot_hours, checkpoint_bytes, media_bytes, revision } = wanted;
  const body = { weight, max_slots, slot_hours, checkpoint_bytes, media_bytes, revision };
  const params = { path: quotaPath(of) };
  return unwrap(api.PUT("/api/v1/quotas/{kind}/{name}", { params, body }));
}

export function deleteQuota(quota: Quota) {
  const params = { path: quotaPath(quota), query: { revision: quota.revision } };
  return unwrap(api.DELETE("/api/v1/quotas/{kind}/{name}", { params }));
}

function quotaPath({ user, group, project }: Owner) {
  if (user !== null) return { kind: "user" as const, name: user };
  if (group) return { kind: "group" as const, name: group };
  return { kind: "project" as const, name: project ?? "" };
}

type RulePlace = Pick<ConfigRule, "kind" | "name" | "project">;

/** Set a template or a policy; `revision` is the one that the change began from, 0 for a new one. */
export function setRule(
  { kind, name, project }: RulePlace,
  content: Record<string, unknown>,
  revision: number,
) {
  const params = { path: { kind, name }, query: project === null ? {} : { project } };
  return unwrap(
    api.PUT("/api/v1/config-rules/{kind}/{name}", { params, body: { content, revision } }),
  );
}

export function deleteRule({ kind, name, project, revision }: ConfigRule) {
  const query = project === null ? { revision } : { revision, project };
  const params = { path: { kind, name }, query };
  return unwrap(api.DELETE("/api/v1/config-rules/{kind}/{name}", { params }));
}

export function reserveNode(name: string, body: Schemas["NewReservation"]) {
  const params = { path: { name } };
  return unwrap(api.POST("/api/v1/nodes/{name}/reservations", { params, body }));
}

export function releaseNode({ node, id }: Reservation) {
  const params = { path: { name: node, reservation_id: id } };
  return unwrap(api.DELETE("/api/v1/nodes/{name}/reservations/{reservation_id}", { params }));
}

/** Return a link that signs a user in, once. */
export async function signInLink(user: string): Promise<string> {
  const params = { query: { user } };
  return (await unwrap(api.POST("/api/v1/sign-in-links", { params }))).url;
}

export function deleteExperiment(id: number) {
  return unwrap(
    api.DELETE("/api/v1/experiments/{experiment_id}", { params: { path: { experiment_id: id } } }),
  );
}

export interface ExperimentEdit {
  name?: string;
  description?: string;
  labels?: string[];
  notes?: string;
  /** Of the notes that the edit began from. */
  notes_version?: string;
}

export function editExperiment(id: number, body: ExperimentEdit): Promise<Experiment> {
  return unwrap(
    api.PATCH("/api/v1/experiments/{experiment_id}", {
      params: { path: { experiment_id: id } },
      body,
    }),
  );
}

export function forkExperiment(
  id: number,
  config: Record<string, unknown>,
  submitted: string,
  activate: boolean,
): Promise<Experiment> {
  return unwrap(
    api.POST("/api/v1/experiments/{experiment_id}/fork", {
      params: { path: { experiment_id: id } },
      body: { config, replaces_config: true, submitted_config: submitted, activate },
    }),
  );
}

/** Where a new experiment goes, and the template for what its config leaves open. */
export interface Placement {
  project?: string;
  template?: string;
}

export function checkConfig(text: string, placement: Placement = {}) {
  return unwrap(api.POST("/api/v1/check-config", { body: { text, ...placement } }));
}

export function actOnExperiment(id: number, action: ExperimentAction): Promise<Experiment> {
  return unwrap(
    api.POST("/api/v1/experiments/{experiment_id}/{action}", {
      params: { path: { experiment_id: id, action } },
    }),
  );
}

export function killTrial(id: number) {
  return unwrap(api.POST("/api/v1/trials/{trial_id}/kill", { params: { path: { trial_id: id } } }));
}

export function continueTrial(
  id: number,
  config: Record<string, unknown>,
  activate = true,
): Promise<Experiment> {
  return unwrap(
    api.POST("/api/v1/trials/{trial_id}/continue", {
      params: { path: { trial_id: id } },
      body: { config, activate },
    }),
  );
}

export async function createExperiment(
  config: Record<string, unknown>,
  submitted: string,
  activate: boolean,
  code: readonly CodeFile[] | null = null,
  placement: Placement = {},
): Promise<Experiment> {
  const digest = code === null ? undefined : await uploadCode(code);
  return unwrap(
    api.POST("/api/v1/experiments", {
      body: { config, submitted_config: submitted, activate, context_digest: digest, ...placement },
    }),
  );
}

/** Send code to the master, and return its digest. */
async function uploadCode(code: readonly CodeFile[]): Promise<string> {
  const body = await packCode(code);
  const digest = await digestOf(body);
  const headers = { "content-type": "application/gzip" };
  const response = await fetch(`/api/v1/contexts/${digest}`, { method: "PUT", body, headers });
  if (!response.ok) throw problemFrom(response, await response.json().catch(() => null));
  return digest;
}

export function previewSearch(config: Record<string, unknown>) {
  return unwrap(api.POST("/api/v1/preview-search", { body: { config } }));
}

export function deleteCheckpoint(uuid: string) {
  return unwrap(api.DELETE("/api/v1/checkpoints/{uuid}", { params: { path: { uuid } } }));
}

export interface ViewContent {
  name: string;
  search: string;
  is_default: boolean;
}

export function createView(body: ViewContent): Promise<View> {
  return unwrap(api.POST("/api/v1/views", { body }));
}

/** Replace a view; `version` is the one that the change began from. */
export function replaceView(id: number, body: ViewContent & { version: number }): Promise<View> {
  return unwrap(api.PUT("/api/v1/views/{view_id}", { params: { path: { view_id: id } }, body }));
}

export function deleteView({ id, version }: View) {
  return unwrap(
    api.DELETE("/api/v1/views/{view_id}", {
      params: { path: { view_id: id }, query: { version } },
    }),
  );
}
