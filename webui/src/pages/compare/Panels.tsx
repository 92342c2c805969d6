/** The metrics of the runs that are switched on, in sections; only what is in sight is read. */

import { Button, Group, SimpleGrid, Text, UnstyledButton } from "@mantine/core";
import { IconChevronDown, IconChevronRight } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { useWindowVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState } from "react";

import { namesOfTrialsQuery } from "../../api/queries";
import { ChartControls, useSearchChange } from "../../charts/ChartControls";
import { ChartFilter } from "../../charts/ChartFilter";
import { Empty, ProblemView, Waiting } from "../../components/Feedback";
import { expressionMatcher, matcher, xAxesOf, xChoices } from "../../lib/metrics";
import { plural } from "../../lib/numbers";
import { changedPanels, type Panel, panelsOf, type Section, sectionsOf } from "../../lib/panels";
import type { Row, Run } from "../../lib/runs";
import type { CompareSearch } from "../../lib/search";
import { useWidth } from "../../lib/width";
import classes from "./Compare.module.css";
import { MetricPanel } from "./MetricPanel";

const HEAD_HEIGHT = 40;
const CARD_HEIGHT = 350;
const ROW_GAP = 12;
const LEAST_WIDTH = 360;
const NOTHING: string[] = [];

interface PanelsProps {
  rows: readonly Row[];
  /** All runs, shown or not: the panels stay while one switches runs on and off. */
  runs: readonly Run[];
  search: CompareSearch;
}

export function Panels({ rows, runs, search }: PanelsProps) {
  const change = useSearchChange();
  const ids = useMemo(() => runs.map(({ id }) => id), [runs]);
  const names = useQuery(namesOfTrialsQuery(ids));
  const { pinned = NOTHING, hidden = NOTHING, folded = NOTHING, q = "" } = search;
  const { panels: changes, re: isExpression = false } = search;
  const known = useMemo(
    () =>
      (names.data ?? []).map(({ group, name, num_trials: numTrials, x_axis: xAxis }) => ({
        group,
        metric: name,
        numTrials,
        xAxis,
      })),
    [names.data],
  );
  const choices = useMemo(() => panelsOf(known), [known]);
  const changed = useMemo(() => changedPanels(choices, changes ?? {}), [choices, changes]);
  const axes = useMemo(
    () => xAxesOf(changed.map(({ id, metrics }) => [id, metrics] as const), known, search.x),
    [changed, known, search.x],
  );
  const panels = useMemo(
    () => changed.map((one) => (one.x ? one : { ...one, x: axes.own.get(one.id) })),
    [changed, axes],
  );
  const shown = useMemo(() => ({ ...search, x: axes.shared }), [search, axes]);
  const found = useMemo(() => (isExpression ? expressionMatcher(q) : matcher(q)), [isExpression, q]);
  const problem = typeof found === "string" ? found : undefined;
  const matching = useMemo(() => {
    if (q === "" || typeof found === "string") return panels;
    return panels.filter(({ title, metrics }) =>
      isExpression
        ? metrics.some(({ id, metric }) => found(metric) || found(id))
        : found([title, ...metrics.map(({ id }) => id)].join("\n")),
    );
  }, [panels, q, found, isExpression]);
  const sections = useMemo(
    () => sectionsOf(matching, { pinned, hidden, folded }),
    [matching, pinned, hidden, folded],
  );
  const xNames = useMemo(() => xChoices(known), [known]);
  if (names.isError)
    return <ProblemView error={names.error} onRetry={() => void names.refetch()} />;
  if (names.isPending) return <Waiting what="metrics" />;
  if (panels.length === 0)
    return <Empty title="No metrics">None of these runs has reported any number.</Empty>;
  const numHidden = panels.filter(({ id }) => hidden.includes(id)).length;
  return (
    <>
      <ChartControls
        // Another view may filter its charts.
        key={search.saved}
        search={search}
        xNames={xNames}
        isXChosen={axes.isChosen}
        isOpenAtFirst={q !== ""}
      >
        <Group gap="xs" align="flex-start">
          <ChartFilter
            value={q}
            numShown={matching.length}
            numAll={panels.length}
            {...{ isExpression, problem }}
          />
          {numHidden > 0 && (
            <Button size="xs" variant="default" onClick={() => change({ hidden: undefined })}>
              Show {plural(numHidden, "hidden panel")}
            </Button>
          )}
        </Group>
      </ChartControls>
      {matching.length === 0 && (
        <Empty title="No metric matches">
          {isExpression
            ? "The regular expression must match a part of the name."
            : "Each word must be in the name; * stands for anything, a|b for either."}
        </Empty>
      )}
      <PanelRows {...{ sections, rows, xNames }} search={shown} known={choices} />
    </>
  );
}

