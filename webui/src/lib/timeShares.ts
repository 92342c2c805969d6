/** What the time of a trial went to, in the order in which it is shown. */

import type { TrialTime } from "../api/types";

export interface TimeShare {
  name: string;
  seconds: number;
  /** Of the whole time, between 0 and 1. */
  fraction: number;
  meaning: string;
}

type ShareName = Exclude<Extract<keyof TrialTime, `${string}_s`>, "total_s">;

const SHARES: Record<ShareName, readonly [string, string]> = {
  training_s: ["Training", "steps whose result was kept"],
  data_wait_s: ["Waiting for data", "devices idle until data came"],
  validation_s: ["Validation", "validation"],
  checkpoint_s: ["Checkpoints", "training stood still to store state"],
  lost_s: ["Lost work", "trained after the last checkpoint before a stop"],
  start_s: ["Starts", "from the launch of a process to its first step"],
  other_s: ["Other", "between and after trainings"],
  undivided_s: ["Not divided", "the script does not tell what it does"],
  waiting_s: ["No process", "queued, paused, or before a restart"],
};

/** Return the shares that are not zero, each with its fraction of the whole. */
export function sharesOf(time: TrialTime): (TimeShare & { key: ShareName })[] {
  const names = Object.keys(SHARES) as ShareName[];
  return names
    .filter((key) => time[key] > 0)
    .map((key) => {
      const [name, meaning] = SHARES[key];
      return { key, name, meaning, seconds: time[key], fraction: time[key] / time.total_s };
    });
}

/** Return the place of a share among all, whichever are shown, so that its colour stays. */
export function placeOf(key: string): number {
  return Object.keys(SHARES).indexOf(key);
}

/** Return a fraction as a percentage with one digit, which tells small shares from none. */
export function formatShare(fraction: number): string {
  return `${(100 * fraction).toFixed(1)} %`;
}
