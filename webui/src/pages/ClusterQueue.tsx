import { Text, Title } from "@mantine/core";

import type { QueueEntry } from "../api/types";
import { Ago } from "../components/Ago";
import { Quoted } from "../components/Feedback";
import { LinkText } from "../components/links";
import { Scroll } from "../components/Scroll";

const MOST_WAITING = 200;

/** The trials that wait for slots, why each waits, and who is ahead. */
export function Queue({ queue, hasPools }: { queue: readonly QueueEntry[]; hasPools: boolean }) {
  return (
    <section>
      <Title order={2} mb="xs">
        Waiting for slots
      </Title>
      {queue.length === 0 ? (
        <Text size="sm" c="dimmed">
          Nothing waits.
        </Text>
      ) : (
        <WaitingTable queue={queue} hasPools={hasPools} />
      )}
    </section>
  );
}

function rankOf(entry: QueueEntry): string {
  if (typeof entry.priority === "number") return `priority ${entry.priority}`;
  return typeof entry.weight === "number" ? `weight ${entry.weight}` : "";
}

function WaitingTable({ queue, hasPools }: { queue: readonly QueueEntry[]; hasPools: boolean }) {
  const hasRanks = queue.some((entry) => rankOf(entry) !== "");
  return (
    <Scroll label="Waiting for slots" className="card">
      <table className="plain-table">
        <thead>
          <tr>
            {hasPools && <th>Pool</th>}
            <th className="number">Ahead</th>
            <th>Trial</th>
            <th>Experiment</th>
            <th className="number">Slots</th>
            {hasRanks && <th>Rank</th>}
            <th>Waits since</th>
            <th>Why</th>
          </tr>
        </thead>
        <tbody>
          {queue.slice(0, MOST_WAITING).map((entry) => (
            <tr key={entry.trial_id}>
              {hasPools && <td className="setting">{entry.pool}</td>}
              <td className="number">{entry.num_ahead}</td>
              <td>
                <LinkText to="/trials/$id" params={{ id: entry.trial_id }}>
                  {entry.trial_id}
                </LinkText>
              </td>
              <td className="setting">
                <LinkText to="/experiments/$id" params={{ id: entry.experiment_id }}>
                  {entry.experiment_name}
                </LinkText>
              </td>
              <td className="number">{entry.num_slots}</td>
              {hasRanks && <td className="short">{rankOf(entry)}</td>}
              <td className="short">
                <Ago time={entry.waiting_since} />
              </td>
              <td className="prose">
                <Quoted text={entry.detail} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
      {queue.length > MOST_WAITING && (
        <Text size="xs" c="dimmed" p={8}>
          The first {MOST_WAITING} of {queue.length}.
        </Text>
      )}
    </Scroll>
  );
}
