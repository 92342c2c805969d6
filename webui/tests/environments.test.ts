import { expect, test } from "vitest";

import { attemptsOf, factsOf, groupsOf } from "../src/lib/environments";

const HERE = { python: { version: "3.11.7" }, packages: { torch: "2.13.0", numpy: "2.4.0" } };
const SOURCE = { commit: "0123456789abcdef", branch: "trunk", num_diff_bytes: 1 };

test("equal environments in a row are one group, and attempts without one are left out", () => {
  const groups = groupsOf([
    { number: 1, environment: HERE, source: null },
    { number: 2, environment: null, source: null },
    { number: 3, environment: HERE, source: null },
    { number: 4, environment: HERE, source: null },
    { number: 5, environment: { ...HERE, host: { name: "box" } }, source: null },
    { number: 6, environment: HERE, source: null },
  ]);
  expect(groups.map(attemptsOf)).toEqual([
    "attempt 6",
    "attempt 5",
    "attempts 3 to 4",
    "attempt 1",
  ]);
});

test("other code is another group", () => {
  const groups = groupsOf([
    { number: 1, environment: HERE, source: null },
    { number: 2, environment: HERE, source: SOURCE },
  ]);
  expect(groups).toHaveLength(2);
});

test("the facts name what is known", () => {
  const [group] = groupsOf([{ number: 1, environment: HERE, source: SOURCE }]);
  expect(group && factsOf(group)).toEqual([
    ["Python", "3.11.7"],
    ["torch", "2.13.0"],
    ["Code", "commit 0123456789 of trunk, 1 byte of changes"],
  ]);
});
