/** Names with values, as a list that wraps. */

import { Button } from "@mantine/core";
import { type ReactNode, useState } from "react";

interface FactsProps {
  items: readonly (readonly [string, ReactNode])[];
  /** On a phone the first two are shown, and the rest when asked for. */
  isShort?: boolean;
}

export function Facts({ items, isShort = false }: FactsProps) {
  const [isOpen, setOpen] = useState(!isShort);
  return (
    <>
      <dl className="facts" data-short={!isOpen || undefined}>
        {items.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
      {isShort && items.length > 2 && (
        <Button
          size="compact-xs"
          h={24}
          variant="default"
          mt={4}
          className="phone-only"
          aria-expanded={isOpen}
          onClick={() => setOpen(!isOpen)}
        >
          {isOpen ? "Less" : "More"}
        </Button>
      )}
    </>
  );
}
