import { describe, expect, it } from "vitest";

import { differing, flatten } from "../src/lib/flatten";
import { chartable, chartsOf, isProfilerGroup, numericMetrics, xChoices } from "../src/lib/metrics";
import { formatBytes, formatNumber, toNumber } from "../src/lib/numbers";
import { metricsSearch } from "../src/lib/search";
import { compareValues } from "../src/lib/sorting";
import { formatDuration } from "../src/lib/times";

describe("numbers", () => {
  it("reads what JSON cannot hold", () => {
    expect(toNumber({ $float: "nan" })).toBeNaN();
    expect(toNumber({ $float: "-inf" })).toBe(-Infinity);
    expect(toNumber("3")).toBeNull();
  });

  it.each([
    [0.123456789, "0.12346"],
    [1234567.5, "1.23e+6"],
    [0.00001234, "1.23e-5"],
    [12345, "12,345"],
    [NaN, "NaN"],
    [null, "–"],
  ])("writes %s as %s", (value, text) => {
    expect(formatNumber(value)).toBe(text);
  });

  it("writes sizes in binary units", () => {
    expect(formatBytes(1536)).toBe("1.5 KiB");
    expect(formatBytes(7)).toBe("7 B");
  });

  it("writes durations in two units", () => {
    expect(formatDuration(3725)).toBe("1 h 2 min");
    expect(formatDuration(61)).toBe("1 min 1 s");
  });
});

describe("flattening", () => {
  it("joins names with dots and keeps lists", () => {
    expect(flatten({ a: { b: 1, c: [1, 2] }, d: null })).toEqual({
      "a.b": 1,
      "a.c": [1, 2],
      d: null,
    });
  });

  it("finds what differs or is missing somewhere", () => {
    expect(differing([{ a: 1, b: 2 }, { a: 1, b: 3 }, { a: 1 }])).toEqual(new Set(["b"]));
  });
});

describe("sorting", () => {
  it("puts what has no value last in both directions", () => {
    const values = [3, null, 1, { $float: "nan" }];
    const sorted = (isDescending: boolean) =>
      values.toSorted((a, b) => compareValues(a, b, isDescending));
    expect(sorted(false).slice(0, 2)).toEqual([1, 3]);
    expect(sorted(true).slice(0, 2)).toEqual([3, 1]);
  });
});

describe("metrics", () => {
  const one = { count: 1, last: 1, last_step: 1, min: 1, max: 1, mean: 1 };
  const summary = {
    training: { train_loss: one, epochs: one },
    validation: { test_loss: one, note: { ...one, min: null } },
  };

  it("share a chart across training and validation, without those that only count", () => {
    const charts = chartsOf(numericMetrics(summary));
    expect([...charts.keys()]).toEqual(["loss"]);
    expect(charts.get("loss")).toHaveLength(2);
  });

  it("leave to the profiler what trainers record of their speed, on each rank", () => {
    expect(["profiling", "profiling_rank_1", "system"].every(isProfilerGroup)).toBe(true);
    expect(["training", "my_profiling", "profiling_2"].some(isProfilerGroup)).toBe(false);
    const rates = numericMetrics({ profiling: { samples_per_second: one } });
    expect(rates).toHaveLength(1);
    expect(chartable(rates)).toEqual([]);
  });

  it("offer epochs first as the x axis", () => {
    expect(xChoices(numericMetrics(summary))[0]).toBe("epochs");
  });
});

describe("addresses", () => {
  it("leave out what cannot be read", () => {
    expect(metricsSearch({ log: "true", smooth: "0.5", from: "x", to: 5 })).toEqual({
      log: true,
      smooth: 0.5,
      to: 5,
    });
  });
});
