import { MantineProvider } from "@mantine/core";
import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { render, screen } from "@testing-library/react";
import { beforeEach, describe, expect, it, vi } from "vitest";

import { groupsQuery } from "../src/api/queries";
import { readSeries } from "../src/api/series";
import { metricLineStyle } from "../src/charts/palette";
import { Sparkline, sparkPath } from "../src/components/Sparkline";
import { expressionMatcher } from "../src/lib/metrics";
import { fiveOf, valueOptions } from "../src/charts/values";
import { changedPanels, panelsOf } from "../src/lib/panels";
import { compareSearch } from "../src/lib/search";
import { isBare, searchOf, storedSearch, textOf } from "../src/lib/views";

interface Body {
  max_points: number;
  series: { trial_id: number; name: string }[];
  metrics?: { name: string }[];
}

const bodies: Body[] = [];

/** A master whose series begin with the id of their trial. */
vi.mock("../src/api/client", () => ({
  unwrap: (answer: Promise<unknown>) => answer,
  api: {
    POST: (_path: string, { body }: { body: Body }) => {
      bodies.push(body);
      if (body.metrics !== undefined)
        return Promise.resolve({ metrics: body.metrics.map(({ name }) => ({ groups: [name] })) });
      if (body.series.some(({ name }) => name === "broken"))
        return Promise.reject(new Error("broken"));
      const series = body.series.map(({ trial_id: id }) => ({
        x: [0, 1], y: [id, id + 1], steps: [0, 1], last_step: 1, is_sampled: false,
      })); // prettier-ignore
      return Promise.resolve({ series });
    },
  },
}));

beforeEach(() => {
  bodies.length = 0;
});

const wanted = (trialId: number, metric = "loss") => ({
  trialId,
  group: "validation",
  metric,
  afterStep: -1,
});

describe("series that several charts ask for at a time", () => {
  it("are one request, and each gets its own", async () => {
    const options = { x: "batches", maxPoints: 40 };
    const [one, two, other] = await Promise.all([
      readSeries([wanted(1), wanted(2)], options),
      readSeries([wanted(3)], options),
      readSeries([wanted(4)], { ...options, maxPoints: 10 }),
    ]);
    expect([one, two, other].map((found) => found.map(({ ys }) => ys[0]))).toEqual([
      [1, 2],
      [3],
      [4],
    ]);
    expect(bodies.map(({ series }) => series.length)).toEqual([3, 1]);
  });

  it("are several requests where they are very many", async () => {
    const many = Array.from({ length: 300 }, (_, i) => wanted(i + 1));
    const found = await Promise.all(
      [1, 2, 3].map(() => readSeries(many, { x: "time", maxPoints: 40 })),
    );
    expect(found.map((all) => all.length)).toEqual([300, 300, 300]);
    expect(bodies).toHaveLength(3);
  });

  it("of the first charts are read first", async () => {
    const options = { x: "batches", maxPoints: 42 };
    const many = Array.from({ length: 50 }, (_, i) => wanted(i + 1));
    const numSent: number[] = [];
    await Promise.all(
      [1, 2, 3, 4, 5].map(async () => {
        await readSeries(many, options);
        numSent.push(bodies.length);
      }),
    );
    // Two charts are a request; the others wait for it.
    expect(numSent[0]).toBeLessThan(3);
    expect(bodies.map(({ series }) => series.length)).toEqual([100, 100, 50]);
  });

  it("of groups are one request for several metrics", async () => {
    const client = new QueryClient();
    const names = ["a", "b", "c"];
    const found = await Promise.all(
      names.map((name) =>
        client.fetchQuery(groupsQuery({ group: "training", name }, { groups: [[1]] })),
      ),
    );
    expect(found).toEqual(names.map((name) => [name]));
    expect(bodies.map(({ metrics }) => metrics?.length)).toEqual([3]);
  });

  it("fail together", async () => {
    const options = { x: "batches", maxPoints: 41 };
    const all = [readSeries([wanted(1, "broken")], options), readSeries([wanted(2)], options)];
    const found = await Promise.allSettled(all);
    expect(found.map(({ status }) => status)).toEqual(["rejected", "rejected"]);
  });
});

