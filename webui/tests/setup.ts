import { afterEach, vi } from "vitest";
import { cleanup } from "@testing-library/react";

// What browsers have and jsdom lacks.
Object.defineProperty(window, "matchMedia", {
  value: (query: string) => ({
    matches: false,
    media: query,
    addEventListener: vi.fn(),
    removeEventListener: vi.fn(),
    addListener: vi.fn(),
    removeListener: vi.fn(),
  }),
});
class Observer {
  observe = vi.fn();
  unobserve = vi.fn();
  disconnect = vi.fn();
}
Object.assign(globalThis, { ResizeObserver: Observer });

afterEach(cleanup);
