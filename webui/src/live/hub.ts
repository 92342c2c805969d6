/** Lets parts of a page listen to the events of the tab's stream. */

import type { LiveEvent } from "../api/types";
import type { StreamState } from "./stream";

type Listener = (event: LiveEvent) => void;

class Hub {
  private readonly listeners = new Set<Listener>();
  private readonly resyncListeners = new Set<() => void>();
  private readonly stateListeners = new Set<() => void>();
  private current: StreamState = "connecting";

  get state(): StreamState {
    return this.current;
  }

  listen(listener: Listener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  onResync(listener: () => void): () => void {
    this.resyncListeners.add(listener);
    return () => this.resyncListeners.delete(listener);
  }

  subscribe = (listener: () => void): (() => void) => {
    this.stateListeners.add(listener);
    return () => this.stateListeners.delete(listener);
  };

  publish(event: LiveEvent): void {
    for (const listener of this.listeners) listener(event);
  }

  publishResync(): void {
    for (const listener of this.resyncListeners) listener();
  }

  publishState(state: StreamState): void {
    this.current = state;
    for (const listener of this.stateListeners) listener();
  }
}

export const hub = new Hub();
