/** The runs or groups of a comparison: switched on and off, sorted, grouped, kept on top. */

import {
  Button,
  Checkbox,
  Group,
  Menu,
  MultiSelect,
  Select,
  TagsInput,
  Text,
  useComputedColorScheme,
} from "@mantine/core";
import { IconDots, IconPinned } from "@tabler/icons-react";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useMemo, useRef, useState } from "react";

import { manyChoices, useSearchChange } from "../../charts/ChartControls";
import { lineStyle } from "../../charts/palette";
import { LineMark } from "../../charts/CurveCard";
import { LazyMenu } from "../../components/LazyMenu";
import { RowLink } from "../../components/links";
import { isQueryError, QueryBox } from "../../components/QueryBox";
import type { Condition } from "../../lib/conditions";
import { plural } from "../../lib/numbers";
import {
  ALL_BUT_SEED,
  BY_EXPERIMENT,
  describeRow,
  differingHparams,
  type Row,
  type Run,
  valueOf,
  withDifference,
} from "../../lib/runs";
import { type CompareSearch, TRIAL_STATES } from "../../lib/search";
import { useIsPhone } from "../../lib/width";
import { ConditionChoice } from "../ExperimentColumns";
import classes from "./Compare.module.css";

/** So many rows are switched on at first. */
export const FIRST_ON = 50;
const ROW_HEIGHT = 34;

interface RunListProps {
  rows: readonly Row[];
  runs: readonly Run[];
  total: number;
  shown: ReadonlySet<string>;
  search: CompareSearch;
  error: unknown;
}

export function RunList({ rows, runs, total, shown, search, error }: RunListProps) {
  const change = useSearchChange();
  const isGrouped = search.group !== undefined;
  const isAll = rows.length > 0 && shown.size === rows.length;
  const noun = isGrouped ? "group" : "run";
  const isNarrowed = search.trials !== undefined || search.experiments !== undefined;
  const isPhone = useIsPhone();
  const [isOpened, setOpened] = useState(false);
  const isOpen = !isPhone || isOpened || isQueryError(error);
  const count = (
    <Group gap="xs" mb={6} justify="space-between">
      <Group gap="xs" wrap="nowrap">
        <Checkbox
          size="xs"
          aria-label={`Show all ${noun}s`}
          checked={isAll}
          indeterminate={!isAll && shown.size > 0}
          onChange={() => change({ first: isAll ? 0 : rows.length, on: undefined, off: undefined })}
        />
        <Text size="xs" role="status">
          {shown.size.toLocaleString("en")} of {plural(rows.length, noun)} shown
        </Text>
      </Group>
      {isNarrowed && (
        <Button
          size="compact-xs"
          variant="subtle"
          onClick={() => change({ ...NARROWED, ...SWITCHES })}
        >
          All runs
        </Button>
      )}
      <Button
        size="xs"
        variant="default"
        className="phone-only"
        aria-expanded={isOpen}
        onClick={() => setOpened(!isOpen)}
      >
        Choose runs
      </Button>
    </Group>
  );
  return (
    <section className={classes.runs} aria-label="Runs">
      {isPhone && count}
      {isOpen && (
        <>
          <QueryBox
            label="Search runs by experiment, label or id"
            mb={6}
            value={search.runs ?? ""}
            onChange={(runs) => {
              // Nothing folds while one mends what was wrong.
              setOpened(true);
              change({ runs: runs || undefined });
            }}
            error={error}
          />
          <RunFilters search={search} />
          <Controls runs={runs} search={search} />
        </>
      )}
      {!isPhone && count}
      {total > runs.length && (
        <Text size="xs" c="dimmed" mb={4}>
          The newest {runs.length.toLocaleString("en")} of {plural(total, "run")}: search for
          others.
        </Text>
      )}
      {isOpen && <Rows rows={rows} shown={shown} search={search} />}
    </section>
  );
}

const NO_CONDITIONS: readonly Condition[] = [];
const NARROWED = { trials: undefined, experiments: undefined };
const SWITCHES = { first: undefined, on: undefined, off: undefined };
const OF_ROWS = { ...SWITCHES, top: undefined, base: undefined };

/** Choosing runs by state, label, hyperparameters and metrics. */
function RunFilters({ search }: { search: CompareSearch }) {
  const change = useSearchChange();
  return (
    <>
      <Group gap={6} mb={6}>
        <Select
          aria-label="State of the runs"
          placeholder="Any state"
          size="xs"
          flex={1}
          clearable
          data={TRIAL_STATES.map((state) => ({
            value: state,
            label:
              state === "ACTIVE"
                ? "Queued, running"
                : state.charAt(0) + state.slice(1).toLowerCase(),
          }))}
          value={search.state ?? null}
          onChange={(state) => change({ state: state ?? undefined })}
        />
        <ConditionChoice
          of="trials"
          chosen={search.where ?? NO_CONDITIONS}
          onChange={(where) => change({ where: where.length > 0 ? where : undefined })}
        />
      </Group>
      <TagsInput
        aria-label="Labels of the runs"
        placeholder={search.labels === undefined ? "All of these labels" : undefined}
        size="xs"
        mb={6}
        value={search.labels ?? []}
        onChange={(labels) => change({ labels: labels.length > 0 ? labels : undefined })}
      />
    </>
  );
}

