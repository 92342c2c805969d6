/** A dialog in which one fills something in. */

import { Button, Group, Modal, type ModalProps, Stack } from "@mantine/core";
import type { UseMutationResult } from "@tanstack/react-query";
import type { ReactNode } from "react";

import { ProblemView } from "./Feedback";

interface FormDialogProps {
  title: string;
  size?: ModalProps["size"];
  /** What saves it, and whose error is shown. */
  save: Pick<UseMutationResult, "isPending" | "isError" | "error">;
  /** None where one may only read. */
  saveLabel: string | null;
  cancelLabel?: string;
  isReady?: boolean;
  /** Whether the fields tell of the error themselves. */
  hidesError?: boolean;
  onSave: () => void;
  onClose: () => void;
  children: ReactNode;
}

export function FormDialog(props: FormDialogProps) {
  const { title, size, save, saveLabel, isReady = true, hidesError, onSave, onClose } = props;
  return (
    <Modal opened centered size={size} onClose={onClose} title={title}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          onSave();
        }}
      >
        <Stack gap="sm">
          {props.children}
          {save.isError && !hidesError && <ProblemView error={save.error} />}
          <Group justify="flex-end">
            <Button variant="default" onClick={onClose}>
              {props.cancelLabel ?? "Keep as it is"}
            </Button>
            {saveLabel !== null && (
              <Button type="submit" loading={save.isPending} disabled={!isReady}>
                {saveLabel}
              </Button>
            )}
          </Group>
        </Stack>
      </form>
    </Modal>
  );
}
