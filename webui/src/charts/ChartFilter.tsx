/** A box that filters the charts of a page; kept in the address. */

import { Group, Switch, Text, TextInput } from "@mantine/core";
import { useDebouncedCallback } from "@mantine/hooks";
import { IconSearch } from "@tabler/icons-react";
import { useState } from "react";

import { plural } from "../lib/numbers";
import { useSearchChange } from "./ChartControls";

interface ChartFilterProps {
  value: string;
  numShown: number;
  numAll: number;
  /** Whether the text is a regular expression; undefined where it never is. */
  isExpression?: boolean;
  /** What is wrong with the text. */
  problem?: string;
}

export function ChartFilter(props: ChartFilterProps) {
  const { value, numShown, numAll, isExpression, problem } = props;
  const change = useSearchChange();
  const [text, setText] = useState(value);
  const tell = useDebouncedCallback((q: string) => change({ q: q || undefined }), 200);
  return (
    <Group mb="md" gap="sm">
      <TextInput
        aria-label="Filter the metrics"
        placeholder="Filter the metrics"
        size="xs"
        flex="1 1 180px"
        maw={320}
        leftSection={<IconSearch size={16} />}
        error={problem}
        value={text}
        onChange={(event) => {
          setText(event.currentTarget.value);
          tell(event.currentTarget.value);
        }}
      />
      {isExpression !== undefined && (
        <Switch
          size="sm"
          label="Regular expression"
          checked={isExpression}
          onChange={(event) => change({ re: event.currentTarget.checked || undefined })}
        />
      )}
      <Text size="xs" c="dimmed" role="status">
        {numShown < numAll
          ? `${numShown.toLocaleString("en")} of ${plural(numAll, "chart")}`
          : plural(numAll, "chart")}
      </Text>
    </Group>
  );
}
