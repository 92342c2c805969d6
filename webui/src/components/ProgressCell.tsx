/** Progress as a bar and in words. */

import { Progress } from "@mantine/core";

import { formatPercent } from "../lib/numbers";

export function ProgressCell({ value, label }: { value: number | null; label: string }) {
  if (value === null) return <span title="The script reports no progress">not reported</span>;
  return (
    <span style={{ display: "flex", alignItems: "center", gap: 8, minWidth: 90 }}>
      <Progress
        value={value * 100}
        size="sm"
        style={{ flex: 1, minWidth: 40 }}
        aria-label={label}
        transitionDuration={200}
      />
      <span style={{ fontSize: "0.8125rem" }}>{formatPercent(value)}</span>
    </span>
  );
}
