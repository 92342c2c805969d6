import { Stack, Text, Title } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";

import { experimentsQuery, masterQuery, slotsQuery } from "../api/queries";
import type { Experiment, Slot } from "../api/types";
import { Ago } from "../components/Ago";
import { Facts } from "../components/Facts";
import { ProblemView, Waiting } from "../components/Feedback";
import { LinkText } from "../components/links";
import { PageHead } from "../components/PageHead";
import { ProgressCell } from "../components/ProgressCell";
import { plural } from "../lib/numbers";
import { useTitle } from "../lib/title";
import classes from "./Cluster.module.css";

export function Cluster() {
  useTitle("Cluster");
  const slots = useQuery(slotsQuery);
  const master = useQuery(masterQuery).data;
  const active = useInfiniteQuery(experimentsQuery({ states: ["ACTIVE"] }));
  if (slots.isPending) return <Waiting what="the cluster" />;
  if (slots.isError)
    return <ProblemView error={slots.error} onRetry={() => void slots.refetch()} />;
  const experiments = active.data?.pages.flatMap((page) => page.items) ?? [];
  const names = new Map(experiments.map((one) => [one.id, one.name]));
  const used = slots.data.filter((slot) => slot.trial_id !== null).length;
  const total = slots.data.length;
  const waiting = experiments.filter((one) => one.num_running === 0 && !one.is_unmanaged);
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
              <SlotCard key={slot.id} slot={slot} names={names} />
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
            <WaitingTable experiments={waiting} free={total - used} />
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

function WaitingTable({ experiments, free }: { experiments: readonly Experiment[]; free: number }) {
  return (
    <div className="card scroll-x">
      <table className="plain-table">
        <thead>
          <tr>
            <th>Experiment</th>
            <th>Waits since</th>
            <th>Why</th>
          </tr>
        </thead>
        <tbody>
          {experiments.map((one) => (
            <tr key={one.id}>
              <td>
                <LinkText to="/experiments/$id" params={{ id: one.id }}>
                  {one.name}
                </LinkText>
              </td>
              <td>
                <Ago time={one.created_at} />
              </td>
              <td>{whyWaiting(one, free)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function whyWaiting(experiment: Experiment, free: number): string {
  const resources = experiment.config.resources as { slots_per_trial?: number } | undefined;
  const needed = resources?.slots_per_trial ?? 1;
  return `needs ${plural(needed, "slot")} per trial, and ${plural(free, "slot")} ${free === 1 ? "is" : "are"} free; older experiments come first`;
}
