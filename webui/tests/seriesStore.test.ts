import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import {
  type Points,
  type ReadPoints,
  SeriesStore,
  type SeriesView,
  type Wanted,
} from "../src/live/seriesStore";

const LOSS = { trialId: 1, group: "validation", metric: "loss" };
const ID = "1/validation/loss";

/** A master with one series that grows by one point per step. */
function setUp(isSampled = false, maxPoints = 100, smoothing: number | null = null) {
  const asked: Wanted[][] = [];
  let newest = 3;
  const read: ReadPoints = (wanted, _span, smoothBy): Promise<Points[]> => {
    asked.push([...wanted]);
    return Promise.resolve(
      wanted.map(({ afterStep }) => {
        const steps = Array.from({ length: newest }, (_, i) => i + 1).filter((s) => s > afterStep);
        const ys = steps.map((s) => s * 10);
        const smoothed = smoothBy === null ? [] : steps.map(() => smoothBy);
        return { xs: steps, ys, steps, smoothed, lastStep: newest, isSampled };
      }),
    );
  };
  let view: SeriesView | null = null;
  const store = new SeriesStore(read, maxPoints, (next) => (view = next), smoothing);
  const points = () => view?.points.get(ID);
  return { asked, store, points, grow: (to: number) => (newest = to) };
}

describe("the series store", () => {
  beforeEach(() => {
    vi.useFakeTimers();
  });
  afterEach(() => {
    vi.useRealTimers();
  });

  it("reads a series once, and then only what is new", async () => {
    const { asked, store, points, grow } = setUp();
    store.want([LOSS]);
    await vi.advanceTimersByTimeAsync(0);
    expect(points()?.steps).toEqual([1, 2, 3]);
    grow(5);
    store.note(1);
    store.note(1);
    await vi.advanceTimersByTimeAsync(1000);
    expect(points()?.steps).toEqual([1, 2, 3, 4, 5]);
    expect(asked.map((one) => one.map(({ afterStep }) => afterStep))).toEqual([[-1], [3]]);
  });

  it("keeps what it knows when further series are wanted", async () => {
    const { asked, store } = setUp();
    store.want([LOSS]);
    await vi.advanceTimersByTimeAsync(0);
    store.want([LOSS, { ...LOSS, trialId: 2 }]);
    await vi.advanceTimersByTimeAsync(0);
    expect(asked[1]?.map(({ trialId }) => trialId)).toEqual([2]);
  });

  it("reads anew after a restart, as steps may have been taken back", async () => {
    const { store, points, grow } = setUp();
    store.want([LOSS]);
    await vi.advanceTimersByTimeAsync(0);
    grow(2);
    store.note(1);
    await vi.advanceTimersByTimeAsync(2000);
    expect(points()?.steps).toEqual([1, 2]);
  });

  it("thins out a series that has grown long", async () => {
    const { asked, store, grow } = setUp(false, 4);
    store.want([LOSS]);
    await vi.advanceTimersByTimeAsync(0);
    grow(9);
    store.note(1);
    await vi.advanceTimersByTimeAsync(1000);
    store.note(1);
    await vi.advanceTimersByTimeAsync(1000);
    expect(asked.map((one) => one[0]?.afterStep)).toEqual([-1, 3, -1]);
  });

  it("reads smoothed points at once where smoothing is on, and averages of what is new", async () => {
    const { asked, store, points, grow } = setUp(false, 100, 7);
    store.want([LOSS]);
    await vi.advanceTimersByTimeAsync(0);
    grow(4);
    store.note(1);
    await vi.advanceTimersByTimeAsync(1000);
    expect(points()?.smoothed).toEqual([7, 7, 7, 7]);
    expect(asked.map((one) => one[0]?.afterStep)).toEqual([-1, 3]);
  });

  it("keeps what it shows until it is smoothed in another way, also of a part", async () => {
    const { asked, store, points } = setUp(true);
    store.want([LOSS]);
    await vi.advanceTimersByTimeAsync(0);
    void store.lookAt({ min: 0, max: 9 });
    await vi.advanceTimersByTimeAsync(0);
    store.smoothBy(5);
    expect(points()?.ys).toEqual([10, 20, 30]);
    await vi.advanceTimersByTimeAsync(0);
    expect(points()?.smoothed).toEqual([5, 5, 5]);
    store.smoothBy(6);
    await vi.advanceTimersByTimeAsync(0);
    expect(points()?.smoothed).toEqual([6, 6, 6]);
    // What was reported is known already.
    const numAsked = asked.length;
    store.smoothBy(null);
    await vi.advanceTimersByTimeAsync(2000);
    expect(asked).toHaveLength(numAsked);
  });

  it("smooths what came while smoothing was off", async () => {
    const { store, points, grow } = setUp(false, 100, 7);
    store.want([LOSS]);
    await vi.advanceTimersByTimeAsync(0);
    store.smoothBy(null);
    grow(5);
    store.note(1);
    await vi.advanceTimersByTimeAsync(1000);
    expect(points()?.ys).toEqual([10, 20, 30, 40, 50]);
    store.smoothBy(7);
    await vi.advanceTimersByTimeAsync(0);
    expect(points()?.smoothed).toEqual([7, 7, 7, 7, 7]);
  });

  it("tells of an error and tries again", async () => {
    const views: SeriesView[] = [];
    const read = vi.fn().mockRejectedValue(new TypeError("offline"));
    const store = new SeriesStore(read, 100, (view) => views.push(view));
    store.want([LOSS]);
    await vi.advanceTimersByTimeAsync(0);
    expect(views.at(-1)?.error).toBeInstanceOf(TypeError);
    read.mockResolvedValue([
      { xs: [1], ys: [1], steps: [1], smoothed: [], lastStep: 1, isSampled: false },
    ]);
    store.noteAll();
    await vi.advanceTimersByTimeAsync(1000);
    expect(views.at(-1)?.points.get(ID)?.steps).toEqual([1]);
    expect(views.at(-1)?.error).toBeUndefined();
  });
});
