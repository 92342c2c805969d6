/** The title of the browser's tab. */

import { useEffect } from "react";

export function useTitle(title: string | undefined): void {
  useEffect(() => {
    document.title = title === undefined ? "Paceline" : `${title} · Paceline`;
  }, [title]);
}
