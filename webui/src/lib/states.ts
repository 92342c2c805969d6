/** What the states of experiments and trials mean for the pages. */

import type { Experiment, Trial } from "../api/types";

export const TERMINAL_STATES = ["COMPLETED", "CANCELED", "ERROR"] as const;
export const GOING_STATES = [
  "ACTIVE",
  "PAUSED",
  "STOPPING_COMPLETED",
  "STOPPING_CANCELED",
  "STOPPING_KILLED",
  "STOPPING_ERROR",
] as const;
const TERMINAL = new Set<string>(TERMINAL_STATES);

export function isTerminal(state: string): boolean {
  return TERMINAL.has(state);
}

/** Return the state to show: an active experiment runs or waits for slots. */
export function shownExperimentState(experiment: Experiment): string {
  if (experiment.state !== "ACTIVE") return experiment.state;
  return experiment.num_running > 0 ? "RUNNING" : "WAITING";
}

/** Return the state to show: an active trial runs, is paused, or waits for slots. */
export function shownTrialState(trial: Trial, isPaused = false): string {
  if (trial.state !== "ACTIVE") return trial.state;
  if (trial.is_running) return "RUNNING";
  return isPaused ? "PAUSED" : "WAITING";
}

/** Return which actions an experiment in this state takes. */
export function allowedActions(experiment: Experiment): Set<string> {
  const allowed = new Set([experiment.is_archived ? "unarchive" : "archive"]);
  if (isTerminal(experiment.state)) return allowed.add("delete");
  allowed.delete("archive");
  if (experiment.is_unmanaged) return allowed;
  if (experiment.state === "ACTIVE") allowed.add("pause").add("cancel");
  if (experiment.state === "PAUSED") allowed.add("activate").add("cancel");
  return allowed.add("kill");
}

/** Return the metric that the best is judged by: null for a run made without a master that says none. */
export function shownMetric(experiment: Experiment): string | null {
  const isGuess = experiment.is_unmanaged && experiment.best_metric === null;
  return isGuess ? null : experiment.metric;
}

/** Return the progress to show: null where nobody says how long training goes on. */
export function shownProgress(experiment: Experiment): number | null {
  const isUnknown = experiment.searcher === "single" && experiment.progress === 0;
  return isUnknown && experiment.state !== "COMPLETED" ? null : experiment.progress;
}
