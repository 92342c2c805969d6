/** Actions on several experiments: those that are selected, or all that the filters of the list find. */

import { Button, Menu, Select, Stack, TagsInput, Text } from "@mantine/core";
import { notifications } from "@mantine/notifications";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { type ReactNode, useState } from "react";

import { actOnAll, type BulkArguments, type BulkWord } from "../api/actions";
import { keys } from "../api/keys";
import { problemOf } from "../api/problem";
import { bulkPreviewQuery, type ExperimentFilter, projectsQuery } from "../api/queries";
import type { BulkPreview, Experiment } from "../api/types";
import { formatBytes, plural } from "../lib/numbers";
import { allowedActions } from "../lib/states";
import { Confirm } from "./Confirm";
import { ProblemView } from "./Feedback";

interface Entry {
  action: BulkWord;
  label: string;
  asks: string | null;
}

const BULK: readonly Entry[] = [
  { action: "pause", label: "Pause", asks: null },
  { action: "activate", label: "Activate", asks: null },
  {
    action: "cancel",
    label: "Cancel",
    asks: "Their running trials are asked to store a checkpoint and end. Metrics, logs and stored checkpoints stay.",
  },
  {
    action: "kill",
    label: "Kill",
    asks: "Their running trials end at once: what was trained since each one's last checkpoint is lost. Metrics, logs and stored checkpoints stay.",
  },
  { action: "archive", label: "Archive", asks: null },
  { action: "unarchive", label: "Unarchive", asks: null },
  { action: "label", label: "Label", asks: "Labels are added and removed." },
  { action: "move", label: "Move", asks: "They go into another project." },
  {
    action: "delete",
    label: "Delete",
    asks: "They go for good, with their trials, metrics and logs",
  },
];
/** Actions that experiments take in any state. */
const ALWAYS = new Set<BulkWord>(["label", "move"]);

interface BulkActionsProps {
  experiments: readonly Experiment[];
  /** The filters if all that they find are selected, also those that are not loaded. */
  matching: ExperimentFilter | null;
  total: number;
  isShared: boolean;
  onDone: () => void;
}

export function BulkActions(props: BulkActionsProps) {
  const { experiments, matching, total, isShared, onDone } = props;
  const client = useQueryClient();
  const [asking, setAsking] = useState<Entry | null>(null);
  const applying = (action: BulkWord) =>
    experiments.filter((one) => ALWAYS.has(action) || allowedActions(one).has(action));
  const run = async (action: BulkWord, ids: readonly number[], given: BulkArguments) => {
    try {
      for (const message of await actOnAll(action, ids, given))
        notifications.show({ color: "red", message });
    } catch (error) {
      notifications.show({ color: "red", message: problemOf(error).message });
    }
    await client.invalidateQueries({ queryKey: keys.experiments() });
    onDone();
  };
  const offered = BULK.filter(
    ({ action }) =>
      (action !== "move" || isShared) && (matching !== null || applying(action).length > 0),
  );
  const choose = (entry: Entry) => {
    const isAsked = entry.asks !== null || matching !== null;
    if (isAsked) setAsking(entry);
    else void run(entry.action, idsOf(applying(entry.action)), {});
  };
  return (
    <>
      <Menu>
        <Menu.Target>
          <Button size="xs">
            With {plural(matching === null ? experiments.length : total, "selected experiment")}
          </Button>
        </Menu.Target>
        <Menu.Dropdown>
          {offered.map((entry) => (
            <Menu.Item key={entry.action} onClick={() => choose(entry)}>
              {entry.label} {matching === null ? applying(entry.action).length : "…"}
            </Menu.Item>
          ))}
        </Menu.Dropdown>
      </Menu>
      {asking && (
        <BulkDialog
          entry={asking}
          matching={matching}
          local={localPreview(applying(asking.action))}
          onConfirm={(ids, given) => run(asking.action, ids, given)}
          onClose={() => setAsking(null)}
        />
      )}
    </>
  );
}

interface BulkDialogProps {
  entry: Entry;
  matching: ExperimentFilter | null;
  /** What is known of the selected rows. */
  local: BulkPreview;
  onConfirm: (ids: readonly number[], given: BulkArguments) => Promise<void>;
  onClose: () => void;
}

