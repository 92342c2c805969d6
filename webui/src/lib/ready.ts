/** Waiting until what is drawn stays in sight. */

import { useEffect, useState } from "react";

let scrolledAt = -Infinity;
window.addEventListener(
  "scroll",
  () => {
    scrolledAt = performance.now();
  },
  { capture: true, passive: true },
);

/** Tell whether nothing has scrolled for some time. */
export function isStill(forMs: number): boolean {
  return performance.now() - scrolledAt > forMs;
}

/** Tell whether a component has been there for some time; `isReadyAtFirst` can skip the wait. */
export function useReady(afterMs: number, isReadyAtFirst: () => boolean = () => false): boolean {
  const [isReady, setReady] = useState(isReadyAtFirst);
  useEffect(() => {
    if (isReady) return;
    const timer = setTimeout(() => setReady(true), afterMs);
    return () => clearTimeout(timer);
  }, [afterMs, isReady]);
  return isReady;
}
