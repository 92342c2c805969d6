/** An event stream: it reconnects by itself and goes on behind its cursor. */

import type { LiveEvent } from "../api/types";

export type StreamState = "connecting" | "live" | "lost";

export interface StreamHandlers {
  /** Each event, once. */
  onEvent: (event: LiveEvent) => void;
  /** Events go on, but what happened before is not known: read the present state. */
  onResync: () => void;
  onState: (state: StreamState) => void;
}

const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 4000;
/** Behind by more than this, the present state is read instead of what happened. */
const LONGEST_GAP_MS = 60_000;

let first: { cursor: number; at: number } | null = null;

/** Note the place among the events from which on the first reads of this page miss nothing. */
export function noteFirstCursor(cursor: number | null | undefined): void {
  if (typeof cursor === "number") first ??= { cursor, at: Date.now() };
}

/** Return that place, unless what happened since is too much to be told. */
export function firstCursor(): number | null {
  return first !== null && Date.now() - first.at < LONGEST_GAP_MS ? first.cursor : null;
}

export type SourceFactory = (url: string) => EventSource;

export class EventStream {
  private source: EventSource | null = null;
  private cursor: number | null = null;
  private lastSeen = 0;
  private isNew = true;
  private isLive = false;
  private retryMs = FIRST_RETRY_MS;
  private timer: ReturnType<typeof setTimeout> | null = null;

  constructor(
    private readonly handlers: StreamHandlers,
    private readonly connect: SourceFactory = (url) => new EventSource(url),
    private readonly now: () => number = Date.now,
    private readonly start: () => number | null = () => null,
  ) {}

  /** Open the stream, unless it is open. */
  open(): void {
    if (this.source !== null) return;
    this.clearTimer();
    if (this.isNew) {
      this.isNew = false;
      this.cursor = this.start();
      this.keepUp();
    }
    const isResuming = this.cursor !== null && this.now() - this.lastSeen < LONGEST_GAP_MS;
    if (!isResuming) this.cursor = null;
    const query = this.cursor === null ? "" : `?after=${this.cursor}`;
    this.handlers.onState("connecting");
    const source = this.connect(`/api/v1/events${query}`);
    this.source = source;
    source.onopen = () => {
      this.retryMs = FIRST_RETRY_MS;
      this.isLive = true;
      if (!isResuming) this.handlers.onResync();
      this.handlers.onState("live");
    };
    source.onmessage = (message: MessageEvent<string>) =>
      this.take(JSON.parse(message.data) as LiveEvent);
    source.onerror = () => this.retry();
  }

  /** Close the stream; `open` goes on where it stood. */
  close(): void {
    this.clearTimer();
    this.source?.close();
    this.source = null;
    if (this.isLive) this.keepUp();
    this.isLive = false;
  }

  /** Take an event, also one that another tab's stream brought, unless it is known. */
  take(event: LiveEvent): void {
    this.isNew = false;
    this.keepUp();
    if (this.cursor !== null && event.id <= this.cursor) return;
    this.cursor = event.id;
    this.handlers.onEvent(event);
  }

  /** Say that nothing has been missed until now. */
  keepUp(): void {
    this.lastSeen = this.now();
  }

  /** Forget where the stream stood: what happened until now is not known. */
  resync(): void {
    this.isNew = false;
    this.cursor = null;
    this.handlers.onResync();
  }

  private retry(): void {
    this.close();
    this.handlers.onState("lost");
    this.timer = setTimeout(() => this.open(), this.retryMs);
    this.retryMs = Math.min(this.retryMs * 2, LONGEST_RETRY_MS);
  }

  private clearTimer(): void {
    if (this.timer !== null) clearTimeout(this.timer);
    this.timer = null;
  }
}
