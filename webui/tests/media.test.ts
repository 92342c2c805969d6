import { describe, expect, it } from "vitest";

import type { Media } from "../src/api/types";
import { staleAfter } from "../src/live/apply";
import {
  commonBins,
  filesOf,
  histogramOf,
  indexAt,
  sectionsOf,
  spread,
  tableOf,
  unionOf,
  viewOf,
} from "../src/lib/media";

const named = (name: string, kind = "image", group = "training") => ({ group, name, kind });
const file = (type: string, path = "media/a") => ({
  path,
  type,
  digest: "",
  size: null,
  caption: null,
  width: null,
});

describe("names of media", () => {
  it("are grouped by what is before the last slash, and filtered by words", () => {
    const names = [named("b/x"), named("a/b/y"), named("alone"), named("b/z", "table")];
    expect(sectionsOf(names).map(({ title, names: n }) => [title, n.length])).toEqual([
      ["", 1],
      ["a/b", 1],
      ["b", 2],
    ]);
    expect(sectionsOf(names, "B TABLE").flatMap((one) => one.names)).toEqual([names[3]]);
  });
});

describe("steps", () => {
  it("stand for the newest up to the one that is wanted", () => {
    expect([null, 25, 10, 9, 99].map((step) => indexAt([10, 20, 30], step))).toEqual([
      2, 1, 0, -1, 2,
    ]);
    expect(indexAt([], null)).toBe(-1);
  });
  it("are united, and spread with both ends", () => {
    expect(unionOf([[3, 10], [2, 3], []])).toEqual([2, 3, 10]);
    const steps = Array.from({ length: 2000 }, (_, i) => i);
    const chosen = spread(steps, 100);
    expect([chosen.length, chosen[0], chosen.at(-1)]).toEqual([100, 0, 1999]);
    expect(spread([1, 2], 100)).toEqual([1, 2]);
  });
  it("are read again when a run reports media, or begins again", () => {
    const event = { id: 1, time: 0, experiment_id: 2, trial_id: 3, data: {} };
    expect(staleAfter({ ...event, kind: "media" })).toEqual([["media", 3]]);
    expect(staleAfter({ ...event, kind: "attempt_started" })).toContainEqual(["media", 3]);
  });
});

describe("files", () => {
  it("are taken only as far as they are such", () => {
    const files = [{ path: "a.png", media_type: 7, size: "x", facts: null, caption: "" }, {}];
    expect(filesOf({ files } as unknown as Media)).toEqual([
      { ...file("", "a.png"), digest: "", size: null },
    ]);
  });
  it("are shown by their type, and as pages only if reported as such", () => {
    expect(viewOf("file", file("image/png"))).toBe("image");
    expect(viewOf("video", file("image/apng"))).toBe("image");
    expect(viewOf("file", file("text/html"))).toBe("file");
    expect(viewOf("html", file("text/html"))).toBe("html");
    expect(viewOf("figure", file("application/json"))).toBe("figure");
    expect(viewOf("file", file("application/json"))).toBe("file");
  });
});

describe("tables", () => {
  it("come from Paceline and from W&B, and from nothing else", () => {
    const table = { columns: ["a", "1"], rows: [[1, null]] };
    expect(tableOf('{"columns": ["a", 1], "rows": [[1, null], 5]}')).toEqual(table);
    expect(tableOf('{"columns": ["a", 1], "data": [[1, null]]}')).toEqual(table);
    for (const text of ["", "null", "[]", '{"columns": 3}']) expect(tableOf(text)).toBeNull();
  });
});

describe("histograms", () => {
  it("are refused unless edges rise and counts are counts", () => {
    expect(histogramOf({ bins: [0, 1, 3], counts: [2, 4] })).toEqual({
      edges: [0, 1, 3],
      counts: [2, 4],
    });
    const wrong = [
      null,
      { bins: [0, 1], counts: [] },
      { bins: [0, 1], counts: [1, 2] },
      { bins: [1, 0], counts: [1] },
      { bins: [0, { $float: "nan" }], counts: [1] },
      { bins: [null, 1], counts: [1] },
      { bins: [0, 1], counts: [-1] },
    ];
    for (const value of wrong) expect(histogramOf(value)).toBeNull();
  });
  it("have common bins in which each count is spread over its own", () => {
    const { edges, shares } = commonBins(
      [
        { edges: [0, 4], counts: [8] },
        { edges: [2, 2, 3], counts: [1, 3] },
      ],
      4,
    );
    expect(edges).toEqual([0, 1, 2, 3, 4]);
    expect(shares).toEqual([
      [0.25, 0.25, 0.25, 0.25],
      [0, 0, 1, 0],
    ]);
    expect(commonBins([{ edges: [1, 1], counts: [5] }], 2).shares).toEqual([[1, 0]]);
  });
});
