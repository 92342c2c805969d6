/** An experiment's notes; whoever saves is told if someone else has saved others meanwhile. */

import { Alert, Button, Group, Stack, Text, Textarea } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useBlocker, useParams } from "@tanstack/react-router";
import { Suspense, useDeferredValue, useState } from "react";

import { editExperiment } from "../../api/actions";
import { keys } from "../../api/keys";
import { problemOf } from "../../api/problem";
import { experimentQuery } from "../../api/queries";
import { ProblemView, Waiting } from "../../components/Feedback";
import { lazyPage } from "../../lib/lazyPage";
import { NotesHistory } from "./NotesHistory";

const Markdown = lazyPage(() => import("../../components/Markdown"), "Markdown");

export function Notes() {
  const { id } = useParams({ from: "/experiments/$id" });
  const experiment = useQuery(experimentQuery(id)).data;
  if (!experiment) return <Waiting />;
  const { notes = "", notes_version: version = "" } = experiment;
  return <Editor key={id} id={id} stored={{ text: notes, version }} />;
}

interface Version {
  text: string;
  version: string;
}

export function Editor({ id, stored }: { id: number; stored: Version }) {
  const client = useQueryClient();
  // Null until something is typed, so that what others write meanwhile is shown.
  const [typed, setTyped] = useState<string | null>(null);
  /** The version that what is typed began from. */
  const [base, setBase] = useState(stored.version);
  const text = typed ?? stored.text;
  const isChanged = typed !== null && typed !== stored.text;
  const save = useMutation({
    mutationFn: (version: string) => editExperiment(id, { notes: text, notes_version: version }),
    onSuccess: (changed) => {
      client.setQueryData(keys.experiment(id), changed);
      setTyped(null);
    },
    onError: () => client.invalidateQueries({ queryKey: keys.experiment(id) }),
  });
  const isRefused = save.isError && problemOf(save.error).code === "notes_changed";
  const isBehind = isChanged && (isRefused || base !== stored.version);
  const type = (next: string) => {
    if (typed === null) setBase(stored.version);
    setTyped(next);
  };
  const merge = (next: string | null) => {
    setBase(stored.version);
    setTyped(next);
    save.reset();
  };
  useBlocker({
    shouldBlockFn: () => isChanged && !window.confirm("Leave, and lose what you typed?"),
    enableBeforeUnload: isChanged,
  });
  const shown = useDeferredValue(text);
  return (
    <Stack maw={860}>
      {shown.trim() !== "" && (
        <Suspense>
          <Markdown text={shown} label="Notes as they are shown" />
        </Suspense>
      )}
      <Textarea
        label="Notes"
        description="Markdown. “trial 12”, “experiment 3” and “view 2” become links."
        autosize
        minRows={10}
        maxRows={40}
        maxLength={1_000_000}
        value={text}
        onChange={(event) => type(event.currentTarget.value)}
      />
      {isBehind && (
        <Alert
          role="alert"
          color="yellow"
          variant="outline"
          styles={{ title: { color: "inherit" } }}
          title="Someone else has saved these notes since you began"
        >
          <Textarea
            label="Their notes"
            autosize
            minRows={2}
            maxRows={12}
            readOnly
            value={stored.text}
          />
          <Group mt="sm" gap="xs">
            <Button size="xs" onClick={() => merge(`${stored.text}\n\n${text}`)}>
              Put mine below theirs
            </Button>
            <Button size="xs" variant="default" onClick={() => merge(text)}>
              Keep mine only
            </Button>
            <Button size="xs" variant="default" onClick={() => merge(null)}>
              Take theirs
            </Button>
          </Group>
        </Alert>
      )}
      {save.isError && !isRefused && <ProblemView error={save.error} />}
      <Group>
        <Button
          disabled={!isChanged || isBehind}
          loading={save.isPending}
          onClick={() => save.mutate(base)}
        >
          Save
        </Button>
        <Text size="sm" c="dimmed" role="status">
          {isChanged ? "Not saved yet" : save.isSuccess ? "Saved" : ""}
        </Text>
      </Group>
      <NotesHistory id={id} version={stored.version} onRestore={type} />
    </Stack>
  );
}
