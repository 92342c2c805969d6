/** The width of an element, and of the page. */

import { useElementSize, useMediaQuery } from "@mantine/hooks";
import { useCallback, useState } from "react";

/** Whether the page is as narrow as a phone, by the query of the style sheets. */
export function useIsPhone(): boolean {
  return useMediaQuery("not all and (min-width: 48em)", false, { getInitialValueInEffect: false });
}

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
