import { Alert, Button, Group, Select, Stack, Switch, Text } from "@mantine/core";
import { useDebouncedValue } from "@mantine/hooks";
import { useMutation, useQuery } from "@tanstack/react-query";
import { useBlocker, useNavigate, useSearch } from "@tanstack/react-router";
import { useMemo, useState } from "react";
import { parse } from "yaml";

import {
  checkConfig,
  continueTrial,
  createExperiment,
  forkExperiment,
  type Placement,
  previewSearch,
} from "../api/actions";
import {
  configQuery,
  experimentQuery,
  projectsQuery,
  rulesQuery,
  schemaQuery,
  trialQuery,
} from "../api/queries";
import type { Experiment } from "../api/types";
import { CodeView } from "../components/CodeView";
import { Command, ProblemView, Quoted, Waiting, Warnings } from "../components/Feedback";
import { PageHead } from "../components/PageHead";
import type { CodeFile } from "../lib/packCode";
import { completeConfig, type Schema } from "../lib/configCompletion";
import { formatLength, plural } from "../lib/numbers";
import { useTitle } from "../lib/title";
import { CodeChoice, configFrom, ValueForm } from "./ConfigForms";

/** Goes once code is uploaded. */
const PLACE = `environment:
  # Where the code is, on the machine that trains.
  working_dir: /path/to/code
`;
const TEMPLATE = `name: my-experiment
entrypoint: python3 train.py
hyperparameters:
  learning_rate: 0.001
searcher:
  name: single
  metric: validation_loss
  smaller_is_better: true
${PLACE}`;
const CHANGES = `# For example:
# hyperparameters:
#   learning_rate: 0.0001
`;
const CHECK_DELAY_MS = 400;

interface Origin {
  title: string;
  text: string;
  hint: string;
  create: (
    config: Record<string, unknown>,
    text: string,
    activate: boolean,
    code: CodeFile[] | null,
    placement: Placement,
  ) => Promise<Experiment>;
}

export function NewExperiment() {
  const { fork, trial: trialId, checkpoint } = useSearch({ from: "/new" });
  useTitle("New experiment");
  const trial = useQuery({ ...trialQuery(trialId ?? 0), enabled: trialId !== undefined });
  const source = fork ?? trial.data?.experiment_id;
  const config = useQuery({ ...configQuery(source ?? 0), enabled: source !== undefined });
  const original = useQuery({
    ...experimentQuery(source ?? 0),
    enabled: source !== undefined,
  }).data;
  const failed = trial.isError ? trial.error : config.isError ? config.error : null;
  if (failed !== null) return <ProblemView error={failed} />;
  if (trialId !== undefined && checkpoint !== undefined)
    return config.data && original && trial.data ? (
      <Editor
        origin={{
          title: `Fork trial ${trialId}`,
          text: configFrom(config.data.resolved_yaml, original, trial.data, checkpoint),
          hint: "A new experiment with the trial's hyperparameters and code. It begins with the weights of the checkpoint, and counts its batches from 0.",
          create: (wanted, text, activate) => forkExperiment(original.id, wanted, text, activate),
        }}
      />
    ) : (
      <Waiting what={`trial ${trialId}`} />
    );
  if (trialId !== undefined)
    return config.data ? (
      <Editor
        origin={{
          title: `Continue trial ${trialId}`,
          text: CHANGES,
          hint: "Fields to change of the trial's config, in YAML; the rest stays. It starts from the trial's latest checkpoint.",
          create: (changes, _, activate) => continueTrial(trialId, changes, activate),
        }}
        isPartial
      />
    ) : (
      <Waiting />
    );
  if (fork !== undefined)
    return config.data ? (
      <Editor
        origin={{
          title: `Fork experiment ${fork}`,
          text: config.data.submitted ?? config.data.resolved_yaml,
          hint: original?.is_unmanaged
            ? "The code of a run made without a master is not here: name its directory as environment.working_dir."
            : "A new experiment with the same code and the config below.",
          create: (wanted, text, activate) => forkExperiment(fork, wanted, text, activate),
        }}
      />
    ) : (
      <Waiting what={`experiment ${fork}`} />
    );
  return (
    <Editor
      origin={{
        title: "New experiment",
        text: TEMPLATE,
        hint: "Upload the directory of your code, name one on the machine that trains, or use the command line.",
        create: createExperiment,
      }}
      takesCode
      command="paceline experiment create config.yaml ."
    />
  );
}

interface EditorProps {
  origin: Origin;
  /** Only changes of a config, which cannot be checked alone. */
  isPartial?: boolean;
  takesCode?: boolean;
  command?: string;
}

