/** The one event stream of this tab: it reconnects by itself and goes on behind its cursor. */

import type { LiveEvent } from "../api/types";

export type StreamState = "connecting" | "live" | "lost";

export interface StreamHandlers {
  /** Each event, once. */
  onEvent: (event: LiveEvent) => void;
  /** The stream is open, but what happened before is not known: read the present state. */
  onResync: () => void;
  onState: (state: StreamState) => void;
}

const FIRST_RETRY_MS = 500;
const LONGEST_RETRY_MS = 4000;
/** Behind by more than this, the present state is read instead of what happened. */
const LONGEST_GAP_MS = 60_000;

type SourceFactory = (url: string) => EventSource;

export class EventStream {
  private source: EventSource | null = null;
  private cursor: number | null = null;
  private lastSeen = 0;
  private retryMs = FIRST_RETRY_MS;
  private timer: ReturnType<typeof setTimeout> | null = null;

  constructor(
    private readonly handlers: StreamHandlers,
    private readonly connect: SourceFactory = (url) => new EventSource(url),
    private readonly now: () => number = Date.now,
  ) {}

  /** Open the stream, unless it is open. */
  open(): void {
    if (this.source !== null) return;
    this.clearTimer();
    const isResuming = this.cursor !== null && this.now() - this.lastSeen < LONGEST_GAP_MS;
    if (!isResuming) this.cursor = null;
    const query = this.cursor === null ? "" : `?after=${this.cursor}`;
    this.handlers.onState("connecting");
    const source = this.connect(`/api/v1/events${query}`);
    this.source = source;
    source.onopen = () => {
      this.retryMs = FIRST_RETRY_MS;
      this.lastSeen = this.now();
      this.handlers.onState("live");
      if (!isResuming) this.handlers.onResync();
    };
    source.onmessage = (message: MessageEvent<string>) => this.take(message.data);
    source.onerror = () => this.retry();
  }

  /** Close the stream; `open` goes on where it stood. */
  close(): void {
    this.clearTimer();
    this.source?.close();
    this.source = null;
  }

  private take(text: string): void {
    const event = JSON.parse(text) as LiveEvent;
    this.lastSeen = this.now();
    if (this.cursor !== null && event.id <= this.cursor) return;
    this.cursor = event.id;
    this.handlers.onEvent(event);
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
