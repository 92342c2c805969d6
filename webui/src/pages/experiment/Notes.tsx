import { Button, Group, Stack, Text, Textarea } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useBlocker, useParams } from "@tanstack/react-router";
import { useState } from "react";

import { editExperiment } from "../../api/actions";
import { keys } from "../../api/keys";
import { experimentQuery } from "../../api/queries";
import { ProblemView, Waiting } from "../../components/Feedback";

export function Notes() {
  const { id } = useParams({ from: "/experiments/$id" });
  const experiment = useQuery(experimentQuery(id)).data;
  if (!experiment) return <Waiting />;
  return <Editor key={id} id={id} stored={experiment.notes ?? ""} />;
}

function Editor({ id, stored }: { id: number; stored: string }) {
  const client = useQueryClient();
  // Null until something is typed, so that what others write meanwhile is shown.
  const [typed, setTyped] = useState<string | null>(null);
  const text = typed ?? stored;
  const isChanged = typed !== null && typed !== stored;
  const save = useMutation({
    mutationFn: () => editExperiment(id, { notes: text }),
    onSuccess: (changed) => {
      client.setQueryData(keys.experiment(id), changed);
      setTyped(null);
    },
  });
  useBlocker({
    shouldBlockFn: () => isChanged && !window.confirm("Leave, and lose what you typed?"),
    enableBeforeUnload: isChanged,
  });
  return (
    <Stack maw={860}>
      <Textarea
        label="Notes"
        description="Plain text, for whoever looks at this experiment later."
        autosize
        minRows={10}
        maxRows={40}
        maxLength={1_000_000}
        value={text}
        onChange={(event) => setTyped(event.currentTarget.value)}
      />
      {save.isError && <ProblemView error={save.error} />}
      <Group>
        <Button disabled={!isChanged} loading={save.isPending} onClick={() => save.mutate()}>
          Save
        </Button>
        <Text size="sm" c="dimmed" role="status">
          {isChanged ? "Not saved yet" : save.isSuccess ? "Saved" : ""}
        </Text>
      </Group>
    </Stack>
  );
}
