import { describe, expect, it } from "vitest";

import type { Attempt, Experiment, ExperimentState, Trial } from "../src/api/types";
import { differing, flatten } from "../src/lib/flatten";
import {
  chartable,
  chartsOf,
  isProfilerGroup,
  matchingCharts,
  numericMetrics,
  xAxesOf,
  xChoices,
} from "../src/lib/metrics";
import { formatBytes, formatLength, formatNumber, toNumber } from "../src/lib/numbers";
import { noteOn } from "../src/pages/experiment/Overview";
import { metricsSearch } from "../src/lib/search";
import { compareValues } from "../src/lib/sorting";
import {
  shownAttemptState,
  shownExperimentState,
  shownMetric,
  shownProgress,
  shownTrialState,
} from "../src/lib/states";
import { formatAgo, formatDuration } from "../src/lib/times";

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
    [1_648_771_200, "1,648,771,200"],
    [1e300, "1.00e+300"],
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

  it("writes one of a unit in the singular", () => {
    expect(formatLength(1, "epochs")).toBe("1 epoch");
    expect(formatLength(1, "batches")).toBe("1 batch");
    expect(formatLength(1, "loss")).toBe("1 loss");
    expect(formatLength(4, "epochs")).toBe("4 epochs");
    expect(formatLength(4, "epoch")).toBe("4 epochs");
    expect(formatLength(1, "epoch")).toBe("1 epoch");
    expect(formatLength(4, "batch")).toBe("4 batches");
    expect(formatLength(4, "samples_seen")).toBe("4 samples_seen");
    expect(formatLength(2, "")).toBe("2");
  });

  it("writes how long ago something was, shorter in tables", () => {
    expect(formatAgo(0, 300_000)).toBe("5 minutes ago");
    expect(formatAgo(0, 300_000, "short")).toBe("5 min. ago");
  });
});

