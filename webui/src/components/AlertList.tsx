/** What a trial's code wants people to see. */

import { Text } from "@mantine/core";

import type { TrialAlert } from "../api/types";
import { Ago } from "./Ago";

const COLORS: Record<string, string> = {
  error: "var(--state-failed)",
  warn: "var(--state-waiting)",
};

/** Show alerts, newest first. */
export function AlertList({ alerts }: { alerts: readonly TrialAlert[] }) {
  if (alerts.length === 0) return null;
  return (
    <section aria-label="Alerts" className="card" style={{ marginTop: 12 }}>
      {[...alerts].reverse().map((alert, i) => (
        <div key={`${alert.time}-${i}`} style={{ padding: "2px 0" }}>
          <Text size="sm" className="wrap-anywhere" style={{ whiteSpace: "pre-wrap" }}>
            <Text span size="sm" fw={600} style={{ color: COLORS[alert.level] }}>
              {alert.level}
            </Text>{" "}
            {[alert.title, alert.description].filter(Boolean).join(": ")}{" "}
            <Text span size="xs" c="dimmed">
              <Ago time={alert.time} />, rank {alert.rank}
            </Text>
          </Text>
        </div>
      ))}
    </section>
  );
}
