import { describe, expect, it } from "vitest";

import type { ClusterNode, Slot } from "../src/api/types";
import {
  countSlots,
  deviceInWords,
  labelsInWords,
  shownNodes,
  slotState,
  slotsInWords,
} from "../src/lib/cluster";

const slot = (node: string, id: number, changed: Partial<Slot> = {}): Slot => ({
  id,
  node,
  device: "cpu",
  pool: "default",
  is_drained: false,
  trial_id: null,
  experiment_id: null,
  attempt_id: null,
  ...changed,
});

const node = (name: string, state: ClusterNode["state"]): ClusterNode =>
  ({ id: 1, name, state, pool: "big" }) as ClusterNode;

describe("nodes of the cluster page", () => {
  it("begin with the master's own machine and keep their slots together", () => {
    const slots = [slot("local", 0), slot("box", 0, { pool: "big" }), slot("local", 1)];
    const shown = shownNodes([node("box", "draining")], slots);
    expect(shown.map((one) => [one.name, one.state, one.pool, one.slots.length])).toEqual([
      ["local", "ready", "default", 2],
      ["box", "draining", "big", 1],
    ]);
  });

  it("show a lost one without slots", () => {
    const shown = shownNodes([node("box", "lost")], [slot("local", 0)]);
    expect(shown.map((one) => [one.name, one.state, one.slots])).toEqual([
      ["local", "ready", [slot("local", 0)]],
      ["box", "lost", []],
    ]);
    expect(shown[1]?.pool).toBe("big");
  });
});

describe("the number of slots", () => {
  it("leaves drained ones out, and says how many there are", () => {
    const slots = [
      slot("local", 0, { trial_id: 1 }),
      slot("local", 1),
      slot("local", 2, { is_drained: true }),
      slot("local", 3, { is_drained: true, trial_id: 2 }),
    ];
    expect(slotsInWords(countSlots(slots))).toBe("1 of 2, 2 drained (1 still in use)");
    expect(slotsInWords(countSlots(slots.slice(0, 3)))).toBe("1 of 2, 1 drained");
    expect(slotsInWords(countSlots(slots.slice(0, 2)))).toBe("1 of 2");
  });

  it("is that of a master that tells of no drained ones", () => {
    expect(slotsInWords({ num_slots: 4, num_slots_used: 3 })).toBe("3 of 4");
  });
});

describe("labels and memory", () => {
  it("are shown in words", () => {
    expect(labelsInWords({ gpu: "a100", room: "1" })).toBe("gpu=a100, room=1");
    const gpu = slot("box", 0, { device: "MIG-1", memory_bytes: 10 * 2 ** 30 });
    expect(deviceInWords(gpu)).toContain("MIG-1, 10");
    expect(deviceInWords(slot("box", 0))).toBe("cpu");
  });
});

describe("the state of a slot", () => {
  it.each([
    [{}, "free"],
    [{ trial_id: 1 }, "in use"],
    [{ is_drained: true, trial_id: 1 }, "draining"],
    [{ is_drained: true }, "drained"],
  ])("of %o is %s", (changed, expected) => {
    expect(slotState(slot("local", 0, changed))).toBe(expected);
  });
});
