/** Waiting until what is drawn stays in sight. */

import { useEffect, useState } from "react";

/** Tell whether a component has been there for some time. */
export function useReady(afterMs: number): boolean {
  const [isReady, setReady] = useState(false);
  useEffect(() => {
    const timer = setTimeout(() => setReady(true), afterMs);
    return () => clearTimeout(timer);
  }, [afterMs]);
  return isReady;
}
