import { describe, expect, it, vi } from "vitest";

import { EventStream } from "../src/live/stream";

class FakeSource {
  onopen: (() => void) | null = null;
  onmessage: ((message: { data: string }) => void) | null = null;
  onerror: (() => void) | null = null;
  isClosed = false;
  constructor(readonly url: string) {}
  close() {
    this.isClosed = true;
  }
  send(id: number) {
    const event = { id, time: 0, experiment_id: 1, trial_id: null, kind: "progress", data: {} };
    this.onmessage?.({ data: JSON.stringify(event) });
  }
}

function setUp() {
  const sources: FakeSource[] = [];
  const handlers = { onEvent: vi.fn(), onResync: vi.fn(), onState: vi.fn() };
  let now = 0;
  const stream = new EventStream(
    handlers,
    (url) => {
      const source = new FakeSource(url);
      sources.push(source);
      return source as unknown as EventSource;
    },
    () => now,
  );
  const newest = () => {
    const source = sources.at(-1);
    if (source === undefined) throw new Error("no source was opened");
    return source;
  };
  return { stream, sources, newest, handlers, passTime: (ms: number) => (now += ms) };
}

describe("the event stream", () => {
  it("reads the present state when it opens without a cursor", () => {
    const { stream, newest, handlers } = setUp();
    stream.open();
    newest().onopen?.();
    expect(newest().url).toBe("/api/v1/events");
    expect(handlers.onResync).toHaveBeenCalledOnce();
  });

  it("goes on behind the last event after a lost connection, and shows none twice", () => {
    vi.useFakeTimers();
    const { stream, sources, newest, handlers } = setUp();
    stream.open();
    newest().onopen?.();
    newest().send(7);
    newest().onerror?.();
    vi.advanceTimersByTime(500);
    expect(sources).toHaveLength(2);
    expect(newest().url).toBe("/api/v1/events?after=7");
    newest().onopen?.();
    newest().send(7);
    newest().send(8);
    expect(handlers.onEvent.mock.calls.map(([event]) => event.id)).toEqual([7, 8]);
    expect(handlers.onResync).toHaveBeenCalledOnce();
    vi.useRealTimers();
  });

  it("waits longer after each failure", () => {
    vi.useFakeTimers();
    const { stream, sources, newest } = setUp();
    stream.open();
    newest().onerror?.();
    vi.advanceTimersByTime(500);
    newest().onerror?.();
    vi.advanceTimersByTime(999);
    expect(sources).toHaveLength(2);
    vi.advanceTimersByTime(1);
    expect(sources).toHaveLength(3);
    vi.useRealTimers();
  });

  it("reads the present state instead of a long past", () => {
    const { stream, newest, handlers, passTime } = setUp();
    stream.open();
    newest().onopen?.();
    newest().send(7);
    stream.close();
    passTime(61_000);
    stream.open();
    newest().onopen?.();
    expect(newest().url).toBe("/api/v1/events");
    expect(handlers.onResync).toHaveBeenCalledTimes(2);
  });
});
