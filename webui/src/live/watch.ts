/**
 * What a person watches in this browser: a notice tells when it ends.
 *
 * Hidden tabs have no event stream, and notices are for them above all, so the states are asked for.
 */

import { notifications } from "@mantine/notifications";
import { useEffect, useSyncExternalStore } from "react";

import { api, unwrap } from "../api/client";
import { problemOf } from "../api/problem";
import { isTerminal } from "../lib/states";
import { hub } from "./hub";

export interface Watched {
  kind: "experiment" | "trial";
  id: number;
  name: string;
}

const KEY = "paceline-watched";
const PERIOD_MS = 10_000;
const MOST = 100;
const listeners = new Set<() => void>();

/** Return what is watched; anything may stand in the browser's storage. */
function read(): Watched[] {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter(isWatched) : [];
  } catch {
    return [];
  }
}

function isWatched(found: unknown): found is Watched {
  const { kind, id, name } = (found ?? {}) as Partial<Watched>;
  const isKind = kind === "experiment" || kind === "trial";
  return isKind && Number.isSafeInteger(id) && typeof name === "string";
}

function write(watched: readonly Watched[]): void {
  try {
    localStorage.setItem(KEY, JSON.stringify(watched.slice(-MOST)));
  } catch {
    // Some browsers forbid storage: nothing is watched then, which the button shows.
  }
  for (const listener of listeners) listener();
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  window.addEventListener("storage", listener);
  return () => {
    listeners.delete(listener);
    window.removeEventListener("storage", listener);
  };
}

const isSame = (one: Pick<Watched, "kind" | "id">) => (other: Watched) =>
  one.kind === other.kind && one.id === other.id;

/** Return whether something is watched, and what changes that. */
export function useWatch(one: Watched): [boolean, () => Promise<void>] {
  const is = useSyncExternalStore(subscribe, () => read().some(isSame(one)));
  const toggle = async () => {
    const others = read().filter((other) => !isSame(one)(other));
    write(is ? others : [...others, one]);
    if (is) return;
    const canTell = await mayNotify();
    const where = canTell ? "a notice of the browser tells" : "this page tells";
    const hint = canTell ? "" : " The browser allows it no notices here.";
    notifications.show({
      message: `When ${one.name} has ended, ${where}, while a tab of Paceline is open.${hint}`,
    });
  };
  return [is, toggle];
}

/** Ask for the permission; a page of another machine without encryption gets none. */
async function mayNotify(): Promise<boolean> {
  if (!("Notification" in window)) return false;
  if (Notification.permission !== "default") return Notification.permission === "granted";
  return (await Notification.requestPermission()) === "granted";
}

/** Tell of what is watched and has ended, in one of the tabs. */
export function useWatcher(isSignedIn: boolean): void {
  useEffect(() => {
    if (!isSignedIn) return;
    const check = () => void inOneTab(tellEnded);
    check();
    const timer = setInterval(check, PERIOD_MS);
    const leave = [
      hub.onResync(check),
      hub.listen(({ kind, experiment_id: experiment, trial_id: trial }) => {
        const id = kind === "experiment_state" ? experiment : kind === "trial_state" ? trial : null;
        if (id !== null && read().some((one) => one.id === id)) check();
      }),
    ];
    return () => {
      clearInterval(timer);
      for (const one of leave) one();
    };
  }, [isSignedIn]);
}

async function inOneTab(task: () => Promise<void>): Promise<void> {
  if (read().length === 0) return;
  const locks = (navigator as Partial<Navigator>).locks;
  if (locks === undefined) await task();
  else await locks.request(KEY, task);
}

async function tellEnded(): Promise<void> {
  for (const one of read()) {
    try {
      const found = await stateOf(one);
      if (!isTerminal(found.state)) continue;
      write(read().filter((other) => !isSame(one)(other)));
      tell(one, found.state, found.error);
    } catch (error) {
      if (problemOf(error).status === 404) write(read().filter((other) => !isSame(one)(other)));
    }
  }
}

function stateOf({ kind, id }: Watched) {
  if (kind === "trial")
    return unwrap(api.GET("/api/v1/trials/{trial_id}", { params: { path: { trial_id: id } } }));
  const path = { experiment_id: id };
  return unwrap(api.GET("/api/v1/experiments/{experiment_id}", { params: { path } }));
}

const WORDS: Record<string, string> = { COMPLETED: "is completed", ERROR: "has failed" };

function tell({ kind, id, name }: Watched, state: string, error: string | null): void {
  const title = `${name} ${WORDS[state] ?? `is ${state.toLowerCase()}`}`;
  const body = error?.slice(0, 200) ?? "";
  const path = `/${kind}s/${id}`;
  notifications.show({ title, message: body, autoClose: false, color: error ? "red" : "green" });
  if (!("Notification" in window) || Notification.permission !== "granted") return;
  try {
    const notice = new Notification(title, { body, tag: `paceline${path}`, icon: "/icon.svg" });
    notice.onclick = () => {
      window.focus();
      window.location.assign(path);
    };
  } catch {
    // Phones allow notices to service workers alone; the page has told.
  }
}
