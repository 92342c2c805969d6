/** Nodes with their slots, as the cluster page shows them. */

import type { ClusterNode, Slot } from "../api/types";

export type SlotState = "free" | "in use" | "draining" | "drained";

export interface ShownNode {
  name: string;
  state: ClusterNode["state"];
  pool: string;
  /** Null for the master's own machine, which tells nothing of itself. */
  node: ClusterNode | null;
  slots: Slot[];
}

export function slotState(slot: Slot): SlotState {
  const isUsed = slot.trial_id !== null;
  if (slot.is_drained) return isUsed ? "draining" : "drained";
  return isUsed ? "in use" : "free";
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
