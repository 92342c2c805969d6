/** Templates and policies for configs: all see those of their projects, administrators set them. */

import { Button, Group, Select, Text, TextInput } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";
import { parse, stringify } from "yaml";

import { deleteRule, setRule } from "../api/actions";
import { keys } from "../api/keys";
import { projectsQuery, rulesQuery } from "../api/queries";
import type { ConfigRule } from "../api/types";
import { Ago } from "../components/Ago";
import { CodeView } from "../components/CodeView";
import { Confirm } from "../components/Confirm";
import { Empty, ProblemView, Waiting } from "../components/Feedback";
import { FormDialog } from "../components/FormDialog";
import { Scroll } from "../components/Scroll";
import { useTitle } from "../lib/title";
import { LabHead, useIsAdmin } from "./LabHead";

const ALL = "All projects";
const STARTS: Record<ConfigRule["kind"], string> = {
  template: "# Fields of a config, such as:\nmax_restarts: 1\n",
  policy: "# Conditions, such as:\nrequired: [labels]\nlimits:\n  resources.max_slots: {max: 8}\n",
};

export function Rules() {
  useTitle("Templates and policies");
  const rules = useQuery(rulesQuery());
  const isAdmin = useIsAdmin();
  const projects = useQuery(projectsQuery).data ?? [];
  const own = projects.filter((one) => one.role === "admin").map((one) => one.name);
  const places = [...(isAdmin ? [ALL] : []), ...own];
  const maySet = (one: ConfigRule) => places.includes(one.project ?? ALL);
  const [editing, setEditing] = useState<ConfigRule | ConfigRule["kind"] | null>(null);
  const [deleting, setDeleting] = useState<ConfigRule | null>(null);
  const client = useQueryClient();
  const refresh = () => client.invalidateQueries({ queryKey: keys.rules() });
  return (
    <>
      <LabHead
        title="Templates and policies"
        actions={
          places.length > 0 && (
            <>
              <Button size="xs" variant="default" onClick={() => setEditing("template")}>
                New template
              </Button>
              <Button size="xs" onClick={() => setEditing("policy")}>
                New policy
              </Button>
            </>
          )
        }
      />
      <Text size="sm" c="dimmed" mb="sm">
        Templates fill in what configs of new experiments leave open. Policies say what configs must
        meet, also when they change.
      </Text>
      {rules.isPending && <Waiting what="templates and policies" />}
      {rules.isError && <ProblemView error={rules.error} onRetry={() => void rules.refetch()} />}
      {rules.data?.length === 0 && (
        <Empty title="No templates or policies">Configs are taken as they are.</Empty>
      )}
      {rules.data && rules.data.length > 0 && (
        <Scroll label="Templates and policies" className="card">
          <table className="plain-table">
            <thead>
              <tr>
                <th>Name</th>
                <th>Kind</th>
                <th>Project</th>
                <th>Content</th>
                <th>Changed</th>
                <th>Change</th>
              </tr>
            </thead>
            <tbody>
              {rules.data.map((one) => (
                <tr key={nameOf(one)}>
                  <td className="setting">{one.name}</td>
                  <td className="setting">{one.kind}</td>
                  <td className="setting">{one.project ?? ALL}</td>
                  <td className="setting">{Object.keys(one.content).join(", ") || "nothing"}</td>
                  <td className="short">
                    <Ago time={one.changed_at} /> by {one.changed_by}
                  </td>
                  <td>
                    <Group gap="xs" wrap="nowrap">
                      <Button
                        size="xs"
                        variant="default"
                        aria-label={`${maySet(one) ? "Edit" : "Show"} the ${nameOf(one)}`}
                        onClick={() => setEditing(one)}
                      >
                        {maySet(one) ? "Edit" : "Show"}
                      </Button>
                      {maySet(one) && (
                        <Button
                          size="xs"
                          variant="default"
                          aria-label={`Delete the ${nameOf(one)}`}
                          onClick={() => setDeleting(one)}
                        >
                          Delete
                        </Button>
                      )}
                    </Group>
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {editing && (
        <RuleDialog
          before={typeof editing === "string" ? null : editing}
          kind={typeof editing === "string" ? editing : editing.kind}
          places={places}
          isReadOnly={typeof editing !== "string" && !maySet(editing)}
          onSaved={refresh}
          onClose={() => setEditing(null)}
        />
      )}
      {deleting && (
        <Confirm
          title={`Delete the ${nameOf(deleting)}?`}
          confirmLabel="Delete it"
          isDestructive
          onConfirm={() => deleteRule(deleting).finally(refresh)}
          onClose={() => setDeleting(null)}
        >
          <Text size="sm">Experiments that are there stay as they are.</Text>
        </Confirm>
      )}
    </>
  );
}

function nameOf({ kind, name, project }: ConfigRule): string {
  return `${kind} ${name} of ${project ?? "all projects"}`;
}

interface RuleDialogProps {
  before: ConfigRule | null;
  kind: ConfigRule["kind"];
  places: readonly string[];
  isReadOnly: boolean;
  onSaved: () => Promise<unknown>;
  onClose: () => void;
}

function RuleDialog({ before, kind, places, isReadOnly, onSaved, onClose }: RuleDialogProps) {
  const [name, setName] = useState(before?.name ?? (kind === "template" ? "default" : ""));
  const [place, setPlace] = useState(before ? (before.project ?? ALL) : (places[0] ?? ALL));
  const [text, setText] = useState(before ? stringify(before.content) : STARTS[kind]);
  const save = useMutation({
    mutationFn: async () => {
      const content: unknown = parse(text) ?? {};
      if (typeof content !== "object" || Array.isArray(content))
        throw new Error("It must be a mapping of names to values.");
      const project = place === ALL ? null : place;
      // Somebody else's change is refused: nothing is overwritten unseen.
      const revision = before?.revision ?? 0;
      await setRule({ kind, name, project }, content as Record<string, unknown>, revision);
    },
    onSuccess: onClose,
    onSettled: onSaved,
  });
  return (
    <FormDialog
      size="lg"
      title={before ? nameOf(before) : `New ${kind}`}
      {...{ save, onClose }}
      saveLabel={isReadOnly ? null : "Save"}
      cancelLabel={isReadOnly ? "Close" : undefined}
      isReady={name !== ""}
      onSave={() => save.mutate()}
    >
      {before === null && (
        <Group gap="sm" grow>
          <TextInput
            label="Name"
            required
            value={name}
            onChange={(event) => setName(event.currentTarget.value)}
            data-autofocus
          />
          <Select
            label="Project"
            data={places}
            value={place}
            allowDeselect={false}
            onChange={(value) => setPlace(value ?? place)}
          />
        </Group>
      )}
      <CodeView
        label={`The ${kind} in YAML`}
        text={text}
        language="yaml"
        height="16rem"
        {...(isReadOnly ? {} : { onChange: setText })}
      />
    </FormDialog>
  );
}
