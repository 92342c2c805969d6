/** What can be done with an experiment; what loses something asks first and says what. */

import { ActionIcon, Button, Menu, Text } from "@mantine/core";
import { notifications } from "@mantine/notifications";
import {
  IconCopy,
  IconDots,
  IconPlayerPause,
  IconPlayerPlay,
  IconSkull,
  IconSquare,
} from "@tabler/icons-react";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { Link } from "@tanstack/react-router";
import { useState } from "react";

import { actOnExperiment, type ExperimentAction } from "../api/actions";
import { keys } from "../api/keys";
import { problemOf } from "../api/problem";
import type { Experiment } from "../api/types";
import { plural } from "../lib/numbers";
import { allowedActions } from "../lib/states";
import { Confirm } from "./Confirm";

export function ExperimentActions({ experiment }: { experiment: Experiment }) {
  const client = useQueryClient();
  const [asking, setAsking] = useState<"cancel" | "kill" | null>(null);
  const act = useMutation({
    mutationFn: (action: ExperimentAction) => actOnExperiment(experiment.id, action),
    onSuccess: (changed) => client.setQueryData(keys.experiment(changed.id), changed),
    onError: (error) => {
      const problem = problemOf(error);
      notifications.show({ color: "red", title: problem.title, message: problem.message });
    },
  });
  const allowed = allowedActions(experiment);
  return (
    <>
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
        </Menu.Dropdown>
      </Menu>
      {asking && (
        <StopDialog
          experiment={experiment}
          action={asking}
          onConfirm={() => act.mutateAsync(asking)}
          onClose={() => setAsking(null)}
        />
      )}
    </>
  );
}

interface StopDialogProps {
  experiment: Experiment;
  action: "cancel" | "kill";
  onConfirm: () => Promise<unknown>;
  onClose: () => void;
}

function StopDialog({ experiment, action, onConfirm, onClose }: StopDialogProps) {
  const running = plural(experiment.num_running, "running trial");
  const isKill = action === "kill";
  return (
    <Confirm
      title={`${isKill ? "Kill" : "Cancel"} ${experiment.name}?`}
      confirmLabel={isKill ? "Kill it" : "Cancel it"}
      isDestructive
      onConfirm={onConfirm}
      onClose={onClose}
    >
      <Text size="sm">
        {isKill
          ? `Ends ${running} at once: what was trained since the last checkpoint of each is lost.`
          : `Asks ${running} to store a checkpoint and end; the search starts no further trials.`}
      </Text>
      <Text size="sm" mt="xs">
        Metrics, logs and stored checkpoints stay.
      </Text>
    </Confirm>
  );
}
