/** What the attempts of a trial mean for what is shown of it. */

import type { Attempt, Trial } from "../api/types";
import { lastStep } from "./metrics";
import { formatNumber } from "./numbers";

/** Return the attempt that began again from the beginning, so that earlier points do not count. */
export function freshAttempt({ attempts = [], latest_checkpoint: saved }: Trial): Attempt | null {
  const newest = attempts.at(-1);
  if (attempts.length < 2 || newest === undefined || saved !== null) return null;
  return hasBegunAnew(newest) ? newest : null;
}

/** Return how many batches are trained; where an attempt began again, what is lost as well. */
export function batchesOf(trial: Trial): string {
  const fresh = freshAttempt(trial);
  const reached = trial.steps_completed;
  const now = lastStep([{ steps_completed: 0, summary: trial.summary }]);
  if (fresh === null || now >= reached) return formatNumber(reached);
  return `${formatNumber(now)} in attempt ${fresh.number}; ${formatNumber(reached)} before it were lost`;
}

/** Return how often a trial started again: not only the restarts that `max_restarts` counts. */
export function restartsOf({ restarts, num_attempts: numAttempts }: Trial): string {
  const all = Math.max(restarts, numAttempts - 1);
  if (all === restarts) return String(all);
  return `${all}, of which ${restarts} count for max_restarts`;
}

function hasBegunAnew({ resumed_from: from, resumed_steps: steps }: Attempt): boolean {
  return from === null && steps <= 0;
}

/** Return where an attempt began; a state in memory is newer than the checkpoint and has no UUID. */
export function beginningOf(attempt: Attempt): string {
  return hasBegunAnew(attempt) ? "the beginning" : `batch ${attempt.resumed_steps}`;
}