function Editor({ origin, isPartial, takesCode, command }: EditorProps) {
  const navigate = useNavigate();
  const [text, setText] = useState(origin.text);
  const [code, setCode] = useState<CodeFile[] | null>(null);
  const [isPaused, setPaused] = useState(false);
  const [placement, setPlacement] = useState<Placement>({});
  const [checkedText] = useDebouncedValue(text, CHECK_DELAY_MS);
  const schema = useQuery(schemaQuery).data;
  const complete = useMemo(() => schema && completeConfig(schema as Schema), [schema]);
  const chooseCode = (files: CodeFile[] | null) => {
    setCode(files);
    if (files) setText(text.replace(PLACE, ""));
  };
  const check = useQuery({
    queryKey: ["check", checkedText, placement],
    queryFn: () => checkConfig(checkedText, placement),
    enabled: !isPartial,
    gcTime: 10_000,
  });
  const found = check.data?.problems;
  const problems = useMemo(
    () => (found ?? []).toSorted((a, b) => (a.line ?? 0) - (b.line ?? 0)),
    [found],
  );
  const config = problems.length === 0 ? (check.data?.resolved ?? null) : null;
  const create = useMutation({
    mutationFn: () => {
      const wanted: unknown = parse(text) ?? (isPartial ? {} : null);
      if (typeof wanted !== "object" || wanted === null)
        throw new Error("A config must be a mapping of names to values.");
      return origin.create(wanted as Record<string, unknown>, text, !isPaused, code, placement);
    },
    onSuccess: (created) => navigate({ to: "/experiments/$id", params: { id: created.id } }),
  });
  useBlocker({
    shouldBlockFn: () =>
      text !== origin.text && create.isIdle && !window.confirm("Leave, and lose what you typed?"),
    enableBeforeUnload: () => text !== origin.text && create.isIdle,
  });
  return (
    <Stack maw={900}>
      <PageHead title={origin.title} />
      <Text size="sm" c="dimmed" component="div">
        {origin.hint} {command && <Command text={command} />}
      </Text>
      {takesCode && <PlacementChoice placement={placement} onChange={setPlacement} />}
      {takesCode && <CodeChoice files={code} onChange={chooseCode} />}
      {!takesCode && !isPartial && <ValueForm text={text} onChange={setText} />}
      <CodeView
        label="Config in YAML"
        text={text}
        language="yaml"
        onChange={setText}
        complete={complete}
        problems={problems}
        height="var(--editor-height)"
      />
      {check.isError && <ProblemView error={check.error} />}
      <div role="status">
        {problems.length > 0 && (
          <Alert
            color="red"
            variant="outline"
            styles={{ title: { color: "var(--state-failed)" } }}
            title="The config is not valid yet"
          >
            <ul style={{ margin: 0, paddingLeft: 18 }}>
              {problems.map((problem, i) => (
                <li key={i} className="wrap-anywhere">
                  {problem.line ? `Line ${problem.line}: ` : ""}
                  <Quoted text={problem.message} />
                </li>
              ))}
            </ul>
          </Alert>
        )}
        {config !== null && <Preview config={config} />}
        {config !== null && <Filled fields={check.data?.filled ?? {}} />}
        <Warnings messages={check.data?.warnings ?? []} />
      </div>
      {create.isError && <ProblemView error={create.error} />}
      <Group>
        <Button
          loading={create.isPending}
          disabled={!isPartial && (problems.length > 0 || checkedText !== text || !check.isSuccess)}
          onClick={() => create.mutate()}
        >
          {isPaused ? "Create, paused" : "Create and start"}
        </Button>
        <Switch
          label="Do not start yet"
          checked={isPaused}
          onChange={(event) => setPaused(event.currentTarget.checked)}
        />
      </Group>
    </Stack>
  );
}

interface PlacementChoiceProps {
  placement: Placement;
  onChange: (placement: Placement) => void;
}

/** Project and template of a new experiment, where there is a choice. */
function PlacementChoice({ placement, onChange }: PlacementChoiceProps) {
  const projects = useQuery(projectsQuery).data ?? [];
  const rules = useQuery(rulesQuery(placement.project ?? "")).data ?? [];
  const own = projects.filter((one) => one.role !== "viewer").map((one) => one.name);
  const templates = rules.filter((one) => one.kind === "template" && one.applies);
  const names = [...new Set(templates.map((one) => one.name))].filter((one) => one !== "default");
  if (own.length < 2 && names.length === 0) return null;
  return (
    <Group gap="sm" align="flex-end">
      {own.length > 1 && (
        <Select
          label="Project"
          placeholder="Your first one"
          clearable
          data={own}
          value={placement.project ?? null}
          onChange={(project) => onChange(project === null ? {} : { project })}
        />
      )}
      {names.length > 0 && (
        <Select
          label="Template"
          placeholder="None"
          clearable
          data={names}
          value={placement.template ?? null}
          onChange={(template) => {
            const { project } = placement;
            const of = project === undefined ? {} : { project };
            onChange(template === null ? of : { ...of, template });
          }}
        />
      )}
    </Group>
  );
}

/** What a config has from templates and policies. */
function Filled({ fields }: { fields: Record<string, string> }) {
  const paths = Object.entries(fields);
  if (paths.length === 0) return null;
  return (
    <Text size="sm" c="dimmed" component="ul" style={{ margin: 0, paddingLeft: 18 }}>
      {paths.map(([path, whose]) => (
        <li key={path} className="wrap-anywhere">
          {path} comes from {whose}
        </li>
      ))}
    </Text>
  );
}

function Preview({ config }: { config: Record<string, unknown> }) {
  const preview = useQuery({
    queryKey: ["preview", config],
    queryFn: () => previewSearch(config),
    gcTime: 10_000,
  });
  if (!preview.data) return null;
  const { rows, unit } = preview.data;
  const parts = rows.map(({ num_trials: count, length }) =>
    length === null
      ? `${plural(count, "trial")} to the end`
      : `${plural(count, "trial")} for ${formatLength(length, unit ?? "")}`,
  );
  return (
    <Text size="sm" c="dimmed">
      Valid. It would train {parts.join(", ")}.
    </Text>
  );
}
