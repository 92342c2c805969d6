/** Earlier versions of an experiment's notes; one of them can be taken into the editor. */

import { Button, Group, Stack, Text, Textarea } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";

import { notesHistoryQuery } from "../../api/queries";
import { Ago } from "../../components/Ago";
import { ProblemView } from "../../components/Feedback";
import { plural } from "../../lib/numbers";

interface NotesHistoryProps {
  id: number;
  /** The version of the stored notes, so that each save is followed. */
  version: string;
  onRestore: (text: string) => void;
}

export function NotesHistory({ id, version, onRestore }: NotesHistoryProps) {
  const history = useQuery(notesHistoryQuery(id, version));
  const [isOpen, setOpen] = useState(false);
  const [shown, setShown] = useState<number | null>(null);
  if (history.isError) return <ProblemView error={history.error} />;
  const versions = history.data ?? [];
  if (versions.length < 2) return null;
  const open = versions.find(({ number }) => number === shown);
  return (
    <Stack gap="xs">
      <Group>
        <Button
          size="compact-sm"
          variant="default"
          aria-expanded={isOpen}
          onClick={() => setOpen(!isOpen)}
        >
          History: {plural(versions.length, "version")}
        </Button>
      </Group>
      {isOpen && (
        <ol aria-label="Versions of the notes" reversed style={{ margin: 0, paddingLeft: 24 }}>
          {versions.map(({ number, user, saved_at: savedAt }) => (
            <li key={number}>
              <Group gap="xs">
                <Text size="sm" c={user === null ? "dimmed" : undefined}>
                  {user === null ? (
                    "before the first edit"
                  ) : (
                    <>
                      {user}, <Ago time={savedAt} />
                    </>
                  )}
                </Text>
                <Button
                  size="compact-xs"
                  variant="subtle"
                  aria-label={`Show version ${number}`}
                  aria-pressed={shown === number}
                  onClick={() => setShown(shown === number ? null : number)}
                >
                  Show
                </Button>
              </Group>
            </li>
          ))}
        </ol>
      )}
      {isOpen && open && (
        <>
          <Textarea
            label={`Version ${open.number}`}
            autosize
            minRows={2}
            maxRows={20}
            readOnly
            value={open.text}
          />
          <Group>
            <Button size="xs" variant="default" onClick={() => onRestore(open.text)}>
              Restore it
            </Button>
            <Text size="xs" c="dimmed">
              Puts it into the field above; save to keep it.
            </Text>
          </Group>
        </>
      )}
    </Stack>
  );
}
