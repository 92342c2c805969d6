/** What can be done with an experiment; what loses something asks first and says what. */

import { ActionIcon, Button, Menu } from "@mantine/core";
import { notifications } from "@mantine/notifications";
import {
  IconArchive,
  IconArchiveOff,
  IconCopy,
  IconDots,
  IconPencil,
  IconPlayerPause,
  IconPlayerPlay,
  IconSkull,
  IconSquare,
  IconTrash,
} from "@tabler/icons-react";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useState } from "react";

import { actOnExperiment, type ExperimentAction } from "../api/actions";
import { keys } from "../api/keys";
import { problemOf } from "../api/problem";
import type { Experiment } from "../api/types";
import { allowedActions, isTerminal } from "../lib/states";
import { DeleteDialog, EditDialog, StopDialog } from "./ExperimentDialogs";
import { StarButton, WatchButton } from "./Marks";

export function ExperimentActions({ experiment }: { experiment: Experiment }) {
  const client = useQueryClient();
  const [asking, setAsking] = useState<"cancel" | "kill" | "delete" | "edit" | null>(null);
  const act = useMutation({
    mutationFn: (action: ExperimentAction) => actOnExperiment(experiment.id, action),
    onSuccess: (changed) => client.setQueryData(keys.experiment(changed.id), changed),
    onError: (error) => {
      const problem = problemOf(error);
      notifications.show({ color: "red", title: problem.title, message: problem.message });
    },
  });
  const allowed = allowedActions(experiment);
  const close = () => setAsking(null);
  return (
    <>
      <StarButton id={experiment.id} name={experiment.name} />
      {!isTerminal(experiment.state) && (
        <WatchButton kind="experiment" id={experiment.id} name={experiment.name} />
      )}
      {allowed.has("pause") && (
        <Button
          size="xs"
          variant="default"
          leftSection={<IconPlayerPause size={16} />}
          loading={act.isPending}
          onClick={() => act.mutate("pause")}
        >
          Pause
        </Button>
      )}
      {allowed.has("activate") && (
        <Button
          size="xs"
          leftSection={<IconPlayerPlay size={16} />}
          loading={act.isPending}
          onClick={() => act.mutate("activate")}
        >
          Activate
        </Button>
      )}
      <Menu position="bottom-end">
        <Menu.Target>
          <ActionIcon variant="default" size={30} aria-label="More actions">
            <IconDots size={18} />
          </ActionIcon>
        </Menu.Target>
        <Menu.Dropdown>
          <Menu.Item
            component={Link}
            to={`/new?fork=${experiment.id}`}
            leftSection={<IconCopy size={16} />}
          >
            Fork
          </Menu.Item>
          {allowed.has("cancel") && (
            <Menu.Item leftSection={<IconSquare size={16} />} onClick={() => setAsking("cancel")}>
              Cancel
            </Menu.Item>
          )}
          {allowed.has("kill") && (
            <Menu.Item leftSection={<IconSkull size={16} />} onClick={() => setAsking("kill")}>
              Kill
            </Menu.Item>
          )}
          <Menu.Item leftSection={<IconPencil size={16} />} onClick={() => setAsking("edit")}>
            Edit name and labels
          </Menu.Item>
          {allowed.has("archive") && (
            <Menu.Item
              leftSection={<IconArchive size={16} />}
              onClick={() => act.mutate("archive")}
            >
              Archive
            </Menu.Item>
          )}
          {allowed.has("unarchive") && (
            <Menu.Item
              leftSection={<IconArchiveOff size={16} />}
              onClick={() => act.mutate("unarchive")}
            >
              Unarchive
            </Menu.Item>
          )}
          {allowed.has("delete") && (
            <Menu.Item leftSection={<IconTrash size={16} />} onClick={() => setAsking("delete")}>
              Delete
            </Menu.Item>
          )}
        </Menu.Dropdown>
      </Menu>
      {(asking === "cancel" || asking === "kill") && (
        <StopDialog
          experiment={experiment}
          action={asking}
          onConfirm={() => act.mutateAsync(asking)}
          onClose={close}
        />
      )}
      {asking === "delete" && <DeleteDialog experiment={experiment} onClose={close} />}
      {asking === "edit" && <EditDialog experiment={experiment} onClose={close} />}
    </>
  );
}
