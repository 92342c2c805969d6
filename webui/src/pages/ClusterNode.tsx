import { Group, Text, Title } from "@mantine/core";

import type { Slot } from "../api/types";
import { Ago } from "../components/Ago";
import { LinkText } from "../components/links";
import { StateBadge } from "../components/StateBadge";
import { deviceInWords, labelsInWords, type ShownNode, slotState } from "../lib/cluster";
import classes from "./Cluster.module.css";

interface Props {
  shown: ShownNode;
  names: ReadonlyMap<number, string>;
  hasPools: boolean;
}

/** A machine, what it is, and who uses its slots. */
export function NodeCard({ shown, names, hasPools }: Props) {
  const { name, state, pool, node, slots } = shown;
  const facts = [
    name === "local" && "the master's machine",
    node?.device_kind,
    hasPools && `pool ${pool}`,
  ];
  return (
    <section className="card" aria-label={`Node ${name}`} data-state={state}>
      <Group gap="md" mb="xs">
        <Title order={3} size="h4" className="wrap-anywhere">
          {name}
        </Title>
        <StateBadge state={state} />
        <Text size="sm" c="dimmed" className="wrap-anywhere">
          {facts.filter(Boolean).join(", ")}
        </Text>
        {node !== null && Object.keys(node.labels).length > 0 && (
          <Text size="sm" c="dimmed" className="wrap-anywhere">
            {labelsInWords(node.labels)}
          </Text>
        )}
        {typeof node?.rests_until === "number" && (
          <Text size="sm">rests, as one trial after another failed here</Text>
        )}
        {node?.problem && (
          <Text size="sm" className="wrap-anywhere">
            rests until a check passes: {node.problem}
          </Text>
        )}
        {typeof node?.seen_at === "number" && state !== "ready" && (
          <Text size="sm" c="dimmed">
            last heard of <Ago time={node.seen_at} />
          </Text>
        )}
      </Group>
      {slots.length === 0 ? (
        <Text size="sm" c="dimmed">
          {state === "lost" || state === "left" ? "Nothing runs here." : "It offers no slots."}
        </Text>
      ) : (
        <ul className={classes.slots}>
          {slots.map((slot) => (
            <SlotCard key={slot.id} slot={slot} names={names} />
          ))}
        </ul>
      )}
    </section>
  );
}

function SlotCard({ slot, names }: { slot: Slot; names: ReadonlyMap<number, string> }) {
  const state = slotState(slot);
  const isUsed = slot.trial_id !== null && slot.experiment_id !== null;
  return (
    <li className={classes.slot} data-used={isUsed || undefined}>
      <Text size="sm" fw={600}>
        Slot {slot.id}
      </Text>
      <Text size="xs" c="dimmed" className="wrap-anywhere">
        {deviceInWords(slot)}
      </Text>
      {isUsed && (
        <Text size="sm" className="wrap-anywhere">
          <LinkText to="/trials/$id" params={{ id: slot.trial_id ?? 0 }}>
            Trial {slot.trial_id}
          </LinkText>{" "}
          of{" "}
          <LinkText to="/experiments/$id" params={{ id: slot.experiment_id ?? 0 }}>
            {names.get(slot.experiment_id ?? 0) ?? `experiment ${slot.experiment_id}`}
          </LinkText>
        </Text>
      )}
      {state !== "in use" && <Text size="sm">{state}</Text>}
    </li>
  );
}
