import { CompletionContext } from "@codemirror/autocomplete";
import { EditorState } from "@codemirror/state";
import { describe, expect, it } from "vitest";

import type { HparamAxis, HparamRow } from "../src/api/types";
import { binsOf, brushedRows } from "../src/charts/hyperparameters";
import { lineStyle } from "../src/charts/palette";
import { completeConfig, pathAt, type Schema, schemasAt } from "../src/lib/configCompletion";

const axis = (name: string, type: string, isLog = false): HparamAxis => ({
  name,
  type,
  is_log: isLog,
  is_varied: true,
});
const row = (id: number, hparams: Record<string, unknown>, metric: number | null): HparamRow => ({
  trial_id: id,
  state: "COMPLETED",
  hparams,
  steps_completed: 1,
  metric,
});

describe("brushing", () => {
  const axes = [axis("lr", "log", true), axis("kind", "categorical")];
  const rows = [
    row(1, { lr: 0.1, kind: "a" }, 3),
    row(2, { lr: 0.01, kind: "b" }, 2),
    row(3, { lr: 0.01, kind: "a" }, null),
  ];

  it("keeps what lies in an interval of every brushed axis", () => {
    const brushes = [
      { axis: 0, intervals: [[0.001, 0.05]] as const },
      { axis: 1, intervals: [[0.5, 1.5]] as const },
    ];
    expect(brushedRows(rows, axes, brushes).map((one) => one.trial_id)).toEqual([2]);
  });

  it("leaves out trials without a metric when the metric is brushed", () => {
    const brushes = [{ axis: 2, intervals: [[0, 10]] as const }];
    expect(brushedRows(rows, axes, brushes).map((one) => one.trial_id)).toEqual([1, 2]);
  });
});

describe("bins of a heat map", () => {
  it("are equal parts of the logarithm on a log axis", () => {
    const rows = [1, 10, 100].map((lr, i) => row(i, { lr }, 1));
    const bins = binsOf(axis("lr", "log", true), rows);
    expect(rows.map(bins.indexOf)).toEqual([0, 1, 2]);
  });

  it("are the categories where values are names", () => {
    const rows = ["b", "a"].map((kind, i) => row(i, { kind }, 1));
    expect(binsOf(axis("kind", "categorical"), rows).labels).toEqual(["a", "b"]);
  });
});

it("orders numbers of a category by their values", () => {
  const rows = [0.01, 1e-5, 0.5, "auto"].map((lr, i) => row(i, { lr }, 1));
  const { labels } = binsOf(axis("lr", "categorical"), rows);
  expect(labels).toEqual(["1.00e-5", "0.01", "0.5", "auto"]);
});

/** Return the hue of a colour in degrees, null of a grey. */
function hueOf(color: string): number | null {
  const [red = 0, green = 0, blue = 0] = [1, 3, 5].map((at) =>
    parseInt(color.slice(at, at + 2), 16),
  );
  const most = Math.max(red, green, blue);
  const range = most - Math.min(red, green, blue);
  if (range === 0) return null;
  if (most === red) return (60 * ((green - blue) / range) + 360) % 360;
  return most === green ? 60 * ((blue - red) / range + 2) : 60 * ((red - green) / range + 4);
}

it("has no two colours of one hue", () => {
  for (const isDark of [false, true]) {
    const colors = new Set(Array.from({ length: 20 }, (_, i) => lineStyle(i, isDark).color));
    const hues = [...colors].map(hueOf).filter((hue) => hue !== null);
    expect(hues.length).toBeGreaterThan(5);
    for (const [i, a] of hues.entries())
      for (const b of hues.slice(i + 1))
        expect(Math.min(Math.abs(a - b), 360 - Math.abs(a - b))).toBeGreaterThan(15);
  }
});

describe("completing a config", () => {
  const schema: Schema = {
    properties: { searcher: { $ref: "#/$defs/Searcher" } },
    $defs: { Searcher: { anyOf: [{ properties: { name: { const: "single" } } }] } },
  };

  it("knows the mappings around a line", () => {
    expect(pathAt(["a: 1", "searcher:", "  # which one", "  x:", "    y: 1", "  na"])).toEqual([
      "searcher",
    ]);
  });

  it("follows references and alternatives", () => {
    const found = schemasAt(schema, ["searcher", "name"]);
    expect(found.map((one) => one.const)).toEqual(["single"]);
  });

  it("offers what has no effect last", () => {
    const complete = completeConfig({
      properties: { records_per_epoch: { deprecated: true }, resources: {} },
    });
    const state = EditorState.create({ doc: "re" });
    const found = complete(new CompletionContext(state, 2, false));
    const boosts = found?.options.map(({ label, boost }) => [label, boost]);
    expect(boosts).toEqual([
      ["records_per_epoch", -99],
      ["resources", 0],
    ]);
  });
});
