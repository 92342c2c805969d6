/** Code of pages: loaded soon after the first page, and again until it is there. */

import { lazyRouteComponent } from "@tanstack/react-router";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8000;
/** Browsers may keep that a file failed; then only a new page gets it. */
const FAILURES_BEFORE_RELOAD = 3;
/** Pages are made anew ever more seldom while it does not help. */
const FIRST_RELOAD_PAUSE_MS = 1000;
const LONGEST_RELOAD_PAUSE_MS = 60_000;
const RELOADED_KEY = "paceline-reloaded";

const loaders: (() => Promise<unknown>)[] = [];

/** As `lazyRouteComponent`, but a page whose code cannot be had waits for it instead of failing. */
export const lazyPage: typeof lazyRouteComponent = (load, name) => {
  const loadInTheEnd = () => untilLoaded(load, BROWSER);
  loaders.push(loadInTheEnd);
  return lazyRouteComponent(loadInTheEnd, name);
};

/**
 * Load the code of all pages, one after the other, so that none is missing when the master is.
 *
 * Browsers of people who save data load the code of what is opened.
 */
export async function loadAllPages(): Promise<void> {
  const { connection } = navigator as { connection?: { saveData?: boolean } };
  if (connection?.saveData) return;
  for (const load of loaders) await load();
}

export interface Surroundings {
  wait: (milliseconds: number) => Promise<void>;
  isServed: () => Promise<boolean>;
  reload: () => void;
}

const BROWSER: Surroundings = {
  wait: (milliseconds) => new Promise((done) => setTimeout(done, milliseconds)),
  isServed: () =>
    fetch("/icon.svg", { cache: "no-store" }).then(
      (reply) => reply.ok,
      () => false,
    ),
  reload: reloadSeldom,
};

/** Load until it works; `reload` is the last resort where the master answers and a file is missing. */
export async function untilLoaded<Module>(
  load: () => Promise<Module>,
  { wait, isServed, reload }: Surroundings,
): Promise<Module> {
  let numMissing = 0;
  for (let pause = FIRST_PAUSE_MS; ; pause = Math.min(2 * pause, LONGEST_PAUSE_MS)) {
    try {
      return await load();
    } catch {
      if (await isServed()) numMissing += 1;
      if (numMissing >= FAILURES_BEFORE_RELOAD) {
        numMissing = 0;
        reload();
      }
      await wait(pause);
    }
  }
}

function reloadSeldom(): void {
  const [at = 0, times = 0] = (sessionStorage.getItem(RELOADED_KEY) ?? "").split(" ").map(Number);
  const passed = Date.now() - at;
  if (passed < Math.min(FIRST_RELOAD_PAUSE_MS * 2 ** times, LONGEST_RELOAD_PAUSE_MS)) return;
  const again = passed < 2 * LONGEST_RELOAD_PAUSE_MS ? times + 1 : 1;
  sessionStorage.setItem(RELOADED_KEY, `${Date.now()} ${again}`);
  window.location.reload();
}
