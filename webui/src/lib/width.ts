/** The width of an element. */

import { useElementSize } from "@mantine/hooks";
import { useCallback, useState } from "react";

/** Follow an element's width, which is known before the element is painted for the first time. */
export function useWidth(): { ref: (element: HTMLElement | null) => void; width: number } {
  const { ref: observe, width } = useElementSize();
  const [first, setFirst] = useState(0);
  const ref = useCallback(
    (element: HTMLElement | null) => {
      if (element !== null) setFirst(element.clientWidth);
      return observe(element);
    },
    [observe],
  );
  return { ref, width: width || first };
}
