/** Trials to compare, chosen from lists by whoever does not know their ids. */

import { Group, MultiSelect, Select } from "@mantine/core";
import { useDebouncedValue } from "@mantine/hooks";
import { useInfiniteQuery } from "@tanstack/react-query";
import { useState } from "react";

import { experimentsQuery, trialsQuery } from "../api/queries";
import type { Trial } from "../api/types";
import { differing, flatten } from "../lib/flatten";
import { formatNumber, formatValue, toNumber } from "../lib/numbers";

const SEARCH_DELAY_MS = 250;
const EXPERIMENTS_SHOWN = 50;
const VALUES_SHOWN = 3;

interface TrialPickerProps {
  chosen: readonly number[];
  onChange: (ids: number[]) => void;
}

export function TrialPicker({ chosen, onChange }: TrialPickerProps) {
  const [experiment, setExperiment] = useState<string | null>(null);
  const [typed, setTyped] = useState("");
  // What was chosen fills the box; it is not looked for.
  const [text] = useDebouncedValue(experiment === null ? typed : "", SEARCH_DELAY_MS);
  const found = useInfiniteQuery(
    experimentsQuery({ search: text || undefined, limit: EXPERIMENTS_SHOWN }),
  );
  const trials = useInfiniteQuery({
    ...trialsQuery(Number(experiment ?? 0), { sortBy: "metric" }),
    enabled: experiment !== null,
  });
  const experiments = found.data?.pages.flatMap((page) => page.items) ?? [];
  const page = experiment === null ? undefined : trials.data?.pages[0];
  const offered = page?.items ?? [];
  const ids = new Set(offered.map(({ id }) => id));
  const others = chosen.filter((id) => !ids.has(id));
  const isCut = page !== undefined && (page.total ?? 0) > offered.length;
  return (
    <Group align="flex-start" mb="sm" gap="sm">
      <Select
        label="Experiment"
        description="The newest, or type a part of the name."
        placeholder="Choose an experiment"
        w={{ base: "100%", xs: 260 }}
        searchable
        clearable
        data={experiments.map(({ id, name }) => ({ value: String(id), label: `${name} (${id})` }))}
        // The master has looked for the text, in labels too.
        filter={({ options }) => options}
        onSearchChange={setTyped}
        value={experiment}
        onChange={setExperiment}
        nothingFoundMessage="No experiment matches"
      />
      <MultiSelect
        label="Its trials"
        description={
          isCut
            ? `The best ${offered.length} of ${(page.total ?? 0).toLocaleString("en")}; others by id.`
            : "The best first."
        }
        placeholder={experiment === null ? "First choose an experiment" : "Choose trials"}
        disabled={experiment === null}
        flex="1 1 260px"
        maw={620}
        searchable
        hidePickedOptions
        data={labelled(offered)}
        value={chosen.filter((id) => ids.has(id)).map(String)}
        onChange={(values) => onChange([...others, ...values.map(Number)])}
        nothingFoundMessage="No trial matches"
      />
    </Group>
  );
}

/** Name trials by what differs between them. */
function labelled(trials: readonly Trial[]): { value: string; label: string }[] {
  const all = trials.map((trial) => flatten(trial.hparams));
  const names = [...differing(all)].sort().slice(0, VALUES_SHOWN);
  return trials.map((trial, i) => {
    const values = names.map((name) => `${name} ${formatValue(all[i]?.[name])}`);
    const best = toNumber(trial.best_metric);
    const parts = [`Trial ${trial.id}`, ...values, ...(best === null ? [] : [formatNumber(best)])];
    return { value: String(trial.id), label: parts.join(" · ") };
  });
}
