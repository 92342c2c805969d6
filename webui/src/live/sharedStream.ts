/**
 * One event stream for all tabs and windows: a browser has six connections to a host.
 *
 * Of the visible tabs, the one that holds a lock has the stream and broadcasts its events. Hidden tabs
 * have no connection; when they become visible again, they ask for the events that they missed.
 */

import type { LiveEvent } from "../api/types";
import { EventStream, type SourceFactory, type StreamHandlers, type StreamState } from "./stream";

type Message =
  | { kind: "event"; event: LiveEvent }
  | { kind: "resync" }
  | { kind: "state"; state: StreamState }
  /** The sender has the stream now. */
  | { kind: "leads" }
  /** The sender wants to follow and knows the events up to the cursor. */
  | { kind: "join"; tab: string; cursor: number | null }
  /** What the tab missed, null if that is not known. */
  | { kind: "joined"; tab: string; events: LiveEvent[] | null };

interface Browser {
  locks: Pick<LockManager, "request"> | undefined;
  openChannel: () => BroadcastChannel;
  connect?: SourceFactory;
}

const NAME = "paceline-events";
/** So many events can be told to a tab that was hidden; behind by more, it reads all anew. */
const MOST_RECENT = 2000;

const REAL: Browser = {
  // A page from another machine without encryption has no locks.
  locks: (navigator as Partial<Navigator>).locks,
  openChannel: () => new BroadcastChannel(NAME),
};

export class SharedStream {
  private readonly tab = Math.random().toString(36).slice(2);
  private readonly stream: EventStream;
  /** The newest events without gaps, those that came from other tabs included. */
  private recent: LiveEvent[] = [];
  /** All events beyond this one are among the newest; null for those beyond the first of them. */
  private from: number | null;
  private readonly joining = new Map<string, number | null>();
  private channel: BroadcastChannel | null = null;
  private request: AbortController | null = null;
  private release: (() => void) | null = null;
  private isFollowing = false;
  private state: StreamState = "connecting";

  constructor(
    private readonly handlers: StreamHandlers,
    private readonly browser: Browser = REAL,
    start: () => number | null = () => null,
  ) {
    this.from = start();
    this.stream = new EventStream(
      {
        onEvent: (event) => this.note(event),
        onResync: () => this.noteResync(),
        onState: (state) => this.noteState(state),
      },
      browser.connect,
      Date.now,
      start,
    );
  }

  /** Follow the events: the tab is visible. */
  show(): void {
    if (this.request !== null) return;
    const request = new AbortController();
    this.request = request;
    this.channel = this.browser.openChannel();
    this.channel.onmessage = ({ data }: MessageEvent<Message>) => this.hear(data);
    this.join();
    const lead = () => (this.request === request ? this.lead() : undefined);
    if (this.browser.locks === undefined) void lead();
    else
      // A browser that refuses locks gives each tab a stream of its own.
      this.browser.locks
        .request(NAME, { signal: request.signal }, async () => lead())
        .catch(() => (request.signal.aborted ? undefined : lead()));
  }

  /** Give the connection back: the tab is hidden or done. */
  hide(): void {
    if (this.isFollowing && this.state === "live") this.stream.keepUp();
    this.isFollowing = false;
    this.stream.close();
    this.joining.clear();
    this.channel?.close();
    this.channel = null;
    this.request?.abort();
    this.request = null;
    this.release?.();
    this.release = null;
  }

  private lead(): Promise<void> {
    if (this.isFollowing && this.state === "live") this.stream.keepUp();
    this.isFollowing = false;
    const done = new Promise<void>((resolve) => {
      this.release = resolve;
    });
    this.post({ kind: "leads" });
    this.stream.open();
    return done;
  }

  private hear(message: Message): void {
    if (this.release !== null) {
      if (message.kind !== "join") return;
      this.joining.set(message.tab, message.cursor);
      if (this.state === "live") this.answer();
      else this.post({ kind: "state", state: this.state });
    } else if (message.kind === "leads") {
      this.isFollowing = false;
      this.join();
    } else if (message.kind === "state") this.noteState(message.state);
    else if (message.kind === "joined" && message.tab === this.tab) {
      this.isFollowing = true;
      if (message.events === null) this.stream.resync();
      else message.events.forEach((event) => this.stream.take(event));
      this.noteState("live");
    } else if (message.kind === "event" && this.isFollowing) this.stream.take(message.event);
    else if (message.kind === "resync" && this.isFollowing) this.stream.resync();
  }

  private join(): void {
    this.post({ kind: "join", tab: this.tab, cursor: this.recent.at(-1)?.id ?? this.from });
  }

  private answer(): void {
    for (const [tab, cursor] of this.joining) {
      const oldest = this.from ?? this.recent[0]?.id;
      const isKnown = cursor !== null && oldest !== undefined && oldest <= cursor;
      const events = isKnown ? this.recent.filter(({ id }) => id > cursor) : null;
      this.post({ kind: "joined", tab, events });
    }
    this.joining.clear();
  }

  private note(event: LiveEvent): void {
    this.recent.push(event);
    if (this.recent.length > MOST_RECENT) {
      this.recent = this.recent.slice(-MOST_RECENT / 2);
      this.from = null;
    }
    this.pass({ kind: "event", event });
    this.handlers.onEvent(event);
  }

  private noteResync(): void {
    this.recent = [];
    this.from = null;
    this.pass({ kind: "resync" });
    this.handlers.onResync();
  }

  private noteState(state: StreamState): void {
    this.state = state;
    this.pass({ kind: "state", state });
    if (this.release !== null && state === "live") this.answer();
    this.handlers.onState(state);
  }

  /** Tell the other tabs, if the stream is this tab's. */
  private pass(message: Message): void {
    if (this.release !== null) this.post(message);
  }

  private post(message: Message): void {
    this.channel?.postMessage(message);
  }
}
