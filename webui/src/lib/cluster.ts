/** Nodes with their slots, as the cluster page shows them. */

import type { ClusterNode, Pool, Slot } from "../api/types";
import { formatBytes } from "./numbers";
import { formatDuration } from "./times";

export type SlotState = "free" | "in use" | "draining" | "drained";

export interface ShownNode {
  name: string;
  state: ClusterNode["state"];
  pool: string;
  /** Null for a node that is in the slots only, as its entry has not been read yet. */
  node: ClusterNode | null;
  slots: Slot[];
}

export function slotState(slot: Slot): SlotState {
  // By a trial of another project, if no trial is named.
  const isUsed = slot.is_used === true || slot.trial_id !== null;
  if (slot.is_drained) return isUsed ? "draining" : "drained";
  return isUsed ? "in use" : "free";
}

export interface SlotCounts {
  num_slots: number;
  num_slots_used: number;
  num_slots_drained?: number;
  num_slots_draining?: number;
}

/** Return how many slots are in use of those that can be used. */
export function usableSlots(counts: SlotCounts): { used: number; usable: number } {
  const { num_slots, num_slots_used, num_slots_drained = 0, num_slots_draining = 0 } = counts;
  return { used: num_slots_used - num_slots_draining, usable: num_slots - num_slots_drained };
}

/** Return the same in words, and how many are drained. */
export function slotsInWords(counts: SlotCounts): string {
  const { used, usable } = usableSlots(counts);
  const { num_slots_drained: drained = 0, num_slots_draining: draining = 0 } = counts;
  const leaving = draining ? ` (${draining} still in use)` : "";
  return `${used} of ${usable}${drained ? `, ${drained} drained` : ""}${leaving}`;
}

/** Count slots as the master does. */
export function countSlots(slots: readonly Slot[]): Required<SlotCounts> {
  const states = slots.map(slotState);
  const number = (...wanted: SlotState[]) => states.filter((one) => wanted.includes(one)).length;
  return {
    num_slots: slots.length,
    num_slots_used: number("in use", "draining"),
    num_slots_drained: number("drained", "draining"),
    num_slots_draining: number("draining"),
  };
}

/** Return labels as `k=v, k=v`. */
export function labelsInWords(labels: Readonly<Record<string, string>>): string {
  return Object.entries(labels)
    .map(([key, value]) => `${key}=${value}`)
    .join(", ");
}

/** Return who may use a pool, and what ends or pauses trials in it. */
export function rulesInWords(pool: Pool): string {
  const after = (what: string, seconds?: number | null) =>
    seconds ? [`${what} after ${formatDuration(seconds)}`] : [];
  return [
    ...(pool.open_to?.length ? [`open to ${pool.open_to.join(", ")}`] : []),
    ...(pool.best_priority ? [`best priority ${pool.best_priority}`] : []),
    ...(pool.own_runners ? ["own runners only"] : []),
    ...(pool.interactive_first ? [`interactive first ${pool.interactive_first}`] : []),
    ...after("silent", pool.silent_after_s),
    ...after("unused", pool.unused_after_s),
    ...after("paused", pool.pause_after_s),
  ].join("; ");
}

/** Return what a slot is: its device, and the memory of that if it is known. */
export function deviceInWords({ device, memory_bytes: memory }: Slot): string {
  return memory ? `${device}, ${formatBytes(memory)}` : device;
}

/** Return the nodes, the master's own machine first; lost ones may have no slots to show. */
export function shownNodes(nodes: readonly ClusterNode[], slots: readonly Slot[]): ShownNode[] {
  const known = new Map<string, ClusterNode>();
  for (const node of nodes) known.set(node.name, node);
  const of = new Map<string, Slot[]>();
  for (const slot of slots) {
    const name = slot.node ?? "local";
    of.set(name, [...(of.get(name) ?? []), slot]);
  }
  const own = [...of.keys()].filter((name) => !known.has(name));
  return [...own, ...known.keys()].map((name) => {
    const node = known.get(name) ?? null;
    const mine = of.get(name) ?? [];
    return {
      name,
      state: node?.state ?? "ready",
      pool: mine[0]?.pool ?? node?.pool ?? "default",
      node,
      slots: mine,
    };
  });
}
