import { describe, expect, it } from "vitest";

import { nearestIndex, smoothingSteps, withAverages, xRange, yRange } from "../src/charts/curves";

const curve = (xs: number[], ys: (number | null)[]) => ({
  id: "a",
  label: "a",
  xs,
  ys,
  color: "#000000",
});

describe("smoothing", () => {
  it("has an extent in steps, which changes when their number has doubled", () => {
    expect(smoothingSteps(0, 1000)).toBeNull();
    expect(smoothingSteps(Math.exp(-1), 1000)).toBeCloseTo(10.24);
    expect(smoothingSteps(0.9, 1024)).toBe(smoothingSteps(0.9, 513));
    expect(smoothingSteps(0.9, 1025)).toBeCloseTo(2 * (smoothingSteps(0.9, 1024) ?? 0));
    expect(smoothingSteps(0.99, 0)).toBeCloseTo(0.995, 2);
  });

  it("draws the averages over what was reported", () => {
    const plain = curve([1, 2], [5, null]);
    const smoothed = { ...curve([1, 2], [3, 5]), id: "b", smoothed: [3, 4] };
    const lines = withAverages([plain, smoothed]);
    expect(lines.map(({ id, ys, isFaint }) => [id, ys, isFaint])).toEqual([
      ["b reported", [3, 5], true],
      ["a", [5, null], undefined],
      ["b", [3, 4], undefined],
    ]);
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
