/** What the states of experiments and trials mean for the pages. */

import type { Attempt, Experiment, ExperimentState, ShownState, Trial } from "../api/types";

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

function isStopping(state: string): boolean {
  return state.startsWith("STOPPING_");
}

/** Return what runs on slots for its owner, such as "notebook"; null for training. */
export function interactiveKind({ kind = "training" }: Experiment): string | null {
  return kind === "training" ? null : kind;
}

/** Return what an experiment does in a word: its search, or the kind of interactive work. */
export function workWord(experiment: Experiment, unmanaged: string): string {
  if (experiment.is_unmanaged) return unmanaged;
  return interactiveKind(experiment) ?? experiment.searcher;
}

/** Return the state to show: `shown_state`, worked out anew because events change `state`. */
export function shownExperimentState(experiment: Experiment): ShownState {
  if (isStopping(experiment.state)) return "STOPPING";
  if (experiment.state !== "ACTIVE") return experiment.state as ShownState;
  return experiment.num_running > 0 ? "RUNNING" : "QUEUED";
}

/** Return the state to show: `shown_state`, in the light of the newest state of its experiment. */
export function shownTrialState(trial: Trial, experimentState?: ExperimentState): ShownState {
  if (isTerminal(trial.state)) return trial.shown_state;
  const of = experimentState ?? trial.experiment_state;
  if (isStopping(trial.state) || isStopping(of)) return "STOPPING";
  if (trial.is_running) return of === "PAUSED" ? "STOPPING" : "RUNNING";
  return of === "PAUSED" ? "PAUSED" : "QUEUED";
}

/** Return the state to show of an attempt: one that has ended may have failed, or done all. */
export function shownAttemptState({ state, exit }: Attempt): string {
  if (state !== "ENDED" || exit === null) return state;
  // What was told to leave has not failed when a signal ends it.
  if (exit.kind || exit.outcome === "error") return "FAILED";
  return exit.outcome === "completed" ? "COMPLETED" : state;
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

/** Return the progress to show of a trial, by the same rule as that of its experiment. */
export function shownTrialProgress(
  { progress, state }: Trial,
  experiment: Experiment | undefined,
): number | null {
  const isUnknown = experiment?.searcher === "single" && progress === 0;
  return isUnknown && state !== "COMPLETED" ? null : progress;
}
