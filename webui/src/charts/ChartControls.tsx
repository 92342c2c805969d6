/** What all curves of a page share: x axis, scale, smoothing, zoom, table; kept in the address. */

import { Button, Group, Select, Slider, Switch, Text } from "@mantine/core";
import { IconZoomReset } from "@tabler/icons-react";
import { useNavigate } from "@tanstack/react-router";
import { type ReactNode, useCallback, useState } from "react";

import type { MetricsSearch } from "../lib/search";
import type { Range } from "./curves";

/** Return a function that changes a part of the address's search. */
export function useSearchChange(): (change: Record<string, unknown>, isStep?: boolean) => void {
  const navigate = useNavigate();
  return useCallback(
    (change, isStep = false) =>
      void navigate({
        to: ".",
        search: ((before: object) => ({ ...before, ...change })) as never,
        // A step can be taken back with the browser's button.
        replace: !isStep,
        resetScroll: false,
      }),
    [navigate],
  );
}

export function zoomOf({ from, to }: MetricsSearch): Range | null {
  return from !== undefined && to !== undefined && from < to ? { min: from, max: to } : null;
}

/** Return the search that stands for a zoom; six digits are finer than any screen. */
export function zoomSearch(zoom: Range | null): { from?: number; to?: number } {
  if (zoom === null) return { from: undefined, to: undefined };
  return { from: Number(zoom.min.toPrecision(7)), to: Number(zoom.max.toPrecision(7)) };
}

const FEW_CHOICES = 20;
export const CHOICES_SHOWN = 100;

/** A long list of choices is searched; only its first matches are drawn. */
export function manyChoices(count: number) {
  return count > FEW_CHOICES ? { searchable: true, limit: CHOICES_SHOWN } : {};
}

const SWITCHES = [
  ["log", "Log scale"],
  ["logx", "Log x"],
  ["clip", "Clip outliers"],
  ["table", "As tables"],
] as const;

interface ChartControlsProps {
  search: MetricsSearch;
  xNames: readonly string[];
  metrics?: readonly { value: string; label: string }[];
  metric?: string;
  /** Whether the code of a trial has chosen x axes, which are taken at first. */
  isXChosen?: boolean;
  /** Further options, below; they are open at first if `isOpenAtFirst`. */
  children?: ReactNode;
  isOpenAtFirst?: boolean;
}

export function ChartControls({
  search,
  xNames,
  metrics,
  metric,
  isXChosen = false,
  children,
  isOpenAtFirst = false,
}: ChartControlsProps) {
  const change = useSearchChange();
  const first = isXChosen ? "" : "batches";
  const xData = [
    ...(isXChosen ? [{ value: "", label: "As in the code" }] : []),
    { value: "batches", label: "Batches" },
    { value: "time", label: "Time" },
    ...xNames.map((name) => ({ value: name, label: name })),
  ];
  const [isOpen, setOpen] = useState(isOpenAtFirst);
  return (
    <>
      <Group gap="8px 16px" align="flex-end" mb="md">
        {metrics && (
          <Select
            label="Metric"
            size="xs"
            w={190}
            data={[...metrics]}
            {...manyChoices(metrics.length)}
            value={metric ?? null}
            allowDeselect={false}
            onChange={(value) => change({ metric: value ?? undefined })}
          />
        )}
        <Button
          size="xs"
          variant="default"
          className="phone-only"
          aria-expanded={isOpen}
          onClick={() => setOpen(!isOpen)}
        >
          Chart options
        </Button>
        <Group
          gap="8px 16px"
          align="flex-end"
          flex="1 1 0"
          className="phone-folded"
          data-open={isOpen || undefined}
        >
          <Select
            label="X axis"
            size="xs"
            w={130}
            data={xData}
            {...manyChoices(xData.length)}
            value={search.x ?? first}
            allowDeselect={false}
            onChange={(value) =>
              change({ x: value === first ? undefined : value, from: undefined, to: undefined })
            }
          />
          <div style={{ flex: "1 1 90px", maxWidth: 150 }}>
            <Text size="xs" fw={600} id="smoothing-label">
              Smoothing {search.smooth ? search.smooth.toFixed(2) : "off"}
            </Text>
            <Slider
              size="sm"
              my={8}
              min={0}
              max={0.99}
              step={0.01}
              label={null}
              value={search.smooth ?? 0}
              onChange={(value) => change({ smooth: value === 0 ? undefined : value })}
              thumbProps={{ "aria-labelledby": "smoothing-label" }}
            />
          </div>
          {SWITCHES.map(([name, label]) => (
            <Switch
              key={name}
              size="sm"
              label={label}
              checked={search[name] === true}
              onChange={(event) => change({ [name]: event.currentTarget.checked || undefined })}
            />
          ))}
        </Group>
        {zoomOf(search) !== null && (
          <Button
            size="xs"
            variant="default"
            leftSection={<IconZoomReset size={16} />}
            onClick={() => change(zoomSearch(null), true)}
          >
            Show all
          </Button>
        )}
      </Group>
      {children && (
        <div className="phone-folded" data-open={isOpen || undefined}>
          {children}
        </div>
      )}
    </>
  );
}
