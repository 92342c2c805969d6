import { describe, expect, it } from "vitest";

import { nearestIndex, smooth, xRange, yRange } from "../src/charts/curves";

const curve = (xs: number[], ys: (number | null)[]) => ({
  id: "a",
  label: "a",
  xs,
  ys,
  color: "#000000",
});

describe("smoothing", () => {
  it("keeps a constant series as it is", () => {
    expect(smooth([2, 2, 2], 0.9)).toEqual([2, 2, 2].map((y) => expect.closeTo(y, 12)));
  });

  it("keeps gaps and weighs what came before", () => {
    // With weight 1/2: (1/2 * 0 + 1/2 * 3 ... ) / (1/4 + 1/2) = 2.
    expect(smooth([0, null, 3], 0.5)).toEqual([0, null, 2]);
  });

  it("changes nothing with weight zero", () => {
    expect(smooth([1, null, 5], 0)).toEqual([1, null, 5]);
  });
});

describe("ranges", () => {
  it("has none without points", () => {
    expect(xRange([curve([], [])])).toBeNull();
  });

  it("looks only at what is seen, and leaves out what a logarithm cannot show", () => {
    const range = yRange([curve([0, 1, 2], [1000, 1, -5])], { min: 0.5, max: 2 }, true);
    expect(range.min).toBeCloseTo(1 / 1.15);
    expect(range.max).toBeCloseTo(1.15);
  });

  it("gives a constant series room", () => {
    expect(yRange([curve([0, 1], [4, 4])], { min: 0, max: 1 }, false)).toEqual({
      min: 3.6,
      max: 4.4,
    });
  });
});

describe("the nearest point", () => {
  it.each([
    [-5, 0],
    [1.4, 0],
    [1.6, 1],
    [99, 2],
  ])("of %f is the one with index %i", (x, index) => {
    expect(nearestIndex([1, 2, 3], x)).toBe(index);
  });
});
