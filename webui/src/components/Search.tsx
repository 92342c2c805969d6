/** Search over everything from any page, and the sheet of keyboard shortcuts. */

import { Button, Kbd, Modal, Stack, Table, Text } from "@mantine/core";
import { useDebouncedValue } from "@mantine/hooks";
import { useMutation, useQuery } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { type KeyboardEvent, type ReactNode, useId, useState } from "react";

import { foundQuery, searchLogs } from "../api/found";
import { plural } from "../lib/numbers";
import { ProblemView } from "./Feedback";
import { RowLink } from "./links";
import { isQueryError, QueryBox } from "./QueryBox";

const SETTLED_MS = 200;

export const SHORTCUTS = [
  { keys: ["Ctrl", "K"], what: "Search everything; also /" },
  { keys: ["?"], what: "This sheet" },
  { keys: ["G", "H"], what: "Home" },
  { keys: ["G", "E"], what: "Experiments" },
  { keys: ["G", "C"], what: "Compare" },
  { keys: ["G", "L"], what: "Cluster" },
  { keys: ["G", "N"], what: "New experiment" },
  { keys: ["↓", "↑"], what: "Next and previous result of a search" },
] as const;

export function ShortcutSheet({ onClose }: { onClose: () => void }) {
  return (
    <Modal opened onClose={onClose} title="Keyboard shortcuts" centered>
      <Table aria-label="Keyboard shortcuts">
        <Table.Tbody>
          {SHORTCUTS.map(({ keys, what }) => (
            <Table.Tr key={what}>
              <Table.Td>
                {keys.map((key) => (
                  <Kbd key={key} mr={4}>
                    {key}
                  </Kbd>
                ))}
              </Table.Td>
              <Table.Td>{what}</Table.Td>
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
      <Text size="sm" c="dimmed" mt="sm">
        On a Mac, ⌘ stands for Ctrl. Keys do nothing while you type in a field.
      </Text>
    </Modal>
  );
}

/** Move the focus among the results. */
function moveFocus(event: KeyboardEvent<HTMLDivElement>) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  const from = event.target as HTMLElement;
  // The keys choose among the completions while those are shown.
  if (step === undefined || from.getAttribute("aria-expanded") === "true") return;
  const links = [...event.currentTarget.querySelectorAll<HTMLElement>("a, button[data-result]")];
  const next = links[links.indexOf(from) + step];
  if (next === undefined) return;
  event.preventDefault();
  next.focus();
}

export function SearchDialog({ onClose }: { onClose: () => void }) {
  const [text, setText] = useState("");
  const [asked] = useDebouncedValue(text, SETTLED_MS);
  const found = useQuery({ ...foundQuery(asked), enabled: asked !== "" });
  const groups = (found.data ?? []).filter(({ entries }) => entries.length > 0);
  const navigate = useNavigate();
  const isNothing = found.isSuccess && asked !== "" && groups.length === 0;
  // The box tells what is typed a moment later: keys until then would act on what was found before.
  const [typed, setTyped] = useState("");
  const isOld = asked !== typed;
  const go = (to: string) => {
    onClose();
    void navigate({ href: to });
  };
  return (
    <Modal opened onClose={onClose} title="Search" size="lg" yOffset="8dvh">
      <Stack gap="sm" onKeyDown={moveFocus}>
        <QueryBox
          label="Search everything"
          size="sm"
          data-autofocus
          value={text}
          onInput={(event) => setTyped(event.currentTarget.value.trim())}
          onChange={(query) => {
            setText(query);
            setTyped(query);
          }}
          error={found.error}
        />
        {found.isError && !isQueryError(found.error) && <ProblemView error={found.error} />}
        <Text size="xs" c="dimmed" role="status">
          {asked === ""
            ? "Experiments, trials, labels, settings, notes and logs; or a query."
            : found.isError
              ? ""
              : isOld || found.isFetching
                ? "Searching …"
                : isNothing
                  ? "Nothing is found"
                  : plural(
                      groups.reduce((sum, { entries }) => sum + entries.length, 0),
                      "result",
                    )}
        </Text>
        <Stack gap="sm" inert={isOld}>
          {groups.map(({ title, entries, all }) => (
            <Results key={title} title={title}>
              {entries.map(({ to, name, detail }) => (
                <li key={to} onClick={onClose}>
                  <RowLink to={to}>{name}</RowLink> <span className="quiet">{detail}</span>
                </li>
              ))}
              {all && (
                <li>
                  <Button size="compact-xs" variant="subtle" data-result onClick={() => go(all.to)}>
                    {all.label}
                  </Button>
                </li>
              )}
            </Results>
          ))}
          {asked !== "" && !found.isError && <LogResults key={asked} text={asked} onGo={onClose} />}
        </Stack>
      </Stack>
    </Modal>
  );
}

function Results({ title, children }: { title: string; children: ReactNode }) {
  const id = useId();
  return (
    <section aria-labelledby={id}>
      <Text size="xs" fw={600} id={id} component="h3" m={0}>
        {title}
      </Text>
      <ul className="wrap-anywhere" style={{ margin: "4px 0 0", paddingLeft: 18 }}>
        {children}
      </ul>
    </section>
  );
}

/** Logs are files, and searched only when asked for. */
function LogResults({ text, onGo }: { text: string; onGo: () => void }) {
  const search = useMutation({ mutationFn: () => searchLogs(text) });
  if (!search.data)
    return (
      <div>
        <Button
          size="xs"
          variant="default"
          data-result
          loading={search.isPending}
          onClick={() => search.mutate()}
        >
          Search the logs
        </Button>
        {search.isError && <ProblemView error={search.error} />}
      </div>
    );
  const { lines, numExperiments } = search.data;
  return (
    <Results title={`Logs of the newest ${plural(numExperiments, "experiment")}`}>
      {lines.length === 0 && <li>No line has this text.</li>}
      {lines.map(({ to, name, detail }) => (
        <li key={to} onClick={onGo}>
          <RowLink to={to}>{name}</RowLink> <span className="quiet">{detail}</span>
        </li>
      ))}
    </Results>
  );
}
