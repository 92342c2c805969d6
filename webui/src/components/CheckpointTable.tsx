/** Checkpoints with their files. */

import { Button, Group, Modal, Text, TextInput } from "@mantine/core";
import { notifications } from "@mantine/notifications";
import { useQueryClient } from "@tanstack/react-query";
import { useMemo, useState } from "react";

import { deleteCheckpoint } from "../api/actions";
import { keys } from "../api/keys";
import { registerCheckpoint } from "../api/models";
import type { Checkpoint } from "../api/types";
import { formatBytes, formatNumber, plural, toNumber } from "../lib/numbers";
import { Ago } from "./Ago";
import { Confirm } from "./Confirm";
import { type Column, DataTable } from "./DataTable";
import { CopyText } from "./Feedback";
import { LinkButton, LinkText } from "./links";
import { Scroll } from "./Scroll";
import { StateBadge } from "./StateBadge";

interface CheckpointTableProps {
  checkpoints: readonly Checkpoint[];
  /** Null where nothing says which metric matters. */
  metric: string | null;
  hasTrials?: boolean;
}

export function CheckpointTable({ checkpoints, metric, hasTrials }: CheckpointTableProps) {
  const [opened, setOpened] = useState<Checkpoint | null>(null);
  const [deleting, setDeleting] = useState<Checkpoint | null>(null);
  const [named, setNamed] = useState<Checkpoint | null>(null);
  const client = useQueryClient();
  const columns = useMemo(
    () => columnsFor(metric, hasTrials === true, setOpened),
    [metric, hasTrials],
  );
  return (
    <>
      <DataTable
        label="Checkpoints"
        rows={checkpoints}
        columns={columns}
        rowId={(one) => one.uuid}
      />
      {opened && (
        <Details
          checkpoint={opened}
          onClose={() => setOpened(null)}
          onDelete={() => {
            setDeleting(opened);
            setOpened(null);
          }}
          onName={() => {
            setNamed(opened);
            setOpened(null);
          }}
        />
      )}
      {named && <NameDialog checkpoint={named} onClose={() => setNamed(null)} />}
      {deleting && (
        <Confirm
          title="Delete this checkpoint?"
          confirmLabel="Delete it"
          isDestructive
          onConfirm={async () => {
            await deleteCheckpoint(deleting.uuid);
            await client.invalidateQueries({ queryKey: ["checkpoints"] });
          }}
          onClose={() => setDeleting(null)}
        >
          <Text size="sm">
            Its {plural(Object.keys(deleting.resources).length, "file")} (
            {formatBytes(deleting.size)}) at batch {formatNumber(deleting.steps_completed)} of trial{" "}
            {deleting.trial_id} go for good. Nothing can start from it any more; it stays listed as
            deleted.
          </Text>
        </Confirm>
      )}
    </>
  );
}

function columnsFor(
  metric: string | null,
  hasTrials: boolean,
  onOpen: (checkpoint: Checkpoint) => void,
): Column<Checkpoint>[] {
  const ofTrial: Column<Checkpoint> = {
    id: "trial",
    title: "Trial",
    width: 70,
    cell: (one) => (
      <LinkText to="/trials/$id" params={{ id: one.trial_id }} size="sm">
        {one.trial_id}
      </LinkText>
    ),
  };
  const ofMetric: Column<Checkpoint> = {
    id: "metric",
    title: metric ?? "",
    width: 118,
    isNumeric: true,
    cell: (one) => formatNumber(toNumber(one.metric)),
  };
  return [
    ...(hasTrials ? [ofTrial] : []),
    {
      id: "steps",
      title: "Batches",
      width: 100,
      isNumeric: true,
      cell: (one) => formatNumber(one.steps_completed),
    },
    ...(metric === null ? [] : [ofMetric]),
    { id: "state", title: "State", width: 120, cell: (one) => <StateBadge state={one.state} /> },
    {
      id: "size",
      title: "Size",
      width: 100,
      isNumeric: true,
      cell: (one) => formatBytes(one.size),
    },
    {
      id: "stored",
      title: "Stored",
      width: 105,
      cell: (one) => <Ago time={one.created_at} isShort />,
    },
    {
      id: "uuid",
      title: "UUID",
      width: 330,
      doesGrow: true,
      cell: (one) => (
        <Group gap={4} wrap="nowrap">
          <span className="mono">{one.uuid}</span>
          <CopyText text={one.uuid} label="Copy the UUID" />
        </Group>
      ),
    },
    {
      id: "files",
      title: "Files",
      width: 85,
      cell: (one) => (
        <Button size="compact-xs" variant="default" onClick={() => onOpen(one)}>
          {plural(Object.keys(one.resources).length, "file")}
        </Button>
      ),
    },
  ];
}

