/** Asking before something is lost. */

import { Button, Group, Modal, Stack } from "@mantine/core";
import { useMutation } from "@tanstack/react-query";
import type { ReactNode } from "react";

import { ProblemView } from "./Feedback";

interface ConfirmProps {
  title: string;
  /** What will happen, and what will be lost. */
  children: ReactNode;
  confirmLabel: string;
  cancelLabel?: string;
  isDestructive?: boolean;
  isReady?: boolean;
  onConfirm: () => Promise<unknown>;
  onClose: () => void;
}

export function Confirm(props: ConfirmProps) {
  const {
    title,
    children,
    confirmLabel,
    cancelLabel = "Keep as it is",
    isDestructive,
    isReady = true,
    onConfirm,
    onClose,
  } = props;
  const action = useMutation({ mutationFn: onConfirm, onSuccess: onClose });
  return (
    <Modal opened onClose={onClose} title={title} centered>
      <Stack>
        <div>{children}</div>
        {action.isError && <ProblemView error={action.error} />}
        <Group justify="flex-end">
          <Button variant="default" onClick={onClose} data-autofocus>
            {cancelLabel}
          </Button>
          <Button
            color={isDestructive ? "red.9" : undefined}
            loading={action.isPending}
            disabled={!isReady}
            onClick={() => action.mutate()}
          >
            {confirmLabel}
          </Button>
        </Group>
      </Stack>
    </Modal>
  );
}
