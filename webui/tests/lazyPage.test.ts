import { expect, it, vi } from "vitest";

import { lazyPage, loadAllPages, type Surroundings, untilLoaded } from "../src/lib/lazyPage";

function surroundings(isServed: boolean) {
  const seen = { pauses: [] as number[], numReloads: 0 };
  const given: Surroundings = {
    wait: (milliseconds) => {
      seen.pauses.push(milliseconds);
      return Promise.resolve();
    },
    isServed: () => Promise.resolve(isServed),
    reload: () => (seen.numReloads += 1),
  };
  return { seen, given };
}

/** Load after a number of failures. */
function failing(times: number) {
  let left = times;
  return () => {
    left -= 1;
    return left < 0 ? Promise.resolve("page") : Promise.reject(new TypeError("no such module"));
  };
}

it("loads a page again with growing pauses until the master is back", async () => {
  const { seen, given } = surroundings(false);
  expect(await untilLoaded(failing(7), given)).toBe("page");
  expect(seen.pauses).toEqual([500, 1000, 2000, 4000, 8000, 8000, 8000]);
  expect(seen.numReloads).toBe(0);
});

it("reloads where the master answers and the file stays missing", async () => {
  const { seen, given } = surroundings(true);
  expect(await untilLoaded(failing(2), given)).toBe("page");
  expect(seen.numReloads).toBe(0);
  await untilLoaded(failing(3), given);
  expect(seen.numReloads).toBe(1);
});

it("loads all pages ahead, but none where data is saved", async () => {
  const load = vi.fn(() => Promise.resolve({ Page: () => null }));
  lazyPage(load, "Page");
  vi.stubGlobal("navigator", { connection: { saveData: true } });
  await loadAllPages();
  expect(load).not.toHaveBeenCalled();
  vi.stubGlobal("navigator", { connection: { saveData: false } });
  await loadAllPages();
  expect(load).toHaveBeenCalledOnce();
  vi.unstubAllGlobals();
});
