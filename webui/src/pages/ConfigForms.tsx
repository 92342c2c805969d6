/** Beside the config: the directory to upload, and one hyperparameter to change in a form. */

import { Button, Group, Select, Text, TextInput } from "@mantine/core";
import { type ChangeEvent, type FormEvent, useId, useRef, useState } from "react";
import { isMap, isScalar, parse, parseDocument } from "yaml";

import { CHOICES_SHOWN } from "../charts/ChartControls";
import type { Experiment, Trial } from "../api/types";
import { formatBytes, plural } from "../lib/numbers";
import { type CodeFile, filesOf } from "../lib/packCode";

/** Return the paths of the single values of a config's hyperparameters. */
export function valuesOf(text: string): Map<string, string> {
  const found = new Map<string, string>();
  const walk = (node: unknown, path: string) => {
    if (isScalar(node)) found.set(path, String(node.value));
    if (isMap(node))
      for (const { key, value } of node.items)
        if (isScalar(key))
          walk(value, path === "" ? String(key.value) : `${path}.${String(key.value)}`);
  };
  walk(parseDocument(text).get("hyperparameters"), "");
  return found;
}

/** Return a config with one hyperparameter changed; all else stays as it is written. */
export function withValue(text: string, name: string, typed: string): string {
  const document = parseDocument(text);
  document.setIn(["hyperparameters", ...name.split(".")], parse(typed));
  return document.toString({ lineWidth: 0 });
}

/** Return the config of an experiment of one trial that begins from a checkpoint of another trial. */
export function configFrom(
  resolved: string,
  { name, metric, smaller_is_better }: Pick<Experiment, "name" | "metric" | "smaller_is_better">,
  { hparams }: Pick<Trial, "hparams">,
  checkpoint: string,
): string {
  const document = parseDocument(resolved);
  document.set("name", `${name} (from ${checkpoint.slice(0, 8)})`);
  document.set("hyperparameters", document.createNode(hparams));
  const searcher = {
    name: "single",
    metric,
    smaller_is_better,
    source_checkpoint_uuid: checkpoint,
  };
  document.set("searcher", document.createNode(searcher));
  return document.toString({ lineWidth: 0 });
}

interface ValueFormProps {
  text: string;
  onChange: (text: string) => void;
}

/** A form that changes a hyperparameter in the config below it. */
export function ValueForm({ text, onChange }: ValueFormProps) {
  const values = valuesOf(text);
  const [chosen, setName] = useState<string | null>(null);
  const [changed, setTyped] = useState<string | null>(null);
  if (values.size === 0) return null;
  // Nobody has to choose the only one.
  const only = values.size === 1 ? [...values.keys()][0] : undefined;
  const name = chosen ?? only ?? null;
  const typed = changed ?? values.get(name ?? "") ?? "";
  const submit = (event: FormEvent) => {
    event.preventDefault();
    if (name !== null && typed.trim() !== "") onChange(withValue(text, name, typed));
  };
  return (
    <form onSubmit={submit}>
      <Group align="end" gap="xs">
        <Select
          label="Hyperparameter"
          placeholder="Which one"
          size="xs"
          searchable
          limit={CHOICES_SHOWN}
          data={[...values.keys()]}
          value={name}
          allowDeselect={false}
          onChange={(chosen) => {
            setName(chosen);
            setTyped(null);
          }}
        />
        <TextInput
          label="Value"
          size="xs"
          disabled={name === null}
          value={typed}
          onChange={(event) => setTyped(event.currentTarget.value)}
        />
        <Button type="submit" size="xs" variant="default" disabled={typed.trim() === ""}>
          Change it
        </Button>
      </Group>
    </form>
  );
}

interface CodeChoiceProps {
  files: readonly CodeFile[] | null;
  onChange: (files: CodeFile[] | null) => void;
}

/** Choosing the directory whose files are uploaded as the code. */
export function CodeChoice({ files, onChange }: CodeChoiceProps) {
  const input = useRef<HTMLInputElement>(null);
  const id = useId();
  const choose = ({ currentTarget }: ChangeEvent<HTMLInputElement>) => {
    const found = filesOf([...(currentTarget.files ?? [])]);
    onChange(found.length > 0 ? found : null);
  };
  const bytes = (files ?? []).reduce((sum, { content }) => sum + content.size, 0);
  return (
    <Group gap="xs">
      <label htmlFor={id} hidden>
        Directory of the code
      </label>
      <input
        id={id}
        ref={input}
        type="file"
        hidden
        multiple
        // React's types do not know it; all browsers do.
        {...{ webkitdirectory: "" }}
        onChange={choose}
      />
      <Button size="xs" variant="default" onClick={() => input.current?.click()}>
        {files ? "Choose another directory" : "Upload a directory"}
      </Button>
      {files && (
        <Button size="xs" variant="subtle" onClick={() => onChange(null)}>
          Without code
        </Button>
      )}
      <Text size="sm" c="dimmed" role="status">
        {files && `${plural(files.length, "file")}, ${formatBytes(bytes)}, are sent with it`}
      </Text>
    </Group>
  );
}
