/** A state in words, with a sign and a colour. */

import {
  IconAlertTriangle,
  IconBan,
  IconCircle,
  IconCircleCheck,
  IconClock,
  IconPlayerPause,
  IconPlayerPlay,
  IconProgress,
} from "@tabler/icons-react";
import type { ComponentType } from "react";

interface Look {
  label: string;
  color: string;
  Icon: ComponentType<{ size: number; "aria-hidden": boolean }>;
}

const LOOKS: Record<string, Look> = {
  RUNNING: { label: "Running", color: "running", Icon: IconPlayerPlay },
  QUEUED: { label: "Queued", color: "waiting", Icon: IconClock },
  PENDING: { label: "Starting", color: "waiting", Icon: IconClock },
  PAUSED: { label: "Paused", color: "waiting", Icon: IconPlayerPause },
  STOPPING: { label: "Stopping", color: "waiting", Icon: IconProgress },
  STOPPED: { label: "Stopped", color: "done", Icon: IconCircleCheck },
  COMPLETED: { label: "Completed", color: "done", Icon: IconCircleCheck },
  CANCELED: { label: "Canceled", color: "quiet", Icon: IconBan },
  ERROR: { label: "Error", color: "failed", Icon: IconAlertTriangle },
  ENDED: { label: "Ended", color: "quiet", Icon: IconCircle },
  FAILED: { label: "Failed", color: "failed", Icon: IconAlertTriangle },
  ready: { label: "Ready", color: "done", Icon: IconCircleCheck },
  away: { label: "Not heard of yet", color: "waiting", Icon: IconClock },
  lost: { label: "Lost", color: "failed", Icon: IconAlertTriangle },
  draining: { label: "Draining", color: "waiting", Icon: IconProgress },
  drained: { label: "Drained", color: "quiet", Icon: IconBan },
  PARTIALLY_DELETED: { label: "Partial", color: "quiet", Icon: IconBan },
  DELETED: { label: "Deleted", color: "quiet", Icon: IconBan },
};

function lookOf(state: string): Look {
  return LOOKS[state] ?? { label: state, color: "waiting", Icon: IconProgress };
}

export function StateBadge({ state }: { state: string }) {
  const { label, color, Icon } = lookOf(state);
  return (
    <span className="state" style={{ color: `var(--state-${color})` }}>
      <Icon size={16} aria-hidden />
      {label}
    </span>
  );
}
