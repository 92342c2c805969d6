import { MantineProvider } from "@mantine/core";
import { QueryClient, QueryClientProvider } from "@tanstack/react-query";
import { fireEvent, render, screen, waitFor } from "@testing-library/react";
import type { ReactNode } from "react";
import { beforeEach, expect, it, vi } from "vitest";

import type { Experiment } from "../src/api/types";
import { BulkActions } from "../src/components/BulkActions";
import { csvOf } from "../src/lib/csv";
import { usageSearch } from "../src/lib/search";
import { Reservations } from "../src/pages/ClusterReservations";
import { downloadCommand, Models } from "../src/pages/Models";
import { Quotas } from "../src/pages/Quotas";
import { goodputOf, monthOf, usageCsv } from "../src/pages/Usage";

const state = vi.hoisted(() => ({
  scope: "admin",
  sent: [] as { method: string; path: string; options: unknown }[],
}));

const QUOTA = {
  user: "bob", project: null, weight: 1, max_slots: 3, slot_hours: null, checkpoint_bytes: null,
  revision: 4, num_slots_used: 2, slot_hours_used: 1.5, checkpoint_bytes_used: 0,
}; // prettier-ignore
const PREVIEW = {
  num_matching: 5, experiment_ids: [9, 8], names: ["nine", "eight"], num_trials: 4,
  num_checkpoints: 3, checkpoint_bytes: 2048, num_unchanged: 1,
  refused: [{ reason: "it must have ended", number: 2, experiment_ids: [7, 6] }],
}; // prettier-ignore
const ANSWERS: Record<string, unknown> = {
  "/api/v1/quotas": [QUOTA],
  "/api/v1/users": [{ name: "bob", is_active: true }],
  "/api/v1/projects": [{ name: "Default", role: "admin" }],
  "/api/v1/bulk-preview": PREVIEW,
  "/api/v1/bulk-actions": [],
};

vi.mock("../src/api/client", () => {
  const answer = (method: string) => (path: string, options: unknown) => {
    state.sent.push({ method, path, options });
    const session = { scope: state.scope, is_shared: true };
    return Promise.resolve(path === "/api/v1/session" ? session : ANSWERS[path]);
  };
  const methods = ["GET", "POST", "PUT", "DELETE"].map((name) => [name, answer(name)]);
  return {
    unwrap: (found: Promise<unknown>) => found,
    api: Object.fromEntries(methods) as unknown,
  };
});

vi.mock("../src/components/Tabs", () => ({ TabLinks: () => null }));
vi.mock("../src/components/links", () => ({
  LinkText: ({ children }: { children: ReactNode }) => <span>{children}</span>,
}));

function show(page: ReactNode) {
  const client = new QueryClient({ defaultOptions: { queries: { retry: false } } });
  return render(
    <QueryClientProvider client={client}>
      <MantineProvider env="test">{page}</MantineProvider>
    </QueryClientProvider>,
  );
}

beforeEach(() => {
  state.scope = "admin";
  state.sent.length = 0;
});

it("offers quotas to administrators, and shows them to others", async () => {
  const { unmount } = show(<Quotas />);
  expect(await screen.findByText("2 of 3")).toBeTruthy();
  fireEvent.click(await screen.findByRole("button", { name: "Edit the quota of user bob" }));
  fireEvent.click(await screen.findByRole("button", { name: "Save" }));
  await waitFor(() => expect(state.sent.some(({ method }) => method === "PUT")).toBe(true));
  expect(state.sent.find(({ method }) => method === "PUT")?.options).toEqual({
    params: { path: { kind: "user", name: "bob" } },
    body: { weight: 1, max_slots: 3, slot_hours: null, checkpoint_bytes: null, revision: 4 },
  });
  unmount();
  state.scope = "user";
  show(<Quotas />);
  expect(await screen.findByText("2 of 3")).toBeTruthy();
  expect(screen.queryByRole("button")).toBeNull();
});