function BulkDialog({ entry, matching, local, onConfirm, onClose }: BulkDialogProps) {
  const { action, label, asks } = entry;
  const [given, setGiven] = useState<BulkArguments>({});
  const isComplete =
    action === "move"
      ? given.to !== undefined
      : action !== "label" || Boolean(given.add_labels?.length ?? given.remove_labels?.length);
  const preview = useQuery({
    ...bulkPreviewQuery(action, matching ?? {}, given),
    enabled: matching !== null && isComplete,
  });
  const shown = matching === null ? local : preview.data;
  const number = shown?.experiment_ids.length;
  const title = `${label} ${number === undefined ? "experiments" : plural(number, "experiment")}?`;
  return (
    <Confirm
      title={title}
      confirmLabel={`${label} them`}
      isDestructive={!ALWAYS.has(action) && asks !== null}
      isReady={isComplete && Boolean(number)}
      onConfirm={() => onConfirm(shown?.experiment_ids ?? [], given)}
      onClose={onClose}
    >
      <Stack gap="xs">
        {asks !== null && (
          <Text size="sm">
            {asks}
            {action === "delete" && (shown ? `, ${lossOf(shown)}.` : ".")}
          </Text>
        )}
        {action === "label" && <LabelFields given={given} onChange={setGiven} />}
        {action === "move" && <ProjectField onChange={(to) => setGiven({ to })} />}
        {matching !== null && isComplete && preview.isPending && (
          <Text size="sm" role="status">
            Finding out which of them …
          </Text>
        )}
        {preview.isError && <ProblemView error={preview.error} />}
        {shown && <Preview shown={shown} />}
      </Stack>
    </Confirm>
  );
}

function Preview({ shown }: { shown: BulkPreview }): ReactNode {
  return (
    <>
      {shown.names.length > 0 && (
        <Text size="sm" className="wrap-anywhere">
          {namesOf(shown)}
        </Text>
      )}
      {shown.num_unchanged > 0 && (
        <Text size="sm">{plural(shown.num_unchanged, "experiment")} already as wanted.</Text>
      )}
      {shown.refused.map(({ reason, number, experiment_ids: ids }) => (
        <Text size="sm" key={reason}>
          Left out: {number.toLocaleString("en")}, as {reason} (experiment {ids.join(", ")}
          {number > ids.length && " …"}).
        </Text>
      ))}
    </>
  );
}

interface FieldsProps {
  given: BulkArguments;
  onChange: (given: BulkArguments) => void;
}

function LabelFields({ given, onChange }: FieldsProps) {
  return (
    <>
      <TagsInput
        label="Add labels"
        value={given.add_labels ?? []}
        onChange={(labels) => onChange({ ...given, add_labels: labels })}
        data-autofocus
      />
      <TagsInput
        label="Remove labels"
        value={given.remove_labels ?? []}
        onChange={(labels) => onChange({ ...given, remove_labels: labels })}
      />
    </>
  );
}

function ProjectField({ onChange }: { onChange: (project: string | undefined) => void }) {
  const projects = useQuery(projectsQuery);
  const names = projects.data?.filter((one) => one.role !== "viewer").map((one) => one.name);
  return (
    <Select
      label="Project"
      data={names ?? []}
      onChange={(name) => onChange(name ?? undefined)}
      openOnFocus={false}
      data-autofocus
    />
  );
}

const MOST_NAMED = 50;

function idsOf(experiments: readonly Experiment[]): number[] {
  return experiments.map((one) => one.id);
}

/** Return the preview of selected rows, by what the list knows of them. */
function localPreview(experiments: readonly Experiment[]): BulkPreview {
  const total = (count: (one: Experiment) => number) =>
    experiments.reduce((sum, one) => sum + count(one), 0);
  return {
    num_matching: experiments.length,
    experiment_ids: idsOf(experiments),
    names: experiments.slice(0, MOST_NAMED).map((one) => one.name),
    num_trials: total((one) => one.num_trials),
    num_checkpoints: total((one) => one.num_checkpoints ?? 0),
    checkpoint_bytes: total((one) => one.checkpoint_bytes ?? 0),
    num_unchanged: 0,
    refused: [],
  };
}

function namesOf({ names, experiment_ids: ids }: BulkPreview): string {
  const more = ids.length - names.length;
  return `${names.join(", ")}${more > 0 ? ` and ${more.toLocaleString("en")} more` : ""}`;
}

function lossOf(shown: BulkPreview): string {
  const checkpoints = plural(shown.num_checkpoints, "checkpoint");
  const files = shown.file_bytes ? `, ${formatBytes(shown.file_bytes)} of files` : "";
  return `${plural(shown.num_trials, "trial")} and ${checkpoints} (${formatBytes(shown.checkpoint_bytes)})${files} in all`;
}
