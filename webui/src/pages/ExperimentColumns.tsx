/** Which columns the experiment table has beyond the usual ones, and what their values must be. */

import {
  ActionIcon,
  Button,
  Group,
  MultiSelect,
  Pill,
  Popover,
  Select,
  Stack,
  Text,
  TextInput,
} from "@mantine/core";
import { IconArrowDown, IconArrowUp, IconFilter } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { type FormEvent, useState } from "react";

import { columnsQuery } from "../api/queries";
import { CHOICES_SHOWN } from "../charts/ChartControls";
import {
  type Condition,
  conditionFrom,
  needsValue,
  type Operator,
  OPERATORS,
} from "../lib/conditions";

const SUMMARIES = ["last", "min", "max"] as const;
const FIELDS = [
  { value: "best_metric", label: "Best" },
  { value: "metric", label: "Metric" },
  { value: "progress", label: "Progress" },
  { value: "num_trials", label: "Trials" },
  { value: "searcher", label: "Search" },
  { value: "name", label: "Name" },
  { value: "description", label: "Description" },
  { value: "id", label: "Id" },
];

/** Return a column's short name: `last:validation/loss` is "loss (last)". */
export function columnTitle(id: string): string {
  const field = FIELDS.find(({ value }) => value === id);
  if (field !== undefined) return field.label;
  const [kind = "", name = ""] = [id.slice(0, id.indexOf(":")), id.slice(id.indexOf(":") + 1)];
  return kind === "hparam" ? name : `${name.slice(name.indexOf("/") + 1)} (${kind})`;
}

/** What a filter of runs compares: each trial stands for itself. */
const FIELDS_OF_TRIALS = ["best_metric", "metric", "progress", "searcher", "name", "description"];
const OWNERS = { columns: "of the best trial", filter: "of any trial", trials: "of the run" };

/** A column shows values of the best trial; a filter on a hyperparameter looks at every trial. */
function useColumnNames(use: keyof typeof OWNERS) {
  const { hparams = [], metrics = [] } = useQuery(columnsQuery).data ?? {};
  return [
    {
      group: `Hyperparameters ${OWNERS[use]}`,
      items: hparams.map((name) => ({ value: `hparam:${name}`, label: name })),
    },
    {
      group: `Metrics ${OWNERS[use === "trials" ? use : "columns"]}`,
      items: metrics.flatMap(({ group, name }) =>
        SUMMARIES.map((summary) => ({
          value: `${summary}:${group}/${name}`,
          label: `${name} (${group}, ${summary})`,
        })),
      ),
    },
  ];
}

interface ColumnChoiceProps {
  chosen: readonly string[];
  onChange: (columns: string[]) => void;
}

export function ColumnChoice({ chosen, onChange }: ColumnChoiceProps) {
  const names = useColumnNames("columns");
  return (
    <>
      <MultiSelect
        aria-label="Further columns"
        placeholder={chosen.length === 0 ? "Further columns" : ""}
        size="xs"
        miw={170}
        maw={420}
        searchable
        clearable
        data={names}
        limit={CHOICES_SHOWN}
        value={[...chosen]}
        onChange={onChange}
        nothingFoundMessage="No such column"
      />
      {chosen.length > 1 && <ColumnOrder chosen={chosen} onChange={onChange} />}
    </>
  );
}

function ColumnOrder({ chosen, onChange }: ColumnChoiceProps) {
  const move = (from: number, to: number) => {
    const next = [...chosen];
    next.splice(to, 0, ...next.splice(from, 1));
    onChange(next);
  };
  return (
    <Popover trapFocus>
      <Popover.Target>
        <Button size="xs" variant="default">
          Order
        </Button>
      </Popover.Target>
      <Popover.Dropdown aria-label="Order of the further columns">
        <Stack gap={4}>
          {chosen.map((id, i) => (
            <Group key={id} gap={4} wrap="nowrap" justify="space-between">
              <Text size="sm" mr="md" className="wrap-anywhere">
                {columnTitle(id)}
              </Text>
              <Group gap={2} wrap="nowrap">
                <ActionIcon
                  variant="subtle"
                  color="gray"
                  disabled={i === 0}
                  aria-label={`Move ${columnTitle(id)} to the left`}
                  onClick={() => move(i, i - 1)}
                >
                  <IconArrowUp size={16} />
                </ActionIcon>
                <ActionIcon
                  variant="subtle"
                  color="gray"
                  disabled={i === chosen.length - 1}
                  aria-label={`Move ${columnTitle(id)} to the right`}
                  onClick={() => move(i, i + 1)}
                >
                  <IconArrowDown size={16} />
                </ActionIcon>
              </Group>
            </Group>
          ))}
        </Stack>
      </Popover.Dropdown>
    </Popover>
  );
}