describe("a sparkline", () => {
  it("has the curve of its row, read with those of all others", async () => {
    render(
      <MantineProvider>
        <QueryClientProvider client={new QueryClient()}>
          {[1, 2, 3].map((id) => (
            <Sparkline key={id} trialId={id} metric="loss" />
          ))}
          <Sparkline trialId={null} metric="loss" />
          <Sparkline trialId={4} metric={null} />
        </QueryClientProvider>
      </MantineProvider>,
    );
    expect(await screen.findByRole("img", { name: "loss from 3 to 4" })).toBeTruthy();
    expect(screen.getAllByRole("img")).toHaveLength(3);
    expect(bodies.map(({ series }) => series.map(({ trial_id: id }) => id))).toEqual([[1, 2, 3]]);
  });

  it("of a row that is scrolled past makes no query", () => {
    const client = new QueryClient();
    const { unmount } = render(
      <QueryClientProvider client={client}>
        <Sparkline trialId={1} metric="loss" />
      </QueryClientProvider>,
    );
    unmount();
    expect(client.getQueryCache().getAll()).toEqual([]);
  });

  it("has gaps where nothing was reported, and needs two points", () => {
    expect(sparkPath([0, 1, 2, 3], [0, 1, null, 0])).toMatch(/^M2\.0 20\.0L26\.0 2\.0M74\.0 20\.0$/);
    expect(sparkPath([0, 1], [1, null])).toBe("");
    expect(sparkPath([0, 1], [1, 1])).toBe("M2.0 11.0L74.0 11.0");
  });
});

describe("a panel", () => {
  const known = panelsOf(
    ["training/loss", "validation/loss", "validation/acc"].map((id) => ({
      group: id.split("/")[0] ?? "",
      metric: id.split("/")[1] ?? "",
      numTrials: 1,
    })),
  );

  it("has further metrics and an x axis of its own", () => {
    const [first, second] = changedPanels(known, {
      "training/loss": { add: ["validation/acc", "training/loss", "gone/gone"], x: "time" },
    });
    expect(first?.title).toBe("loss (training), acc");
    expect(first?.metrics.map(({ id }) => id)).toEqual(["training/loss", "validation/acc"]);
    expect([first?.x, second?.x]).toEqual(["time", undefined]);
    expect(second).toBe(known[1]);
  });

  it("tells its metrics apart by dashes", () => {
    const [one, two] = [0, 1].map((metric) => metricLineStyle(2, metric, false));
    expect(one?.color).toBe(two?.color);
    expect(one?.dash).not.toEqual(two?.dash);
  });

  it("is kept in the address; what cannot be read is left out", () => {
    const panels = { "a/b": { add: ["c/d"], x: "time" }, wrong: { add: 5 }, none: null };
    expect(compareSearch({ panels }).panels).toEqual({ "a/b": { add: ["c/d"], x: "time" } });
    expect(compareSearch({ panels: ["a"] }).panels).toBeUndefined();
  });
});

describe("regular expressions", () => {
  it("find parts of names", () => {
    const found = expressionMatcher("^layer[0-3]/norm$");
    expect(typeof found === "function" && ["layer2/norm", "layer4/norm"].map(found)).toEqual([
      true,
      false,
    ]);
  });

  it("say what is wrong with them", () => {
    expect(expressionMatcher("layer(")).toMatch(/regular expression/i);
    expect(expressionMatcher("x".repeat(201))).toMatch("at most 200 characters, but has 201");
  });
});

describe("a saved view", () => {
  it("is the same text again, whichever view it began from", () => {
    const search = compareSearch({
      group: ["*"],
      where: [["hparam:lr", "<", 0.1]],
      panels: { "a/b": { x: "time" } },
      saved: 3,
      version: 2,
    });
    const view = {
      id: 7, name: "v", search: textOf(search), is_default: false, version: 4, changed_at: 0,
    }; // prettier-ignore
    expect(view.search).not.toContain("saved");
    expect(textOf(storedSearch(view))).toBe(view.search);
    // In whatever order the address has its parts.
    expect(textOf(Object.fromEntries(Object.entries(search).toReversed()))).toBe(view.search);
    expect(searchOf(view)).toMatchObject({ group: ["*"], saved: 7, version: 4 });
  });

  it("is opened by default where the address names nothing", () => {
    expect(isBare(compareSearch({}))).toBe(true);
    expect(isBare(compareSearch({ saved: 0 }))).toBe(false);
  });
});

describe("box plots", () => {
  it.each([
    [[], null],
    [[3], [3, 3, 3, 3, 3]],
    [[4, 1, 3, 2], [1, 1.75, 2.5, 3.25, 4]],
    [[0.5, 3.5, 1.5], [0.5, 1, 1.5, 2.5, 3.5]],
  ])("has five numbers of %s", (values, five) => {
    expect(fiveOf(values)).toEqual(five);
  });

  it("leaves out what a log axis cannot show", () => {
    const rows = [{ name: "<b>", color: "#123456", values: [{ run: "one", value: -1 }] }];
    const { series } = valueOptions({ rows, as: "bars", isLog: true, isDark: false }) as {
      series: { data: { value: number | null }[] }[];
    };
    expect(series[0]?.data[0]?.value).toBeNull();
  });

  it("is kept in the address, and nothing else is", () => {
    const panels = { one: { as: "box", value: "min", evil: 1 }, two: { as: "pie" } };
    expect(compareSearch({ panels }).panels).toEqual({ one: { as: "box", value: "min" } });
  });
});
