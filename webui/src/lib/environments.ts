/** What attempts ran in, in words. */

import type { AttemptEnvironment } from "../api/types";
import { plural } from "./numbers";

/** Attempts in a row that ran in the same environment, with the same code. */
export interface EnvironmentGroup {
  numbers: number[];
  environment: Recorded;
  source: Source | null;
}

interface Recorded {
  paceline?: string;
  python?: { version?: string; executable?: string };
  start?: string;
  host?: { name?: string; platform?: string; num_cores?: number };
  packages?: Record<string, string>;
  gpus?: { models?: string[]; driver?: string };
}

interface Source {
  commit: string;
  branch?: string | null;
  num_diff_bytes?: number;
  num_untracked_files?: number;
  diff?: string;
}

/** Digits of a commit that people know it by. */
const SHORT = 10;

/** Return the environments that are known, the newest first; equal ones in a row are one. */
export function groupsOf(attempts: readonly AttemptEnvironment[]): EnvironmentGroup[] {
  const groups: EnvironmentGroup[] = [];
  let before = "";
  for (const { number, environment, source } of attempts) {
    if (environment === null) {
      before = "";
      continue;
    }
    const content = JSON.stringify([environment, source]);
    if (content === before) groups[0]?.numbers.push(number);
    else
      groups.unshift({
        numbers: [number],
        environment: environment as Recorded,
        source: source as Source | null,
      });
    before = content;
  }
  return groups;
}

/** Return the attempts of a group, such as "attempts 1 to 3". */
export function attemptsOf({ numbers }: EnvironmentGroup): string {
  return numbers.length === 1
    ? `attempt ${numbers[0]}`
    : `attempts ${numbers[0]} to ${numbers[numbers.length - 1]}`;
}

/** Return the names and values of an environment that are told first. */
export function factsOf({ environment, source }: EnvironmentGroup): [string, string][] {
  const { paceline, python = {}, host = {}, packages = {}, gpus, start } = environment;
  const facts: [string, string | undefined][] = [
    ["Python", python.version],
    ["Interpreter", python.executable],
    ["torch", packages.torch],
    ["Paceline", paceline],
    ["Host", host.name],
    ["Start", start],
    ["System", host.platform],
    ["Cores", host.num_cores === undefined ? undefined : String(host.num_cores)],
    ["GPUs", gpus?.models?.join(", ")],
    ["GPU driver", gpus?.driver],
    ["Code", source === null ? undefined : codeOf(source)],
  ];
  return facts.filter((one): one is [string, string] => Boolean(one[1]));
}

function codeOf(source: Source): string {
  let text = `commit ${source.commit.slice(0, SHORT)}`;
  if (source.branch) text += ` of ${source.branch}`;
  if (source.num_diff_bytes) text += `, ${plural(source.num_diff_bytes, "byte")} of changes`;
  if (source.num_untracked_files) text += `, ${plural(source.num_untracked_files, "new file")}`;
  return text;
}
