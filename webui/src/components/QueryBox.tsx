/** The box for queries such as `lr < 0.01 and tag:baseline`, with completion of the last word. */

import { Autocomplete, type AutocompleteProps } from "@mantine/core";
import { useDebouncedCallback, useDebouncedValue } from "@mantine/hooks";
import { IconSearch } from "@tabler/icons-react";
import { keepPreviousData, useQuery } from "@tanstack/react-query";
import { useState } from "react";

import { problemOf } from "../api/problem";
import { completionsQuery } from "../api/queries";

const TELL_MS = 300;
const COMPLETE_MS = 150;

interface QueryBoxProps extends Omit<
  AutocompleteProps,
  "value" | "onChange" | "data" | "error" | "label"
> {
  label: string;
  value: string;
  onChange: (query: string) => void;
  /** What the last query was answered with. */
  error: unknown;
}

/** Tell whether an error is about what was typed, and so stands at the box. */
export function isQueryError(error: unknown): boolean {
  return error != null && problemOf(error).code === "invalid_query";
}

export function QueryBox({ label, value, onChange, error, ...rest }: QueryBoxProps) {
  const [text, setText] = useState(value);
  const [told, setTold] = useState(value);
  if (value !== told) {
    // The address was changed by something else, as the browser's button.
    setTold(value);
    setText(value);
  }
  const tell = useDebouncedCallback((query: string) => {
    setTold(query.trim());
    onChange(query.trim());
  }, TELL_MS);
  const [typed] = useDebouncedValue(text, COMPLETE_MS);
  const [isFocused, setFocused] = useState(false);
  const found = useQuery({
    ...completionsQuery(typed),
    enabled: isFocused,
    placeholderData: keepPreviousData,
  }).data;
  const before = typed.slice(0, found?.place);
  const data = typed === text ? (found?.texts ?? []).map((one) => `${before}${one}`) : [];
  return (
    <Autocomplete
      placeholder="Name, label, or lr < 0.01 and tag:paper"
      size="xs"
      leftSection={<IconSearch size={16} />}
      {...rest}
      aria-label={label}
      value={text}
      data={data.filter((one) => one !== text)}
      // The master has chosen them.
      filter={({ options }) => options}
      renderOption={({ option }) => option.value.slice(before.length)}
      onFocus={() => setFocused(true)}
      onBlur={() => setFocused(false)}
      onChange={(next) => {
        setText(next);
        tell(next);
      }}
      error={isQueryError(error) ? problemOf(error).message : undefined}
      // The library's red is too pale to read.
      styles={{
        input: { color: "var(--mantine-color-text)" },
        error: { color: "var(--state-failed)" },
      }}
      errorProps={{ role: "alert", className: "wrap-anywhere" }}
    />
  );
}
