/** Progress as a bar and in words. */

import { formatPercent } from "../lib/numbers";

export function ProgressCell({ value, label }: { value: number | null; label: string }) {
  if (value === null)
    return (
      <span className="quiet" title="Nothing says how long the training goes on">
        –
      </span>
    );
  return (
    <span style={{ display: "flex", alignItems: "center", gap: 8, minWidth: 88 }}>
      <div
        className="progress"
        role="progressbar"
        aria-label={label}
        aria-valuemin={0}
        aria-valuemax={100}
        aria-valuenow={Math.round(value * 100)}
      >
        <div style={{ width: `${value * 100}%` }} />
      </div>
      <span style={{ fontSize: "0.8125rem" }}>{formatPercent(value)}</span>
    </span>
  );
}