interface DetailsProps {
  checkpoint: Checkpoint;
  onClose: () => void;
  onDelete: () => void;
  onName: () => void;
}

function NameDialog({ checkpoint, onClose }: { checkpoint: Checkpoint; onClose: () => void }) {
  const [name, setName] = useState("");
  const client = useQueryClient();
  return (
    <Confirm
      title="Register as a model"
      confirmLabel="Register"
      isReady={name.trim() !== ""}
      onConfirm={async () => {
        const made = await registerCheckpoint(name.trim(), checkpoint.uuid);
        await client.invalidateQueries({ queryKey: keys.models() });
        await client.invalidateQueries({ queryKey: keys.model(made.name) });
        notifications.show({ message: `It is version ${made.version} of ${made.name}.` });
      }}
      onClose={onClose}
    >
      <TextInput
        label="Name of the model"
        description="The checkpoint is its next version, and is kept from deletion."
        required
        value={name}
        onChange={(event) => setName(event.currentTarget.value)}
      />
    </Confirm>
  );
}

function Details({ checkpoint, onClose, onDelete, onName }: DetailsProps) {
  const isThere = checkpoint.state !== "DELETED";
  return (
    <Modal
      opened
      onClose={onClose}
      title={`Checkpoint at batch ${formatNumber(checkpoint.steps_completed)}`}
      size="lg"
    >
      <Group gap={4} wrap="nowrap">
        <span className="mono wrap-anywhere">{checkpoint.uuid}</span>
        <CopyText text={checkpoint.uuid} label="Copy the UUID" />
      </Group>
      <Text size="sm" c="dimmed" className="wrap-anywhere" my="xs">
        In {checkpoint.storage}, by attempt {checkpoint.attempt}
      </Text>
      <Scroll label="Files">
        <table className="plain-table">
          <thead>
            <tr>
              <th>File</th>
              <th className="number">Size</th>
            </tr>
          </thead>
          <tbody>
            {Object.entries(checkpoint.resources).map(([path, size]) => (
              <tr key={path}>
                <td className="mono wrap-anywhere">
                  {isThere && !path.endsWith("/") ? (
                    <a href={fileAddress(checkpoint.uuid, path)} download>
                      {path}
                    </a>
                  ) : (
                    path
                  )}
                </td>
                <td className="number">{formatBytes(size)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
      <Text size="sm" fw={600} mt="md">
        Metadata
      </Text>
      <pre className="mono wrap-anywhere" style={{ whiteSpace: "pre-wrap", margin: "4px 0 12px" }}>
        {JSON.stringify(checkpoint.metadata, null, 2)}
      </pre>
      {isThere && (
        <Group justify="flex-end">
          <LinkButton
            to="/new"
            search={{ trial: checkpoint.trial_id, checkpoint: checkpoint.uuid } as never}
            variant="default"
          >
            Fork from here
          </LinkButton>
          <Button variant="default" onClick={onName}>
            Register as a model
          </Button>
          <Button variant="default" c="var(--state-failed)" onClick={onDelete}>
            Delete
          </Button>
        </Group>
      )}
    </Modal>
  );
}

function fileAddress(uuid: string, path: string): string {
  const parts = path.split("/").map(encodeURIComponent).join("/");
  return `/api/v1/checkpoints/${encodeURIComponent(uuid)}/files/${parts}`;
}
