import { expect, it } from "vitest";

import type { Attempt, Trial } from "../src/api/types";
import { batchesOf, beginningOf, freshAttempt, restartsOf } from "../src/lib/attempts";

const first = { number: 1, resumed_from: null, resumed_steps: 0 } as Attempt;
const again = { number: 2, resumed_from: null, resumed_steps: 0 } as Attempt;
const summary = { training: { loss: { last_step: 435, count: 435 } } } as unknown as NonNullable<
  Trial["summary"]
>;

function trial(changed: Partial<Trial>): Trial {
  return {
    restarts: 0,
    num_attempts: changed.attempts?.length ?? 1,
    steps_completed: 779,
    latest_checkpoint: null,
    summary,
    attempts: [first],
    ...changed,
  } as Trial;
}

it("tells one truth of a trial that began again without a checkpoint", () => {
  const restarted = trial({ attempts: [first, again] });
  expect(freshAttempt(restarted)?.number).toBe(2);
  expect(batchesOf(restarted)).toBe("435 in attempt 2; 779 before it were lost");
  expect(restartsOf(restarted)).toBe("1, of which 0 count for max_restarts");
});

it.each([
  ["one attempt", trial({})],
  ["a checkpoint", trial({ attempts: [first, again], latest_checkpoint: "abc" })],
  ["a start from one", trial({ attempts: [first, { ...again, resumed_from: "abc" }] })],
])("shows the batches as they are with %s", (_, one) => {
  expect(freshAttempt(one)).toBeNull();
  expect(batchesOf(one)).toBe("779");
});

it("shows restarts that all count as a number", () => {
  expect(restartsOf(trial({ attempts: [first, again], restarts: 1 }))).toBe("1");
  expect(restartsOf(trial({ num_attempts: 0 }))).toBe("0");
});

it("names the batch of a state in memory, also without any checkpoint", () => {
  expect(beginningOf(first)).toBe("the beginning");
  expect(beginningOf({ ...again, resumed_steps: 22 })).toBe("batch 22");
  expect(beginningOf({ ...again, resumed_from: "abc", resumed_steps: 22 })).toBe("batch 22");
});
