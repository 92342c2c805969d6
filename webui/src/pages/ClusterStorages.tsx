/** Storages of checkpoints: whether they answer, and whose bytes they have. */

import { Group, Select, Text, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";

import { storagesQuery } from "../api/queries";
import type { Storage } from "../api/types";
import { Ago } from "../components/Ago";
import { Scroll } from "../components/Scroll";
import { formatBytes } from "../lib/numbers";

const PARTS = { project: "Projects", user: "Users", experiment: "Largest experiments" } as const;
type Part = keyof typeof PARTS;
const MOST_SHOWN = 5;

export function Storages() {
  const storages = useQuery({ ...storagesQuery, refetchInterval: 30_000 }).data ?? [];
  const [by, setBy] = useState<Part>("project");
  if (storages.length === 0) return null;
  return (
    <section>
      <Group mb="xs" gap="sm" justify="space-between">
        <Title order={2}>Storages</Title>
        <Select
          size="xs"
          aria-label="Divide the bytes by"
          data={Object.entries(PARTS).map(([value, label]) => ({ value, label }))}
          value={by}
          allowDeselect={false}
          onChange={(value) => setBy((value as Part | null) ?? "project")}
        />
      </Group>
      <Scroll label="Storages" className="card">
        <table className="plain-table">
          <thead>
            <tr>
              <th>Storage</th>
              <th>State</th>
              <th className="number">Latency</th>
              <th className="number">Failed writes</th>
              <th className="number">Free</th>
              <th className="number">Checkpoints</th>
              <th>{PARTS[by]}</th>
            </tr>
          </thead>
          <tbody>
            {storages.map((one) => (
              <tr key={one.storage}>
                <td className="setting wrap-anywhere">{one.storage}</td>
                <td className="wrap-anywhere">
                  <State storage={one} />
                </td>
                <td className="number">
                  {one.latency_s === null ? "–" : `${(1000 * one.latency_s).toFixed(1)} ms`}
                </td>
                <td className="number">{one.num_failed_writes}</td>
                <td className="number">
                  {one.free_bytes === null ? "–" : formatBytes(one.free_bytes)}
                </td>
                <td className="number">{formatBytes(one.num_bytes)}</td>
                <td>{divided(one, by)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </section>
  );
}

function State({ storage: one }: { storage: Storage }) {
  if (one.failing_since !== null)
    return (
      <Text size="sm" style={{ color: "var(--state-failed)" }} component="span">
        fails, since <Ago time={one.failing_since} />: {one.reason}
      </Text>
    );
  if (one.is_reachable === null)
    return one.checked_at === null ? "not checked yet" : "not made yet";
  return "answers";
}

/** Return the parts of a storage's bytes in words, the largest first. */
export function divided(one: Storage, by: Part): string {
  const parts = one[`by_${by}`];
  const shown = parts.slice(0, MOST_SHOWN).map(({ name, experiment_id: id, num_bytes }) => {
    return `${id === null ? name : `${id} ${name}`} ${formatBytes(num_bytes)}`;
  });
  const left = parts.length - shown.length;
  return [...shown, ...(left > 0 ? [`${left} more`] : [])].join(", ");
}