type Line = { key: string; section: Section } | { key: string; panels: Panel[] };

/** Return headings and rows of panels, in order. */
function linesOf(sections: readonly Section[], numColumns: number): Line[] {
  return sections.flatMap((section): Line[] => {
    const lines: Line[] = [{ key: `section ${section.name}`, section }];
    if (section.isClosed) return lines;
    for (let from = 0; from < section.panels.length; from += numColumns) {
      const panels = section.panels.slice(from, from + numColumns);
      lines.push({ key: panels.map(({ id }) => id).join("\n"), panels });
    }
    return lines;
  });
}

interface PanelRowsProps {
  sections: readonly Section[];
  rows: readonly Row[];
  search: CompareSearch;
  known: readonly Panel[];
  xNames: readonly string[];
}

function PanelRows({ sections, rows, search, known, xNames }: PanelRowsProps) {
  const { ref: sizer, width } = useWidth();
  const place = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  useEffect(() => {
    if (place.current !== null)
      setTop(Math.round(place.current.getBoundingClientRect().top + window.scrollY));
  }, [width, sections]);
  const numColumns = Math.max(1, Math.min(4, Math.floor((width + ROW_GAP) / LEAST_WIDTH)));
  const lines = useMemo(
    () => (width === 0 ? [] : linesOf(sections, numColumns)),
    [sections, numColumns, width],
  );
  const virtual = useWindowVirtualizer({
    count: lines.length,
    estimateSize: (index) => {
      const line = lines[index];
      return line !== undefined && "section" in line ? HEAD_HEIGHT : CARD_HEIGHT;
    },
    gap: ROW_GAP,
    overscan: 1,
    scrollMargin: top,
    initialRect: { width: window.innerWidth, height: window.innerHeight },
    getItemKey: (index) => lines[index]?.key ?? index,
  });
  return (
    <div ref={sizer}>
      <div ref={place} style={{ position: "relative", height: virtual.getTotalSize() }}>
        {virtual.getVirtualItems().map((item) => {
          const line = lines[item.index];
          if (line === undefined) return null;
          return (
            <div
              key={item.key}
              ref={virtual.measureElement}
              data-index={item.index}
              style={{
                position: "absolute",
                inset: "0 0 auto",
                transform: `translateY(${item.start - top}px)`,
              }}
            >
              {"section" in line ? (
                <SectionHead section={line.section} folded={search.folded ?? NOTHING} />
              ) : (
                <SimpleGrid cols={numColumns} spacing={ROW_GAP}>
                  {line.panels.map((panel) => (
                    <MetricPanel key={panel.id} {...{ panel, rows, search, known, xNames }} />
                  ))}
                </SimpleGrid>
              )}
            </div>
          );
        })}
      </div>
    </div>
  );
}

function SectionHead({ section, folded }: { section: Section; folded: readonly string[] }) {
  const change = useSearchChange();
  const { name, panels, isClosed } = section;
  const Icon = isClosed ? IconChevronRight : IconChevronDown;
  const rest = folded.filter((one) => one !== name);
  const next = rest.length < folded.length ? rest : [...folded, name];
  return (
    <UnstyledButton
      className={classes.section}
      aria-expanded={!isClosed}
      onClick={() => change({ folded: next.length > 0 ? next : undefined })}
    >
      <Icon size={16} aria-hidden /> {name}
      <Text span size="xs" c="dimmed">
        {plural(panels.length, "panel")}
      </Text>
    </UnstyledButton>
  );
}
