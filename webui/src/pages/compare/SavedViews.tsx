/** Saved views of comparisons: opened, saved, renamed, made the default, deleted. */

import { Button, Group, Menu, Modal, Stack, Switch, Text, TextInput } from "@mantine/core";
import { useClipboard } from "@mantine/hooks";
import { IconBookmark } from "@tabler/icons-react";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useNavigate } from "@tanstack/react-router";
import { useCallback, useEffect, useState } from "react";

import { createView, deleteView, replaceView, type ViewContent } from "../../api/actions";
import { keys } from "../../api/keys";
import { problemOf } from "../../api/problem";
import { viewsQuery } from "../../api/queries";
import type { View } from "../../api/types";
import { Confirm } from "../../components/Confirm";
import { Failure } from "../../components/Feedback";
import { FormDialog } from "../../components/FormDialog";
import type { CompareSearch } from "../../lib/search";
import { isBare, searchOf, storedSearch, textOf } from "../../lib/views";

type Dialog = "new" | "edit" | "delete" | "conflict";

export function SavedViews({ search }: { search: CompareSearch }) {
  const list = useQuery(viewsQuery);
  const clipboard = useClipboard();
  const [dialog, setDialog] = useState<Dialog | null>(null);
  const open = useOpen();
  const views = list.data ?? [];
  const current = views.find(({ id }) => id === search.saved);
  const standard = views.find((one) => one.is_default);
  const first = isBare(search) ? standard : search.version === undefined ? current : undefined;
  useEffect(() => {
    if (first !== undefined) open(first);
  }, [first, open]);
  const content = textOf(search);
  const isChanged = current !== undefined && textOf(storedSearch(current)) !== content;
  const version = search.version ?? current?.version ?? 1;
  const save = useSave((error) => {
    if (problemOf(error).code === "view_changed") setDialog("conflict");
  });
  const isOld = current !== undefined && current.version > version;
  const close = () => setDialog(null);
  const replace = (view: View, from = version) =>
    save.mutateAsync({
      id: view.id,
      body: { name: view.name, is_default: view.is_default, search: content, version: from },
    });
  return (
    <>
      {list.isSuccess && (search.saved ?? 0) > 0 && current === undefined && (
        <Text size="sm" role="status">
          This view is deleted; its address still shows it.
        </Text>
      )}
      {current !== undefined && isOld && (
        <Button size="xs" variant="default" onClick={() => open(current)}>
          Changed elsewhere: load it
        </Button>
      )}
      {current !== undefined && isChanged && (
        <Button
          size="xs"
          loading={save.isPending}
          onClick={() => void replace(current).catch(() => undefined)}
        >
          Save
        </Button>
      )}
      <Menu withinPortal position="bottom-end">
        <Menu.Target>
          <Button size="xs" variant="default" leftSection={<IconBookmark size={16} />}>
            {current === undefined ? "Views" : `${current.name}${isChanged ? " (changed)" : ""}`}
          </Button>
        </Menu.Target>
        <Menu.Dropdown mah={360} style={{ overflowY: "auto" }}>
          {views.map((view) => (
            <Menu.Item key={view.id} onClick={() => open(view, false)}>
              {view.name}
              {view.is_default && " (default)"}
            </Menu.Item>
          ))}
          {views.length > 0 && <Menu.Divider />}
          <Menu.Item onClick={() => setDialog("new")}>Save as a new view</Menu.Item>
          {current !== undefined && (
            <>
              <Menu.Item onClick={() => setDialog("edit")}>Rename or make default</Menu.Item>
              <Menu.Item
                onClick={() =>
                  clipboard.copy(`${window.location.origin}/compare?saved=${current.id}`)
                }
              >
                Copy the link
              </Menu.Item>
              <Menu.Item onClick={() => setDialog("delete")}>Delete this view</Menu.Item>
            </>
          )}
          {views.length > 0 && (
            <Menu.Item onClick={() => open(null, false)}>All runs, without a view</Menu.Item>
          )}
        </Menu.Dropdown>
      </Menu>
      {save.isError && dialog === null && problemOf(save.error).code !== "view_changed" && (
        <Failure title="Not saved" message={problemOf(save.error).message} />
      )}
      {dialog === "new" && (
        <ViewForm title="Save as a new view" content={content} onClose={close} />
      )}
      {dialog === "edit" && current !== undefined && (
        <ViewForm
          title="Edit the view"
          content={current.search}
          view={{ ...current, version }}
          onClose={close}
        />
      )}
      {dialog === "delete" && current !== undefined && (
        <DeleteView view={current} onClose={close} />
      )}
      {dialog === "conflict" && current !== undefined && (
        <Modal opened onClose={close} title="This view was changed elsewhere" centered>
          <Stack>
            <Text size="sm">
              Another window has saved {current.name} since you opened it. Nothing of yours is saved
              yet.
            </Text>
            <Group justify="flex-end">
              <Button
                variant="default"
                data-autofocus
                onClick={() => {
                  open(current);
                  close();
                }}
              >
                Load theirs
              </Button>
              <Button variant="default" onClick={() => setDialog("new")}>
                Save mine under another name
              </Button>
              <Button
                color="red.9"
                loading={save.isPending}
                onClick={() => void replace(current, current.version).then(close, () => undefined)}
              >
                Replace theirs
              </Button>
            </Group>
          </Stack>
        </Modal>
      )}
    </>
  );
}

