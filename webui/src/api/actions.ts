/** What the pages change. */

import { api, unwrap } from "./client";
import type { Experiment } from "./types";

export type ExperimentAction = "pause" | "activate" | "cancel" | "kill";

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

export function continueTrial(id: number, config: Record<string, unknown>): Promise<Experiment> {
  return unwrap(
    api.POST("/api/v1/trials/{trial_id}/continue", {
      params: { path: { trial_id: id } },
      body: { config, activate: true },
    }),
  );
}

export function createExperiment(
  config: Record<string, unknown>,
  submitted: string,
  activate: boolean,
): Promise<Experiment> {
  return unwrap(
    api.POST("/api/v1/experiments", {
      body: { config, submitted_config: submitted, activate },
    }),
  );
}

export function previewSearch(config: Record<string, unknown>) {
  return unwrap(api.POST("/api/v1/preview-search", { body: { config } }));
}

export function deleteCheckpoint(uuid: string) {
  return unwrap(api.DELETE("/api/v1/checkpoints/{uuid}", { params: { path: { uuid } } }));
}