interface ConditionChoiceProps {
  chosen: readonly Condition[];
  onChange: (conditions: Condition[]) => void;
  /** What the list has: experiments, or trials that each stand for themselves. */
  of?: "experiments" | "trials";
}

export function ConditionChoice({ chosen, onChange, of = "experiments" }: ConditionChoiceProps) {
  return (
    <>
      <Popover trapFocus>
        <Popover.Target>
          <Button size="xs" variant="default" leftSection={<IconFilter size={16} />}>
            Filter
          </Button>
        </Popover.Target>
        <Popover.Dropdown aria-label="A condition on a column">
          <ConditionForm of={of} onAdd={(condition) => onChange([...chosen, condition])} />
        </Popover.Dropdown>
      </Popover>
      {chosen.map((condition, i) => (
        <Pill
          key={i}
          size="md"
          withRemoveButton
          removeButtonProps={{
            "aria-label": `Remove the filter ${textOf(condition, of)}`,
            "aria-hidden": false,
            tabIndex: 0,
          }}
          onRemove={() => onChange(chosen.filter((_, other) => other !== i))}
        >
          {textOf(condition, of)}
        </Pill>
      ))}
    </>
  );
}

function textOf([column, operator, value]: Condition, of: "experiments" | "trials"): string {
  const name = columnTitle(column);
  const where = column.startsWith("hparam:") && of === "experiments" ? " in any trial" : "";
  if (operator === "empty" && where !== "") return `${name} is empty in every trial`;
  const comparison = value === undefined ? `is ${operator}` : `${operator} ${String(value)}`;
  return `${name} ${comparison}${where}`;
}

interface ConditionFormProps {
  of: "experiments" | "trials";
  onAdd: (condition: Condition) => void;
}

function ConditionForm({ of, onAdd }: ConditionFormProps) {
  const names = useColumnNames(of === "trials" ? "trials" : "filter");
  const fields =
    of === "trials" ? FIELDS.filter(({ value }) => FIELDS_OF_TRIALS.includes(value)) : FIELDS;
  const [column, setColumn] = useState("best_metric");
  const [operator, setOperator] = useState<Operator>("<");
  const [typed, setTyped] = useState("");
  const condition = conditionFrom(column, operator, typed);
  const submit = (event: FormEvent) => {
    event.preventDefault();
    if (condition === null) return;
    onAdd(condition);
    setTyped("");
  };
  // Lists of choices within the popover, so that clicking one does not close it.
  const within = { comboboxProps: { withinPortal: false } };
  return (
    <form onSubmit={submit}>
      <Stack gap="xs" w={240}>
        <Select
          label="Column"
          size="xs"
          searchable
          allowDeselect={false}
          data={[{ group: of === "trials" ? "Run" : "Experiment", items: fields }, ...names]}
          limit={CHOICES_SHOWN}
          value={column}
          onChange={(value) => value && setColumn(value)}
          {...within}
        />
        <Select
          label="Comparison"
          size="xs"
          allowDeselect={false}
          data={[...OPERATORS]}
          value={operator}
          onChange={(value) => value && setOperator(value)}
          {...within}
        />
        {needsValue(operator) && (
          <TextInput
            label="Value"
            size="xs"
            data-autofocus
            value={typed}
            onChange={(event) => setTyped(event.currentTarget.value)}
          />
        )}
        <Button type="submit" size="xs" disabled={condition === null}>
          Add the filter
        </Button>
      </Stack>
    </form>
  );
}