it("hides reservations where there are none and nobody may make one", async () => {
  const reserved = { id: 1, node: "box2", user: "ann", begins_at: 1, ends_at: 2 };
  state.scope = "user";
  const { unmount } = show(<Reservations reservations={[]} nodes={["box2"]} />);
  expect(screen.queryByText("Reservations")).toBeNull();
  unmount();
  state.scope = "admin";
  show(<Reservations reservations={[reserved]} nodes={["box2"]} />);
  fireEvent.click(await screen.findByRole("button", { name: "Release box2 of ann" }));
  fireEvent.click(await screen.findByRole("button", { name: "Release it" }));
  await waitFor(() => expect(state.sent.some(({ method }) => method === "DELETE")).toBe(true));
});

it("acts on what the filters match, as the master tells it, and not on loaded rows", async () => {
  const loaded = [{ id: 1, name: "one", state: "COMPLETED" }] as Experiment[];
  const filter = { query: "tag:a" };
  show(
    <BulkActions
      experiments={loaded} matching={filter} total={5} isShared={false} onDone={() => undefined}
    />,
  ); // prettier-ignore
  fireEvent.click(screen.getByRole("button", { name: "With 5 selected experiments" }));
  expect(screen.queryByRole("menuitem", { name: "Move …" })).toBeNull();
  fireEvent.click(await screen.findByRole("menuitem", { name: "Delete …" }));
  expect(await screen.findByText("Delete 2 experiments?")).toBeTruthy();
  expect(screen.getByText(/4 trials and 3 checkpoints \(2.0 KiB\) in all/)).toBeTruthy();
  expect(screen.getByText("1 experiment already as wanted.")).toBeTruthy();
  expect(screen.getByText(/Left out: 2, as it must have ended/)).toBeTruthy();
  fireEvent.click(screen.getByRole("button", { name: "Delete them" }));
  await waitFor(() => expect(state.sent.some(({ method }) => method === "POST")).toBe(true));
  expect(state.sent.find(({ method }) => method === "POST")?.options).toEqual({
    body: { action: "delete", experiment_ids: [9, 8] },
  });
});

it("says how a model gets its name where there is none", async () => {
  const fetched = vi.spyOn(globalThis, "fetch");
  fetched.mockResolvedValue(new Response('{"registered_models": []}'));
  show(<Models />);
  expect(await screen.findByText("paceline model register NAME UUID")).toBeTruthy();
  expect(downloadCommand("a-b.c")).toBe("paceline model download a-b.c");
  expect(downloadCommand("it's; rm")).toBe("paceline model download 'it'\\''s; rm'");
  fetched.mockRestore();
});

it("writes usage as CSV that no table program takes for formulas", () => {
  const row = {
    month: "2026-11", user: "ann", project: '=1+1,"x"', pool: "default",
    slot_hours: 1 / 3, wait_hours: 0, num_trials: 2,
    gpu_hours: 0.25, training_hours: 0.1, lost_hours: 0.05, known_hours: 0.2,
  }; // prettier-ignore
  expect(goodputOf(row)).toBe("50.0 %");
  expect(goodputOf({ ...row, known_hours: 0 })).toBe("–");
  expect(usageCsv([row], ["user", "project"])).toBe(
    "user,project,slot_hours,wait_hours,num_trials,gpu_hours,training_hours,lost_hours,known_hours\r\n" +
      'ann,"\'=1+1,""x""",0.3333333333333333,0,2,0.25,0.1,0.05,0.2\r\n',
  );
  expect(csvOf([[null, "@a"]])).toBe(",'@a\r\n");
  expect(monthOf(Date.UTC(2026, 0, 31), 1)).toBe("2025-12");
  expect(usageSearch({ since: "2026-13", until: "2026-02", by: ["pool", "nothing"] })).toEqual({
    since: undefined, until: "2026-02", by: ["pool"],
  }); // prettier-ignore
});
