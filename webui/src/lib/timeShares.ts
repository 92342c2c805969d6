/** What the time of a trial went to, in the order in which it is shown. */

import type { TrialTime } from "../api/types";

export interface TimeShare {
  name: string;
  seconds: number;
  /** Of the whole time, between 0 and 1. */
  fraction: number;
  meaning: string;
  colorIndex: number;
}

type ShareName = Exclude<Extract<keyof TrialTime, `${string}_s`>, "total_s">;

/** Name, meaning, and which colour of the palette: the same, whichever others are shown. */
const SHARES: Record<ShareName, readonly [string, string, number]> = {
  training_s: ["Training", "steps whose result was kept", 0],
  data_wait_s: ["Waiting for data", "devices idle until data came", 1],
  validation_s: ["Validation", "measuring on other data", 2],
  checkpoint_s: ["Checkpoints", "training stood still to store state", 3],
  lost_s: ["Lost work", "trained after the last checkpoint before a stop", 4],
  start_s: ["Starts", "from the launch of a process to its first step", 7],
  other_s: ["Other", "between and after trainings", 6],
  undivided_s: ["Not divided", "the script does not tell what it does", 5],
  waiting_s: ["No process", "queued, paused, or before a restart", 6],
};

/** Return the shares that are not zero, each with its fraction of the whole. */
export function sharesOf(time: TrialTime): (TimeShare & { key: ShareName })[] {
  const names = Object.keys(SHARES) as ShareName[];
  return names
    .filter((key) => time[key] > 0)
    .map((key) => {
      const [name, meaning, colorIndex] = SHARES[key];
      const seconds = time[key];
      return { key, name, meaning, colorIndex, seconds, fraction: seconds / time.total_s };
    });
}

/** Return a fraction as a percentage with one digit, which tells small shares from none. */
export function formatShare(fraction: number): string {
  return `${(100 * fraction).toFixed(1)} %`;
}