/** Return a function that opens a view, or all runs. */
function useOpen() {
  const navigate = useNavigate();
  return useCallback(
    (view: View | null, replace = true) =>
      void navigate({
        to: "/compare",
        search: (view === null ? { saved: 0 } : searchOf(view)) as never,
        replace,
      }),
    [navigate],
  );
}

interface Saved {
  /** Null for a new view. */
  id: number | null;
  body: ViewContent & { version: number };
}

/** Save a view, and go on from its new version. */
function useSave(onError: (error: unknown) => void = () => undefined) {
  const client = useQueryClient();
  const navigate = useNavigate();
  return useMutation({
    mutationFn: ({ id, body: { version, ...content } }: Saved) =>
      id === null ? createView(content) : replaceView(id, { ...content, version }),
    onSuccess: async (view) => {
      client.setQueryData(viewsQuery.queryKey, (known = []) => [
        ...known.filter(({ id }) => id !== view.id),
        view,
      ]);
      await navigate({
        to: ".",
        search: ((before: object) => ({
          ...before,
          saved: view.id,
          version: view.version,
        })) as never,
        replace: true,
        resetScroll: false,
      });
      await client.invalidateQueries({ queryKey: keys.views() });
    },
    onError: async (error) => {
      await client.invalidateQueries({ queryKey: keys.views() });
      onError(error);
    },
  });
}

interface ViewFormProps {
  title: string;
  content: string;
  /** The view to change, null for a new one. */
  view?: View | null;
  onClose: () => void;
}

function ViewForm({ title, content, view = null, onClose }: ViewFormProps) {
  const [name, setName] = useState(view?.name ?? "");
  const [isDefault, setDefault] = useState(view?.is_default ?? false);
  const save = useSave();
  const submit = () => {
    const body = { name, search: content, is_default: isDefault, version: view?.version ?? 1 };
    save.mutate({ id: view?.id ?? null, body }, { onSuccess: onClose });
  };
  return (
    <FormDialog
      {...{ title, save, onClose }}
      saveLabel="Save the view"
      cancelLabel="Close"
      isReady={name.trim() !== ""}
      onSave={submit}
    >
      <TextInput
        label="Name"
        required
        maxLength={200}
        value={name}
        onChange={(event) => setName(event.currentTarget.value)}
        data-autofocus
      />
      <Switch
        label="Compare opens this view by default"
        checked={isDefault}
        onChange={(event) => setDefault(event.currentTarget.checked)}
      />
    </FormDialog>
  );
}

function DeleteView({ view, onClose }: { view: View; onClose: () => void }) {
  const client = useQueryClient();
  const navigate = useNavigate();
  const remove = async () => {
    await deleteView(view);
    await navigate({
      to: ".",
      search: ((before: object) => ({ ...before, saved: 0, version: undefined })) as never,
      replace: true,
    });
    await client.invalidateQueries({ queryKey: keys.views() });
  };
  return (
    <Confirm
      title={`Delete ${view.name}?`}
      confirmLabel="Delete it"
      isDestructive
      onConfirm={remove}
      onClose={onClose}
    >
      <Text size="sm">All users lose this view. The runs stay.</Text>
    </Confirm>
  );
}
