import { describe, expect, it } from "vitest";

import { numClipped, yRange } from "../src/charts/curves";
import { matcher } from "../src/lib/metrics";
import { panelsOf, sectionsOf } from "../src/lib/panels";
import {
  ALL_BUT_SEED,
  namesOf,
  rowsOf,
  type Run,
  sorted,
  switchedOn,
  withDifference,
} from "../src/lib/runs";

const run = (id: number, hparams: Record<string, unknown>, more: Partial<Run> = {}): Run => ({
  id,
  experimentId: 1,
  experiment: "sweep",
  hparams,
  seed: id,
  best: id / 10,
  isSmallerBetter: true,
  trial: {} as Run["trial"],
  ...more,
});
const named = (runs: Run[]) => [...namesOf(runs).values()];

describe("names of runs", () => {
  it("say what differs, the seed last, and nothing that is the same", () => {
    const seeds = [0, 1].flatMap((seed) => [
      run(2 * seed, { "optimizer.lr": 0.02, layers: 3, seed }),
      run(2 * seed + 1, { "optimizer.lr": 0.1, layers: 3, seed }),
    ]);
    expect(named(seeds)[0]).toBe("lr 0.02, seed 0");
    expect(named(seeds)[3]).toBe("lr 0.1, seed 1");
  });

  it("are those of the experiments where these tell them apart", () => {
    const two = [run(1, { lr: 1 }, { experiment: "a" }), run(2, { lr: 2 }, { experiment: "b" })];
    expect(named(two)).toEqual(["a", "b"]);
    expect(named([...two, run(3, { lr: 2 }, { experiment: "a" })])).toEqual([
      "a, lr 1",
      "b, lr 2",
      "a, lr 2",
    ]);
  });

  it("are never the same twice", () => {
    expect(named([run(1, { lr: 1 })])).toEqual(["sweep"]);
    expect(named([run(7, { lr: 1 }), run(8, { lr: 1 }), run(9, { lr: 2 })])).toEqual([
      "lr 1, trial 7",
      "lr 1, trial 8",
      "lr 2",
    ]);
    const many = [1, 2].map((id) =>
      run(id, Object.fromEntries([..."abcdefgh"].map((name) => [name, name === "h" ? id : 0]))),
    );
    expect(named(many)).toEqual(["h 1", "h 2"]);
  });
});

describe("rows", () => {
  const runs = [0, 1, 2, 3].map((id) => run(id, { lr: id < 2 ? 0.1 : 0.2, seed: id % 2 }));

  it("group by everything but the seed", () => {
    const rows = rowsOf(runs, [ALL_BUT_SEED]);
    expect(rows.map(({ name, runs: members }) => [name, members.length])).toEqual([
      ["lr 0.1", 2],
      ["lr 0.2", 2],
    ]);
  });

  it("put the newest first, or the best, and the baseline on top", () => {
    const rows = rowsOf(runs, []);
    const keys = (sort?: string, top: string[] = []) =>
      sorted(rows, sort, new Set(top)).map(({ key }) => key);
    expect(keys()).toEqual(["3", "2", "1", "0"]);
    expect(keys("metric", ["2"])).toEqual(["2", "0", "1", "3"]);
  });

  it("are switched on up to a number, and by choice", () => {
    expect([...switchedOn(rowsOf(runs, []), 2, ["3", "gone"], ["1"])]).toEqual(["0", "3"]);
  });

  it("have differences between numbers only", () => {
    expect(withDifference(0.5, 0.75)).toBe("0.5 (−0.25)");
    expect(withDifference("adam", "sgd")).toBe("adam");
    expect(withDifference(1, null)).toBe("1");
  });
});

describe("panels", () => {
  const panels = panelsOf(
    [
      "training/loss",
      "validation/loss",
      "training/grad/norm",
      "training/epochs",
      "system/cpu/0",
    ].map((id) => ({
      group: id.split("/")[0] ?? "",
      metric: id.slice(id.indexOf("/") + 1),
      numTrials: 1,
    })),
  );
  const titles = (arrangement: Partial<Parameters<typeof sectionsOf>[1]>) =>
    sectionsOf(panels, { pinned: [], hidden: [], folded: [], ...arrangement }).map(
      ({ name, panels: members, isClosed }) => [name, members.map(({ title }) => title), isClosed],
    );

  it("stand in sections by prefix or group, the profiler's closed", () => {
    expect(titles({})).toEqual([
      ["validation", ["loss (validation)"], false],
      ["training", ["loss (training)"], false],
      ["grad", ["grad/norm"], false],
      ["system", ["cpu/0"], true],
    ]);
  });

  it("are pinned, hidden and folded", () => {
    expect(
      titles({
        pinned: ["training/grad/norm", "gone/gone"],
        hidden: ["validation/loss"],
        folded: ["system"],
      }),
    ).toEqual([
      ["Pinned", ["grad/norm"], false],
      ["training", ["loss (training)"], false],
      ["system", ["cpu/0"], false],
    ]);
  });

  it.each([
    ["loss", "training/loss", true],
    ["train norm", "training/grad/norm", true],
    ["lay*norm", "layer3/norm", true],
    ["norm*lay", "layer3/norm", false],
    ["acc|loss", "validation/loss", true],
    ["| ", "validation/loss", true],
    ["(a+)+$", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!", false],
    ["*a*a*a*a*a*a*a*a*a*b", "a".repeat(50_000), false],
  ])("found by %s in %s: %s", (filter, text, isFound) => {
    expect(matcher(filter)(text)).toBe(isFound);
  });
});

describe("outliers", () => {
  const ys = [...Array.from({ length: 99 }, (_, i) => i / 100), 1000];
  const curve = { id: "a", label: "a", xs: ys.map((_, i) => i), ys, color: "#000000" };
  const all = { min: 0, max: 100 };

  it("are cut off and counted, and nothing else is", () => {
    expect(yRange([curve], all, false, true).max).toBeLessThan(1.1);
    expect(yRange([curve], all, false).max).toBeGreaterThan(1000);
    expect(numClipped([curve], null, false)).toBe(1);
    expect(numClipped([{ ...curve, ys: ys.slice(0, 99) }], null, false)).toBe(0);
  });

  it("stay in sight as the ends of a group's spread", () => {
    const band = {
      lows: ys.map((y) => y - 1),
      highs: ys.map((y) => y + 5),
      counts: ys.map(() => 2),
    };
    expect(yRange([{ ...curve, band }], all, false).max).toBeGreaterThan(1005);
  });
});
