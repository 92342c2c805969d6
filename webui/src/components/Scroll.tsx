/** A part that scrolls by itself, by keyboard too. */

import type { CSSProperties, ReactNode } from "react";

interface ScrollProps {
  label: string;
  className?: string;
  style?: CSSProperties;
  children: ReactNode;
}

export function Scroll({ label, className = "", style, children }: ScrollProps) {
  return (
    <div
      className={`scroll-x ${className}`}
      style={style}
      tabIndex={0}
      role="region"
      aria-label={label}
    >
      {children}
    </div>
  );
}
