import { describe, expect, it } from "vitest";

import { conditionFrom, conditions } from "../src/lib/conditions";
import { localInput } from "../src/lib/times";

describe("conditions on columns", () => {
  it.each([
    ["best_metric", "<", "0.5", ["best_metric", "<", 0.5]],
    ["hparam:bias", "=", "true", ["hparam:bias", "=", true]],
    ["name", "contains", "12", ["name", "contains", "12"]],
    ["name", "=", "one", ["name", "=", "one"]],
    ["best_metric", "empty", "", ["best_metric", "empty"]],
    ["best_metric", "<", "much", null],
    ["best_metric", "<", " ", null],
    ["", "=", "1", null],
  ] as const)("reads %s %s %s", (column, operator, typed, expected) => {
    expect(conditionFrom(column, operator, typed)).toEqual(expected);
  });

  it("leaves out of an address what is no condition", () => {
    const good = ["id", "<", 5];
    expect(conditions([good, ["id", "like", 5], "id", ["id", "=", [1]]])).toEqual([good]);
    expect(conditions("id < 5")).toBeUndefined();
  });
});

it("writes a time as its field reads it", () => {
  const time = Date.UTC(2026, 0, 2, 3, 4, 5) / 1000;
  expect(Date.parse(localInput(time)) / 1000).toBe(time);
});
