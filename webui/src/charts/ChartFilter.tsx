/** A box that filters the charts of a page; kept in the address. */

import { Group, Text, TextInput } from "@mantine/core";
import { useDebouncedCallback } from "@mantine/hooks";
import { IconSearch } from "@tabler/icons-react";
import { useState } from "react";

import { plural } from "../lib/numbers";
import { useSearchChange } from "./ChartControls";

interface ChartFilterProps {
  value: string;
  numShown: number;
  numAll: number;
}

export function ChartFilter({ value, numShown, numAll }: ChartFilterProps) {
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
        value={text}
        onChange={(event) => {
          setText(event.currentTarget.value);
          tell(event.currentTarget.value);
        }}
      />
      <Text size="xs" c="dimmed" role="status">
        {numShown < numAll
          ? `${numShown.toLocaleString("en")} of ${plural(numAll, "chart")}`
          : plural(numAll, "chart")}
      </Text>
    </Group>
  );
}
