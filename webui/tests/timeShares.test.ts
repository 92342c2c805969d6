import { expect, test } from "vitest";

import type { TrialTime } from "../src/api/types";
import { formatShare, sharesOf } from "../src/lib/timeShares";

const NOTHING: TrialTime = {
  training_s: 0,
  data_wait_s: 0,
  validation_s: 0,
  checkpoint_s: 0,
  lost_s: 0,
  start_s: 0,
  other_s: 0,
  undivided_s: 0,
  waiting_s: 0,
  total_s: 0,
  goodput: null,
  until: 0,
};

test("shares that are not zero are shown in order, with their fraction of the whole", () => {
  const shares = sharesOf({ ...NOTHING, waiting_s: 10, training_s: 30, lost_s: 10, total_s: 50 });
  expect(shares.map((one) => [one.name, one.seconds, one.fraction])).toEqual([
    ["Training", 30, 0.6],
    ["Lost work", 10, 0.2],
    ["No process", 10, 0.2],
  ]);
  expect(sharesOf(NOTHING)).toEqual([]);
});

test("no two shares have the same colour, but for the stripes of the last", () => {
  const all = Object.fromEntries(Object.keys(NOTHING).map((key) => [key, 1]));
  const colors = sharesOf(all as never).map((one) => one.colorIndex);
  expect(new Set(colors.slice(0, -1)).size).toBe(8);
  expect(colors).toHaveLength(9);
});

test("a small share differs from none", () => {
  expect(formatShare(0.0012)).toBe("0.1 %");
  expect(formatShare(1)).toBe("100.0 %");
});
