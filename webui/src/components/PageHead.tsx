/** The head of a page: where it belongs, its title, and what can be done. */

import { Group, Title } from "@mantine/core";
import type { ReactNode } from "react";

interface PageHeadProps {
  title: ReactNode;
  above?: ReactNode;
  beside?: ReactNode;
  actions?: ReactNode;
}

export function PageHead({ title, above, beside, actions }: PageHeadProps) {
  return (
    <header style={{ marginBottom: 12 }}>
      {above && (
        <div className="above" style={{ fontSize: "0.875rem", marginBottom: 2 }}>
          {above}
        </div>
      )}
      <div className="head">
        <div>
          <Title order={1} className="wrap-anywhere">
            {title}
          </Title>
          {beside}
        </div>
        {actions && <Group gap="xs">{actions}</Group>}
      </div>
    </header>
  );
}