describe("experiments", () => {
  const one = { searcher: "single", state: "ACTIVE", progress: 0, metric: "loss" } as Experiment;

  it("show no progress where nothing says how long training goes on", () => {
    expect(shownProgress(one)).toBeNull();
    expect(shownProgress({ ...one, progress: 0.5 })).toBe(0.5);
    expect(shownProgress({ ...one, searcher: "grid" })).toBe(0);
  });

  it("show no metric that was only guessed", () => {
    const unmanaged = { ...one, is_unmanaged: true, best_metric: null };
    expect(shownMetric(unmanaged)).toBeNull();
    expect(shownMetric({ ...unmanaged, best_metric: 1 })).toBe("loss");
    expect(shownMetric({ ...unmanaged, is_unmanaged: false })).toBe("loss");
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

  it("are drawn along what their code has chosen, unless the address says something else", () => {
    const along = (x_axis: string | null) => ({ ...one, x_axis });
    const names = numericMetrics({
      training: {
        "train/loss": along("train/step"),
        "train/acc": along("train/step"),
        "val/loss": along("epoch"),
        lost: along("never reported"),
        other: along(null),
        "train/step": one,
        epoch: along("train/step"),
      },
      system: { a: one, b: one, c: one, d: one },
    });
    const charts = [...chartsOf(names)];
    const all = ["a", "b", "c", "d", "lost", "other", "train/step"].map((id) => [id, "batches"]);
    const found = xAxesOf(charts.slice(0, 3), names);
    expect([found.shared, found.isChosen]).toEqual(["train/step", true]);
    expect([...found.own]).toEqual([["val/loss", "epoch"]]);
    const { shared, own } = xAxesOf(charts.filter(([id]) => id !== "lost"), names);
    expect(shared).toBe("train/step");
    expect([...own].sort()).toEqual(
      [...all.filter(([id]) => id !== "lost"), ["val/loss", "epoch"]].sort(),
    );
    expect(xAxesOf(charts.filter(([id]) => id === "lost"), names).isChosen).toBe(false);
    expect(xAxesOf(charts, names, "time")).toEqual({
      shared: "time",
      own: new Map(),
      isChosen: true,
    });
    expect(xAxesOf(charts.slice(3, 5), names)).toEqual({
      shared: "batches",
      own: new Map(),
      isChosen: false,
    });
  });

  it("offer what the x axis always may be only once", () => {
    const counted = { training: { loss: one, batches: one, epochs: one, time: one } };
    expect(xChoices(numericMetrics(counted))).toEqual(["epochs", "loss"]);
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

describe("shown states", () => {
  it.each([
    ["ACTIVE", 0, "QUEUED"],
    ["ACTIVE", 1, "RUNNING"],
    ["PAUSED", 0, "PAUSED"],
    ["STOPPING_KILLED", 1, "STOPPING"],
    ["ERROR", 0, "ERROR"],
  ])("of an experiment that is %s with %i running", (state, running, expected) => {
    expect(shownExperimentState({ state, num_running: running } as Experiment)).toBe(expected);
  });

  it.each([
    ["ACTIVE", true, "ACTIVE", "RUNNING"],
    ["ACTIVE", false, "ACTIVE", "QUEUED"],
    ["ACTIVE", false, "PAUSED", "PAUSED"],
    ["ACTIVE", true, "PAUSED", "STOPPING"],
    ["ACTIVE", true, "STOPPING_CANCELED", "STOPPING"],
    ["STOPPING_COMPLETED", true, "ACTIVE", "STOPPING"],
    ["COMPLETED", false, "ACTIVE", "STOPPED"],
  ])("of a trial that is %s (running: %s) of one that is %s", (state, running, of, expected) => {
    const trial = { state, is_running: running, shown_state: "STOPPED" } as Trial;
    expect(shownTrialState(trial, of as ExperimentState)).toBe(expected);
    expect(shownTrialState({ ...trial, experiment_state: of } as Trial)).toBe(expected);
  });

  it.each([
    ["RUNNING", null, "RUNNING"],
    ["ENDED", { reason: "exited", code: 0, outcome: "completed" }, "COMPLETED"],
    ["ENDED", { reason: "exited", code: 1, outcome: "error", kind: "user" }, "FAILED"],
    ["ENDED", { reason: "exited", code: 1, outcome: "error" }, "FAILED"],
    ["ENDED", { reason: "runner_lost", kind: "transient" }, "FAILED"],
    ["ENDED", { reason: "exited", code: 0, outcome: "preempted" }, "ENDED"],
    ["ENDED", { reason: "killed", signal: 9 }, "ENDED"],
  ])("of an attempt that is %s with the end %o", (state, exit, expected) => {
    expect(shownAttemptState({ state, exit } as unknown as Attempt)).toBe(expected);
  });
});

it("keeps the charts whose names have every word of a filter", () => {
  const charts = [
    ["loss", [{ group: "training", metric: "loss" }]],
    ["layer1/norm", [{ group: "validation", metric: "layer1/norm" }]],
    ["layer2/norm", [{ group: "validation", metric: "layer2/norm" }]],
  ] as const;
  const titles = (filter: string) => matchingCharts(charts, filter).map(([title]) => title);
  expect(titles("")).toEqual(["loss", "layer1/norm", "layer2/norm"]);
  expect(titles("NORM  valid")).toEqual(["layer1/norm", "layer2/norm"]);
  expect(titles("norm 2")).toEqual(["layer2/norm"]);
  expect(titles("norm(")).toEqual([]);
});

it("says of how many trials the drawn ones are the best", () => {
  const experiment = { best_trial_id: 7 } as Experiment;
  expect(noteOn(100, 15_005, experiment)).toMatch(/^The best 100 of 15,005 trials\. /);
  expect(noteOn(100, 100, experiment)).toMatch(/^Colours go/);
  expect(noteOn(3, 3, experiment)).toBeUndefined();
});
