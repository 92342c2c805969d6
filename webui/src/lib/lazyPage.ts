/** Code of pages: loaded soon after the first page, and again until it is there. */

import { lazyRouteComponent } from "@tanstack/react-router";

const FIRST_PAUSE_MS = 500;
const LONGEST_PAUSE_MS = 8000;
/** Browsers may keep that a file failed; then only a new page gets it. */
const FAILURES_BEFORE_RELOAD = 3;
const RELOAD_PERIOD_MS = 60_000;
const RELOADED_KEY = "paceline-reloaded-at";

const loaders: (() => Promise<unknown>)[] = [];

/** As `lazyRouteComponent`, but a page whose code cannot be had waits for it instead of failing. */
export const lazyPage: typeof lazyRouteComponent = (load, name) => {
  const loadInTheEnd = () => untilLoaded(load, BROWSER);
  loaders.push(loadInTheEnd);
  return lazyRouteComponent(loadInTheEnd, name);
};

/** Load the code of all pages, one after the other, so that none is missing when the master is. */
export async function loadAllPages(): Promise<void> {
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
  reload: reloadOnce,
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

function reloadOnce(): void {
  const last = Number(sessionStorage.getItem(RELOADED_KEY) ?? 0);
  if (Date.now() - last < RELOAD_PERIOD_MS) return;
  sessionStorage.setItem(RELOADED_KEY, String(Date.now()));
  window.location.reload();
}
