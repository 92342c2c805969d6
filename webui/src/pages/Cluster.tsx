import { Stack, Text, Title } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";

import { experimentsQuery, masterQuery, queueQuery, slotsQuery } from "../api/queries";
import type { QueueEntry, Slot } from "../api/types";
import { Ago } from "../components/Ago";
import { Facts } from "../components/Facts";
import { ProblemView, Waiting } from "../components/Feedback";
import { LinkText } from "../components/links";
import { PageHead } from "../components/PageHead";
import { ProgressCell } from "../components/ProgressCell";
import { Scroll } from "../components/Scroll";
import { useTitle } from "../lib/title";
import classes from "./Cluster.module.css";

const MOST_WAITING = 200;

export function Cluster() {
  useTitle("Cluster");
  const slots = useQuery(slotsQuery);
  const master = useQuery(masterQuery).data;
  const queue = useQuery(queueQuery);
  const active = useInfiniteQuery(experimentsQuery({ states: ["ACTIVE"] }));
  if (slots.isPending) return <Waiting what="the cluster" />;
  if (slots.isError)
    return <ProblemView error={slots.error} onRetry={() => void slots.refetch()} />;
  const experiments = active.data?.pages.flatMap((page) => page.items) ?? [];
  const names = new Map(experiments.map((one) => [one.id, one.name]));
  const used = slots.data.filter((slot) => slot.trial_id !== null).length;
  const total = slots.data.length;
  const waiting = queue.data ?? [];
  return (
    <>
      <PageHead title="Cluster" />
      <Stack gap="lg">
        <div className="card">
          <Facts
            items={[
              [
                "Slots in use",
                <ProgressCell key="u" value={total > 0 ? used / total : 0} label="Slots in use" />,
              ],
              ["Slots", `${used} of ${total}`],
              ["Active experiments", String(experiments.length)],
              ...(master
                ? ([
                    ["Master started", <Ago key="s" time={master.started_at} />],
                    ["Version", master.version],
                    ["Home", <span key="h">{master.home}</span>],
                  ] as const)
                : []),
            ]}
          />
        </div>
        <section>
          <Title order={2} mb="xs">
            Slots
          </Title>
          <ul className={classes.slots}>
            {slots.data.map((slot) => (
              <SlotCard key={`${slot.node} ${slot.id}`} slot={slot} names={names} />
            ))}
          </ul>
        </section>
        <section>
          <Title order={2} mb="xs">
            Waiting for slots
          </Title>
          {waiting.length === 0 ? (
            <Text size="sm" c="dimmed">
              Nothing waits.
            </Text>
          ) : (
            <WaitingTable queue={waiting} />
          )}
        </section>
      </Stack>
    </>
  );
}

function SlotCard({ slot, names }: { slot: Slot; names: ReadonlyMap<number, string> }) {
  const isUsed = slot.trial_id !== null && slot.experiment_id !== null;
  return (
    <li className={classes.slot} data-used={isUsed || undefined}>
      <Text size="sm" fw={600}>
        Slot {slot.id}
      </Text>
      <Text size="xs" c="dimmed" className="wrap-anywhere">
        {slot.device}
      </Text>
      {isUsed ? (
        <Text size="sm" className="wrap-anywhere">
          <LinkText to="/trials/$id" params={{ id: slot.trial_id ?? 0 }}>
            Trial {slot.trial_id}
          </LinkText>{" "}
          of{" "}
          <LinkText to="/experiments/$id" params={{ id: slot.experiment_id ?? 0 }}>
            {names.get(slot.experiment_id ?? 0) ?? `experiment ${slot.experiment_id}`}
          </LinkText>
        </Text>
      ) : (
        <Text size="sm">free</Text>
      )}
    </li>
  );
}

function WaitingTable({ queue }: { queue: readonly QueueEntry[] }) {
  return (
    <Scroll label="Waiting for slots" className="card">
      <table className="plain-table">
        <thead>
          <tr>
            <th className="number">Place</th>
            <th>Trial</th>
            <th>Experiment</th>
            <th className="number">Slots</th>
            <th>Waits since</th>
            <th>Why</th>
          </tr>
        </thead>
        <tbody>
          {queue.slice(0, MOST_WAITING).map((entry, i) => (
            <tr key={entry.trial_id}>
              <td className="number">{i + 1}</td>
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
              <td className="short">
                <Ago time={entry.waiting_since} />
              </td>
              <td className="prose">{entry.detail}</td>
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
