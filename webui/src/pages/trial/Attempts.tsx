import { Stack } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";

import { trialQuery } from "../../api/queries";
import type { Attempt } from "../../api/types";
import { Ago, Lasted } from "../../components/Ago";
import { Empty, Waiting } from "../../components/Feedback";
import { Scroll } from "../../components/Scroll";
import { StateBadge } from "../../components/StateBadge";
import { beginningOf } from "../../lib/attempts";
import { shownAttemptState } from "../../lib/states";
import { Environments } from "./Environments";

export function Attempts() {
  const { id } = useParams({ from: "/trials/$id" });
  const trial = useQuery(trialQuery(id)).data;
  if (trial === undefined) return <Waiting />;
  const attempts = trial.attempts ?? [];
  const hasRestarts = attempts.some(({ restarts = 0 }) => restarts > 0);
  if (attempts.length === 0)
    return <Empty title="No attempts yet">The trial has not started.</Empty>;
  return (
    <Stack gap="md">
      <Scroll label="Attempts" className="card">
        <table className="plain-table">
          <thead>
            <tr>
              <th>Attempt</th>
              <th>State</th>
              <th>On slots</th>
              <th>Started from</th>
              <th>Started</th>
              <th>Duration</th>
              {hasRestarts && <th>Worker restarts</th>}
              <th>How it ended</th>
            </tr>
          </thead>
          <tbody>
            {attempts.map((attempt) => (
              <tr key={attempt.id}>
                <td>{attempt.number}</td>
                <td>
                  <StateBadge state={shownAttemptState(attempt)} />
                </td>
                <td>{whereItRan(attempt)}</td>
                <td className="short">{beginningOf(attempt)}</td>
                <td className="short">
                  <Ago time={attempt.started_at ?? attempt.created_at} />
                </td>
                <td className="short">
                  <Lasted from={attempt.started_at} to={attempt.ended_at} />
                </td>
                {hasRestarts && <td className="prose">{whyRestarted(attempt)}</td>}
                <td className="prose">{whyEnded(attempt)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      <Environments trialId={id} />
    </Stack>
  );
}

const REASONS: Record<string, string> = {
  exited: "exited",
  killed: "was killed",
  preemption_timeout: "was killed, as it did not stop in time",
  start_failed: "could not start",
  shortage: "could not start for want of disk space, files, processes or memory",
  runner_lost: "was lost with its runner",
  not_formed: "gave its slots back, as its nodes did not come together",
};

/** Return the slots of an attempt, by node unless it ran on the master's own machine. */
export function whereItRan({ slots, nodes = [] }: Attempt): string {
  if (nodes.every((node) => node.name === "local")) return slots.join(", ") || "–";
  return nodes.map((node) => `${node.name}: ${node.slots.join(", ")}`).join("; ");
}

/** Return how often the workers of an attempt were started again, and why the last time. */
export function whyRestarted({ restarts = 0, last_restart_cause: cause }: Attempt): string {
  if (restarts === 0) return "none";
  return restarts === 1 ? `1: ${cause}` : `${restarts}, the last one: ${cause}`;
}

/** Return in words how an attempt ended. */
export function whyEnded({ exit, preempt_reason: preempted }: Attempt): string {
  if (exit === null) return preempted ? `asked to stop: ${preempted}` : "";
  const parts = [exit.outcome ?? REASONS[exit.reason] ?? exit.reason];
  if (exit.signal !== null && exit.signal !== undefined) parts.push(`signal ${exit.signal}`);
  else if (exit.code) parts.push(`code ${exit.code}`);
  if (exit.kind) parts.push(`${exit.kind} error`);
  if (preempted) parts.push(preempted);
  if (exit.error) parts.push(exit.error);
  return parts.join(" · ");
}
