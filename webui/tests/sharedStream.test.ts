import { describe, expect, it, vi } from "vitest";

import { SharedStream } from "../src/live/sharedStream";

class FakeSource {
  onopen: (() => void) | null = null;
  onmessage: ((message: { data: string }) => void) | null = null;
  onerror: (() => void) | null = null;
  isClosed = false;
  constructor(readonly url: string) {}
  close() {
    this.isClosed = true;
  }
  send(...ids: number[]) {
    for (const id of ids) {
      const event = { id, time: 0, experiment_id: 1, trial_id: null, kind: "progress", data: {} };
      this.onmessage?.({ data: JSON.stringify(event) });
    }
  }
}

/** A browser's locks and channels, without its delays. */
function setUp(hasLocks = true) {
  const sources: FakeSource[] = [];
  const channels = new Set<{ onmessage: ((event: { data: unknown }) => void) | null }>();
  const waiting: (() => void)[] = [];
  let isHeld = false;
  const grant = () => {
    if (!isHeld) waiting.shift()?.();
  };
  const request = (_name: string, { signal }: LockOptions, callback: () => Promise<void>) =>
    new Promise<void>((resolve, reject) => {
      const start = () => {
        isHeld = true;
        void callback().then(() => {
          isHeld = false;
          resolve();
          grant();
        });
      };
      waiting.push(start);
      signal?.addEventListener("abort", () => {
        if (!waiting.includes(start)) return;
        waiting.splice(waiting.indexOf(start), 1);
        reject(new DOMException("aborted", "AbortError"));
      });
      grant();
    });
  const openChannel = () => {
    const channel = {
      onmessage: null as ((event: { data: unknown }) => void) | null,
      postMessage: (data: unknown) => {
        for (const other of [...channels]) if (other !== channel) other.onmessage?.({ data });
      },
      close: () => channels.delete(channel),
    };
    channels.add(channel);
    return channel as unknown as BroadcastChannel;
  };
  const openTab = (start: number | null = null) => {
    const handlers = { onEvent: vi.fn(), onResync: vi.fn(), onState: vi.fn() };
    const browser = {
      locks: hasLocks ? ({ request } as unknown as LockManager) : undefined,
      openChannel,
      connect: (url: string) => {
        const source = new FakeSource(url);
        sources.push(source);
        return source as unknown as EventSource;
      },
    };
    const stream = new SharedStream(handlers, browser, () => start);
    return {
      ...handlers,
      show: () => stream.show(),
      hide: () => stream.hide(),
      ids: () => handlers.onEvent.mock.calls.map(([event]) => (event as { id: number }).id),
      state: () => handlers.onState.mock.lastCall?.[0] as string | undefined,
    };
  };
  const open = () => sources.filter((source) => !source.isClosed);
  const only = () => {
    const [source, ...others] = open();
    if (source === undefined || others.length > 0) throw new Error("not one open source");
    return source;
  };
  return { openTab, open, only };
}

const turns = async () => {
  for (let i = 0; i < 10; i += 1) await Promise.resolve();
};

describe("the stream that tabs share", () => {
  it("goes on from where the first answers were, so that nothing is read twice", async () => {
    const { openTab, only } = setUp();
    const [first, second, older] = [openTab(40), openTab(42), openTab(7)];
    first.show();
    await turns();
    expect(only().url).toBe("/api/v1/events?after=40");
    only().onopen?.();
    only().send(41, 42, 43);
    second.show();
    older.show();
    await turns();
    expect([first.ids(), second.ids()]).toEqual([[41, 42, 43], [43]]);
    only().send(44);
    expect(second.ids()).toEqual([43, 44]);
    for (const tab of [first, second]) expect(tab.onResync).not.toHaveBeenCalled();
    // What happened between its answers and those of the tab with the stream is not known.
    expect(older.onResync).toHaveBeenCalledOnce();
  });

  it("is one for all that are in front, and none for a tab that never was", async () => {
    const { openTab, open, only } = setUp();
    const tabs = [openTab(), openTab(), openTab()];
    const hidden = openTab();
    for (const tab of tabs) tab.show();
    await turns();
    only().onopen?.();
    only().send(1, 2);
    for (const tab of tabs) {
      expect(tab.ids()).toEqual([1, 2]);
      expect(tab.onResync).toHaveBeenCalledOnce();
      expect(tab.state()).toBe("live");
    }
    expect(hidden.onState).not.toHaveBeenCalled();
    for (const tab of tabs) tab.hide();
    expect(open()).toEqual([]);
  });

  it("passes on to another tab, which goes on behind the last event", async () => {
    const { openTab, only } = setUp();
    const [first, second, third] = [openTab(), openTab(), openTab()];
    for (const tab of [first, second, third]) tab.show();
    await turns();
    only().onopen?.();
    only().send(5);
    first.hide();
    await turns();
    expect(only().url).toBe("/api/v1/events?after=5");
    only().onopen?.();
    only().send(6, 7);
    expect(first.ids()).toEqual([5]);
    expect(second.ids()).toEqual([5, 6, 7]);
    expect(third.ids()).toEqual([5, 6, 7]);
    expect(third.onResync).toHaveBeenCalledOnce();
  });

  it("tells a tab that comes back what it missed, each event once", async () => {
    const { openTab, only } = setUp();
    const [first, second] = [openTab(), openTab()];
    first.show();
    await turns();
    only().onopen?.();
    second.show();
    await turns();
    only().send(1);
    second.hide();
    only().send(2, 3);
    second.show();
    await turns();
    only().send(4);
    expect(second.ids()).toEqual([1, 2, 3, 4]);
    expect(second.onResync).toHaveBeenCalledOnce();
  });

  it("goes on behind its cursor when the only tab comes back", async () => {
    const { openTab, only } = setUp();
    const tab = openTab();
    tab.show();
    await turns();
    only().onopen?.();
    only().send(1);
    tab.hide();
    tab.show();
    await turns();
    expect(only().url).toBe("/api/v1/events?after=1");
    only().onopen?.();
    expect(tab.onResync).toHaveBeenCalledOnce();
  });

  it("lets a tab read the present state if nobody knows what it missed", async () => {
    const { openTab, only } = setUp();
    const [first, second] = [openTab(), openTab()];
    second.show();
    await turns();
    only().onopen?.();
    only().send(1);
    second.hide();
    // It has seen nothing before 8.
    first.show();
    await turns();
    only().onopen?.();
    only().send(8);
    second.show();
    await turns();
    expect(second.onResync).toHaveBeenCalledTimes(2);
    only().send(9);
    expect(second.ids()).toEqual([1, 9]);
  });

  it("says in all tabs that the connection is lost, and that it is back", async () => {
    vi.useFakeTimers();
    const { openTab, only } = setUp();
    const tabs = [openTab(), openTab()];
    for (const tab of tabs) tab.show();
    await turns();
    only().onopen?.();
    only().onerror?.();
    const late = openTab();
    late.show();
    await turns();
    for (const tab of [...tabs, late]) expect(tab.state()).toBe("lost");
    vi.advanceTimersByTime(500);
    only().onopen?.();
    only().send(3);
    for (const tab of [...tabs, late]) {
      expect(tab.state()).toBe("live");
      expect(tab.ids()).toEqual([3]);
    }
    vi.useRealTimers();
  });

  it("is each tab's own where a browser has no locks", async () => {
    const { openTab, open } = setUp(false);
    const tabs = [openTab(), openTab()];
    for (const tab of tabs) tab.show();
    await turns();
    expect(open()).toHaveLength(2);
    for (const tab of tabs) tab.hide();
    expect(open()).toEqual([]);
  });
});
