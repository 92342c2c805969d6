/** Registered models: their versions, where each came from, and which an alias means. */

import { Button, Group, Modal, Stack, Text, Textarea, TextInput, Title } from "@mantine/core";
import { useInfiniteQuery, useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useNavigate, useParams } from "@tanstack/react-router";
import { type ReactNode, useState } from "react";

import { keys } from "../api/keys";
import {
  checkpointOf,
  deleteModel,
  deleteVersion,
  modelFilesQuery,
  modelQuery,
  modelsQuery,
  type ModelVersion,
  type RegisteredModel,
  removeAlias,
  setAlias,
  setModelNotes,
  setVersionNotes,
} from "../api/models";
import { checkpointQuery } from "../api/queries";
import { Ago } from "../components/Ago";
import { Confirm } from "../components/Confirm";
import { Command, Empty, ProblemView, Waiting } from "../components/Feedback";
import { FormDialog } from "../components/FormDialog";
import { LinkText } from "../components/links";
import { PageHead } from "../components/PageHead";
import { Scroll } from "../components/Scroll";
import { formatBytes, formatNumber, plural } from "../lib/numbers";
import { useTitle } from "../lib/title";

export function Models() {
  useTitle("Models");
  const list = useInfiniteQuery(modelsQuery);
  const models = list.data?.pages.flatMap((page) => page.registered_models) ?? [];
  return (
    <>
      <PageHead title="Models" />
      {list.isPending && <Waiting what="models" />}
      {list.isError && <ProblemView error={list.error} onRetry={() => void list.refetch()} />}
      {list.isSuccess && models.length === 0 && (
        <Empty title="No models yet" command="paceline model register NAME UUID">
          A checkpoint, or a model that an MLflow client has logged, gets a name:
        </Empty>
      )}
      {models.length > 0 && (
        <Scroll label="Models" className="card">
          <table className="plain-table">
            <thead>
              <tr>
                <th>Name</th>
                <th className="number">Newest</th>
                <th>Aliases</th>
                <th>Changed</th>
                <th>Notes</th>
              </tr>
            </thead>
            <tbody>
              {models.map((one) => (
                <tr key={one.name}>
                  <td className="setting">
                    <LinkText to="/models/$name" params={{ name: one.name }}>
                      {one.name}
                    </LinkText>
                  </td>
                  <td className="number">{newestOf(one)}</td>
                  <td className="setting">{aliasesOf(one)}</td>
                  <td className="short">
                    <Ago time={one.last_updated_timestamp / 1000} isShort />
                  </td>
                  <td className="prose">{firstLine(one.description)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {list.hasNextPage && (
        <Button
          mt="sm"
          size="xs"
          variant="default"
          loading={list.isFetchingNextPage}
          onClick={() => void list.fetchNextPage()}
        >
          Show more
        </Button>
      )}
    </>
  );
}

function newestOf({ latest_versions: versions }: RegisteredModel): string {
  const newest = Math.max(0, ...versions.map((one) => Number(one.version)));
  return newest > 0 ? String(newest) : "–";
}

function aliasesOf({ aliases }: RegisteredModel): string {
  return aliases.map(({ alias, version }) => `${alias} = ${version}`).join(", ");
}

function firstLine(text: string): string {
  return text.split("\n", 1)[0] ?? "";
}

type Asked =
  | { what: "promote" | "files" | "delete" | "notes"; version: ModelVersion }
  | { what: "model-notes" | "delete-model" };

export function ModelPage() {
  const { name } = useParams({ from: "/models/$name" });
  useTitle(name);
  const found = useQuery(modelQuery(name));
  const client = useQueryClient();
  const navigate = useNavigate();
  const [asked, setAsked] = useState<Asked | null>(null);
  const close = () => setAsked(null);
  const refresh = () =>
    Promise.all([
      client.invalidateQueries({ queryKey: keys.model(name) }),
      client.invalidateQueries({ queryKey: keys.models() }),
    ]);
  const above = <LinkText to="/models">Models</LinkText>;
  if (found.isPending) return <Waiting what="the model" />;
  if (found.isError)
    return (
      <>
        <PageHead title={name} above={above} />
        <ProblemView error={found.error} onRetry={() => void found.refetch()} />
      </>
    );
  const { model, versions } = found.data;
  return (
    <>
      <PageHead
        title={name}
        above={above}
        actions={
          <>
            <Button size="xs" variant="default" onClick={() => setAsked({ what: "model-notes" })}>
              Edit notes
            </Button>
            <Button size="xs" variant="default" onClick={() => setAsked({ what: "delete-model" })}>
              Delete
            </Button>
          </>
        }
      />
      <Stack gap="md">
        {model.description !== "" && <Notes text={model.description} />}
        <Text size="sm" component="div">
          Download the newest by its name: <Command text={downloadCommand(name)} />
        </Text>
        <Title order={2}>Versions</Title>
        {versions.length === 0 ? (
          <Text size="sm" c="dimmed">
            It has none.
          </Text>
        ) : (
          <Versions versions={versions} onAsk={setAsked} onChanged={refresh} />
        )}
      </Stack>
      {asked?.what === "promote" && (
        <PromoteDialog version={asked.version} onDone={refresh} onClose={close} />
      )}
      {asked?.what === "files" && <FilesDialog version={asked.version} onClose={close} />}
      {asked?.what === "notes" && (
        <NotesDialog
          title={`Notes of version ${asked.version.version}`}
          before={asked.version.description}
          save={(text) => setVersionNotes(name, asked.version.version, text).finally(refresh)}
          onClose={close}
        />
      )}
      {asked?.what === "model-notes" && (
        <NotesDialog
          title={`Notes of ${name}`}
          before={model.description}
          save={(text) => setModelNotes(name, text).finally(refresh)}
          onClose={close}
        />
      )}
      {asked?.what === "delete" && (
        <Confirm
          title={`Delete version ${asked.version.version}?`}
          confirmLabel="Delete it"
          isDestructive
          onConfirm={() => deleteVersion(name, asked.version.version).finally(refresh)}
          onClose={close}
        >
          <Text size="sm">
            Its aliases go too. The files stay; nothing keeps its checkpoint any longer.
          </Text>
        </Confirm>
      )}
      {asked?.what === "delete-model" && (
        <Confirm
          title={`Delete ${name}?`}
          confirmLabel="Delete it"
          isDestructive
          onConfirm={async () => {
            await deleteModel(name);
            await navigate({ to: "/models" });
            client.removeQueries({ queryKey: keys.model(name) });
            await client.invalidateQueries({ queryKey: keys.models() });
          }}
          onClose={close}
        >
          <Text size="sm">
            The name goes with {plural(versions.length, "version")}. Files and checkpoints stay.
          </Text>
        </Confirm>
      )}
    </>
  );
}

/** Return the command that downloads a model, with what a shell would take for its own quoted. */
export function downloadCommand(name: string): string {
  const quoted = /^[\w.@+-]+$/.test(name) ? name : `'${name.replaceAll("'", `'\\''`)}'`;
  return `paceline model download ${quoted}`;
}

function Notes({ text }: { text: string }) {
  return (
    <Text size="sm" className="wrap-anywhere" style={{ whiteSpace: "pre-wrap" }}>
      {text}
    </Text>
  );
}

interface VersionsProps {
  versions: readonly ModelVersion[];
  onAsk: (asked: Asked) => void;
  onChanged: () => Promise<unknown>;
}

function Versions({ versions, onAsk, onChanged }: VersionsProps) {
  const remove = useMutation({
    mutationFn: ({ name, alias }: { name: string; alias: string }) => removeAlias(name, alias),
    onSettled: onChanged,
  });
  const action = (label: string, what: "promote" | "files" | "notes" | "delete") =>
    function Action(version: ModelVersion): ReactNode {
      return (
        <Button
          size="compact-xs"
          variant="default"
          aria-label={`${label}: version ${version.version}`}
          onClick={() => onAsk({ what, version })}
        >
          {label}
        </Button>
      );
    };
  const actions = [
    action("Set alias", "promote"),
    action("Files", "files"),
    action("Notes", "notes"),
    action("Delete", "delete"),
  ];
  return (
    <>
      {remove.isError && <ProblemView error={remove.error} />}
      <Scroll label="Versions" className="card">
        <table className="plain-table">
          <thead>
            <tr>
              <th className="number">Version</th>
              <th>Aliases</th>
              <th>Source</th>
              <th>Owner</th>
              <th>Created</th>
              <th>Notes</th>
              <th>Change</th>
            </tr>
          </thead>
          <tbody>
            {versions.map((one) => (
              <tr key={one.version}>
                <td className="number">{one.version}</td>
                <td className="setting">
                  {one.aliases.map((alias) => (
                    <Group key={alias} gap={4} wrap="nowrap">
                      <span>{alias}</span>
                      <Button
                        size="compact-xs"
                        variant="subtle"
                        color="gray"
                        c="var(--mantine-color-text)"
                        aria-label={`Remove the alias ${alias}`}
                        onClick={() => remove.mutate({ name: one.name, alias })}
                      >
                        ×
                      </Button>
                    </Group>
                  ))}
                </td>
                <td className="setting">
                  <Source version={one} />
                </td>
                <td className="setting">{one.user_id}</td>
                <td className="short">
                  <Ago time={one.creation_timestamp / 1000} isShort />
                </td>
                <td className="prose">{firstLine(one.description)}</td>
                <td>
                  <Group gap="xs" wrap="nowrap">
                    {actions.map((Shown, index) => (
                      <span key={index}>{Shown(one)}</span>
                    ))}
                  </Group>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </>
  );
}

function Source({ version }: { version: ModelVersion }) {
  const uuid = checkpointOf(version);
  const { data: found } = useQuery({ ...checkpointQuery(uuid ?? ""), enabled: uuid !== null });
  if (uuid === null) return version.source;
  return (
    <>
      checkpoint {uuid.slice(0, 8)}
      {found && (
        <>
          {" of "}
          <LinkText to="/trials/$id/checkpoints" params={{ id: found.trial_id }} underline="always">
            trial {found.trial_id}
          </LinkText>
          {`, batch ${formatNumber(found.steps_completed)}`}
        </>
      )}
    </>
  );
}

interface DialogProps {
  version: ModelVersion;
  onClose: () => void;
}

function PromoteDialog({
  version,
  onDone,
  onClose,
}: DialogProps & { onDone: () => Promise<unknown> }) {
  const [alias, setName] = useState("champion");
  const save = useMutation({
    mutationFn: () => setAlias(version.name, alias, version.version),
    onSuccess: onClose,
    onSettled: onDone,
  });
  return (
    <FormDialog
      title={`Set an alias to version ${version.version}`}
      {...{ save, onClose }}
      saveLabel="Set"
      onSave={() => save.mutate()}
    >
      <TextInput
        label="Alias"
        description="It means this version from now on, and no other."
        required
        value={alias}
        onChange={(event) => setName(event.currentTarget.value)}
        data-autofocus
      />
    </FormDialog>
  );
}

interface NotesDialogProps {
  title: string;
  before: string;
  save: (text: string) => Promise<unknown>;
  onClose: () => void;
}

function NotesDialog({ title, before, save, onClose }: NotesDialogProps) {
  const [text, setText] = useState(before);
  return (
    <Confirm
      title={title}
      confirmLabel="Save"
      isReady={text !== before}
      onConfirm={() => save(text)}
      onClose={onClose}
    >
      <Textarea
        label="Notes"
        autosize
        minRows={3}
        maxRows={12}
        value={text}
        onChange={(event) => setText(event.currentTarget.value)}
      />
    </Confirm>
  );
}

function FilesDialog({ version, onClose }: DialogProps) {
  const files = useQuery(modelFilesQuery(version));
  return (
    <Modal opened onClose={onClose} title={`Files of version ${version.version}`} size="lg">
      {files.isPending && <Waiting what="files" />}
      {files.isError && <ProblemView error={files.error} />}
      {files.data?.length === 0 && <Text size="sm">It has no files.</Text>}
      {files.data && files.data.length > 0 && (
        <Scroll label="Files">
          <table className="plain-table">
            <thead>
              <tr>
                <th>File</th>
                <th className="number">Size</th>
              </tr>
            </thead>
            <tbody>
              {files.data.map(({ path, address, size }) => (
                <tr key={path}>
                  <td className="mono wrap-anywhere">
                    <a href={address} download>
                      {path}
                    </a>
                  </td>
                  <td className="number">{size === null ? "–" : formatBytes(size)}</td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
    </Modal>
  );
}