function Controls({ runs, search }: { runs: readonly Run[]; search: CompareSearch }) {
  const change = useSearchChange();
  const hparams = useMemo(() => differingHparams(runs), [runs]);
  const groupings = [
    { value: ALL_BUT_SEED, label: "Everything but the seed" },
    { value: BY_EXPERIMENT, label: "Experiment" },
    ...hparams.map((name) => ({ value: name, label: name })),
  ];
  const group = search.group ?? [];
  return (
    <>
      <MultiSelect
        aria-label="Group by"
        placeholder={group.length === 0 ? "Group by" : undefined}
        size="xs"
        mb={6}
        data={groupings}
        {...manyChoices(groupings.length)}
        // A group may be named by a link whose runs have no such hyperparameter now.
        value={group.filter((one) => groupings.some(({ value }) => value === one))}
        onChange={(chosen) => change({ group: chosen.length > 0 ? chosen : undefined, ...OF_ROWS })}
      />
      <Group gap={6} mb={6} wrap="nowrap">
        <Select
          aria-label="Sort runs"
          size="xs"
          flex={1}
          data={[
            { value: "", label: "Newest first" },
            { value: "metric", label: "Best metric first" },
            { value: "name", label: "By name" },
            ...hparams.map((name) => ({ value: `hp.${name}`, label: `By ${name}` })),
          ]}
          {...manyChoices(hparams.length)}
          value={search.sort ?? ""}
          allowDeselect={false}
          onChange={(sort) => change({ sort: sort || undefined })}
        />
        {group.length > 0 && (
          <Select
            aria-label="Spread"
            size="xs"
            flex={1}
            data={[
              { value: "range", label: "Min to max" },
              { value: "quartiles", label: "25 to 75 %" },
              { value: "deciles", label: "10 to 90 %" },
              { value: "std", label: "± std" },
              { value: "none", label: "Mean only" },
            ]}
            value={search.spread ?? "range"}
            allowDeselect={false}
            onChange={(value) => change({ spread: value === "range" ? undefined : value })}
          />
        )}
      </Group>
    </>
  );
}

function Rows({ rows, shown, search }: Pick<RunListProps, "rows" | "shown" | "search">) {
  const scroller = useRef<HTMLDivElement>(null);
  const isDark = useComputedColorScheme("light") === "dark";
  const virtual = useVirtualizer({
    count: rows.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_HEIGHT,
    overscan: 8,
  });
  const base = rows.find(({ key }) => key === search.base);
  return (
    <div
      ref={scroller}
      className={classes.list}
      tabIndex={0}
      role="region"
      aria-label="List of runs"
    >
      <ul style={{ height: virtual.getTotalSize(), position: "relative", margin: 0, padding: 0 }}>
        {virtual.getVirtualItems().map(({ index, start }) => {
          const row = rows[index];
          if (row === undefined) return null;
          const value = valueOf(row, search.sort);
          return (
            <li
              key={row.key}
              className={classes.row}
              style={{ height: ROW_HEIGHT, transform: `translateY(${start}px)` }}
              data-base={row === base || undefined}
            >
              <RunSwitch row={row} isOn={shown.has(row.key)} search={search} />
              <LineMark {...lineStyle(row.place, isDark)} />
              <span className={classes.name} title={row.name}>
                {search.top?.includes(row.key) && <IconPinned size={12} aria-label="On top" />}
                {row.runs.length === 1 && search.group === undefined ? (
                  <RowLink to={`/trials/${row.runs[0]?.id}`} title={row.name}>
                    {row.name}
                  </RowLink>
                ) : (
                  row.name
                )}{" "}
                <span className="quiet">{row === base ? "baseline" : describeRow(row)}</span>
              </span>
              <span className="quiet">
                {withDifference(value, base && row !== base ? valueOf(base, search.sort) : null)}
              </span>
              <RunMenu row={row} search={search} />
            </li>
          );
        })}
      </ul>
    </div>
  );
}

interface RunProps {
  row: Row;
  search: CompareSearch;
}

function without(list: readonly string[] | undefined, key: string): string[] | undefined {
  const rest = (list ?? []).filter((one) => one !== key);
  return rest.length > 0 ? rest : undefined;
}

function RunSwitch({ row: { key, name }, isOn, search }: RunProps & { isOn: boolean }) {
  const change = useSearchChange();
  const to = isOn ? "off" : "on";
  const from = isOn ? "on" : "off";
  return (
    <input
      type="checkbox"
      className="check"
      aria-label={`Show ${name}`}
      checked={isOn}
      onChange={() =>
        change({
          [from]: without(search[from], key),
          [to]: [...(without(search[to], key) ?? []), key],
        })
      }
    />
  );
}

function RunMenu({ row: { key, name }, search }: RunProps) {
  const change = useSearchChange();
  const isOnTop = search.top?.includes(key) === true;
  const isBase = search.base === key;
  return (
    <LazyMenu label={`Options of ${name}`} icon={<IconDots size={16} />} size={24}>
      <Menu.Item onClick={() => change({ first: 0, on: [key], off: undefined })}>
        Show only this
      </Menu.Item>
      <Menu.Item onClick={() => change({ base: isBase ? undefined : key })}>
        {isBase ? "Without baseline" : "Use as baseline"}
      </Menu.Item>
      <Menu.Item
        onClick={() =>
          change({
            top: isOnTop ? without(search.top, key) : [...(search.top ?? []), key],
          })
        }
      >
        {isOnTop ? "Not on top" : "Keep on top"}
      </Menu.Item>
    </LazyMenu>
  );
}
