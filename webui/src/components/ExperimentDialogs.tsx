/** Dialogs about an experiment: stopping, deleting, editing its name and labels. */

import { TagsInput, Text, Textarea, TextInput } from "@mantine/core";
import { notifications } from "@mantine/notifications";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useState } from "react";

import { deleteExperiment, editExperiment } from "../api/actions";
import { keys } from "../api/keys";
import { lossQuery } from "../api/queries";
import type { Experiment } from "../api/types";
import { formatBytes, plural } from "../lib/numbers";
import { Confirm } from "./Confirm";
import { ProblemView } from "./Feedback";
import { FormDialog } from "./FormDialog";

interface StopDialogProps {
  experiment: Experiment;
  action: "cancel" | "kill";
  onConfirm: () => Promise<unknown>;
  onClose: () => void;
}

export function StopDialog({ experiment, action, onConfirm, onClose }: StopDialogProps) {
  const count = experiment.num_running;
  const running = plural(count, "running trial");
  const isKill = action === "kill";
  const kept = count === 1 ? "its last checkpoint" : "the last checkpoint of each";
  return (
    <Confirm
      title={`${isKill ? "Kill" : "Cancel"} ${experiment.name}?`}
      confirmLabel={isKill ? "Kill it" : "Cancel it"}
      isDestructive
      onConfirm={onConfirm}
      onClose={onClose}
    >
      <Text size="sm">
        {count === 0
          ? "No trial runs now, and none will start any more."
          : isKill
            ? `Ends ${running} at once: what was trained since ${kept} is lost.`
            : `Asks ${running} to store a checkpoint and end; the search starts no further trials.`}
      </Text>
      <Text size="sm" mt="xs">
        Metrics, logs and stored checkpoints stay.
      </Text>
    </Confirm>
  );
}

interface DialogProps {
  experiment: Experiment;
  onClose: () => void;
}

export function DeleteDialog({ experiment, onClose }: DialogProps) {
  const loss = useQuery(lossQuery(experiment.id));
  const client = useQueryClient();
  const navigate = useNavigate();
  const remove = async () => {
    const { left_behind: left = [] } = await deleteExperiment(experiment.id);
    await navigate({ to: "/experiments" });
    client.removeQueries({ queryKey: keys.experiment(experiment.id) });
    await client.invalidateQueries({ queryKey: keys.experiments() });
    const message =
      left.length === 0
        ? `${experiment.name} was deleted.`
        : `${experiment.name} was deleted, but some files stayed: ${left.join(", ")}.`;
    notifications.show({ message, autoClose: left.length === 0 });
  };
  return (
    <Confirm
      title={`Delete ${experiment.name}?`}
      confirmLabel="Delete it"
      isDestructive
      isReady={loss.isSuccess && loss.data.obstacle === null}
      onConfirm={remove}
      onClose={onClose}
    >
      {loss.isPending && <Text size="sm">Finding out what would be lost …</Text>}
      {loss.isError && <ProblemView error={loss.error} />}
      {loss.isSuccess &&
        (loss.data.obstacle === null ? (
          <Text size="sm">
            These go for good: {plural(loss.data.num_trials, "trial")} with{" "}
            {loss.data.num_trials === 1 ? "its" : "their"} logs,{" "}
            {plural(loss.data.num_metric_points, "metric point")}, and{" "}
            {plural(loss.data.num_checkpoints, "checkpoint")} (
            {formatBytes(loss.data.checkpoint_bytes)}).
          </Text>
        ) : (
          <Text size="sm">It cannot be deleted: {loss.data.obstacle}</Text>
        ))}
    </Confirm>
  );
}

export function EditDialog({ experiment, onClose }: DialogProps) {
  const client = useQueryClient();
  const [name, setName] = useState(experiment.name);
  const [description, setDescription] = useState(experiment.description);
  const [labels, setLabels] = useState(experiment.labels);
  const save = useMutation({
    mutationFn: () => editExperiment(experiment.id, { name, description, labels }),
    onSuccess: (changed) => {
      client.setQueryData(keys.experiment(changed.id), changed);
      onClose();
    },
  });
  return (
    <FormDialog
      title="Edit experiment"
      {...{ save, onClose }}
      saveLabel="Save"
      onSave={() => save.mutate()}
    >
      <TextInput
        label="Name"
        required
        value={name}
        onChange={(event) => setName(event.currentTarget.value)}
        data-autofocus
      />
      <Textarea
        label="Description"
        autosize
        minRows={2}
        maxRows={10}
        value={description}
        onChange={(event) => setDescription(event.currentTarget.value)}
      />
      <TagsInput label="Labels" value={labels} onChange={setLabels} />
    </FormDialog>
  );
}
