/** Output of trials: follows what is printed, filters, searches, finds the first error. */

import {
  ActionIcon,
  Alert,
  Button,
  NumberInput,
  Select,
  Switch,
  Text,
  TextInput,
} from "@mantine/core";
import { useDebouncedCallback } from "@mantine/hooks";
import {
  IconAlertTriangle,
  IconArrowLeft,
  IconArrowsVertical,
  IconDownload,
  IconFilter,
  IconRegex,
  IconSearch,
} from "@tabler/icons-react";
import { useMutation } from "@tanstack/react-query";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useNavigate } from "@tanstack/react-router";
import { useEffect, useRef, useState } from "react";

import { allText, firstError, type LinePlace, type LogSource } from "../api/logs";
import { problemOf } from "../api/problem";
import type { LogLine } from "../api/types";
import { useSearchChange } from "../charts/ChartControls";
import { piecesOf, type Piece } from "../lib/ansi";
import { download } from "../lib/download";
import { plural } from "../lib/numbers";
import type { LogsSearch } from "../lib/search";
import { formatClock, formatTime, localInput } from "../lib/times";
import { Empty, ProblemView, Waiting } from "./Feedback";
import classes from "./LogView.module.css";
import { useLogLines } from "./useLogLines";

interface LogViewProps {
  source: LogSource;
  search: LogsSearch;
  name: string;
  isOf: (event: { experiment_id: number; trial_id: number | null }) => boolean;
  showsTrials?: boolean;
  /** What is to know about these lines. */
  note?: string;
}

export const UNMANAGED_NOTE =
  "What a run without a master prints stays where it was started; here is what is known of its attempts.";
const UNFILTERED = {
  q: undefined,
  regex: undefined,
  level: undefined,
  stream: undefined,
  rank: undefined,
  since: undefined,
  until: undefined,
};
const FILTERS = ["level", "stream", "rank", "since", "until"] as const;
const LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"];

export function LogView({ source, search, name, isOf, showsTrials, note }: LogViewProps) {
  const change = useSearchChange();
  const navigate = useNavigate();
  const [isFollowing, setFollowing] = useState(search.line === undefined);
  const found = useLogLines(source, search, isOf);
  const { lines, numDamaged, numLines, isLoaded, error, hasEarlier, loadEarlier } = found;
  // On a phone the filters open by themselves only where there are some.
  const [isOpen, setOpen] = useState(FILTERS.some((filter) => search[filter] !== undefined));
  const finding = useMutation({
    mutationFn: () => firstError(source),
    onSuccess: (found) => {
      if (found === null) return;
      goTo(found, {});
    },
  });
  const goTo = (place: LinePlace, kept: LogsSearch) => {
    setFollowing(false);
    // Only within one trial can a line be found by its id.
    if (source.after === undefined)
      void navigate({
        to: "/trials/$id/logs",
        params: { id: place.trial },
        search: { ...kept, line: place.line } as never,
      });
    else change({ ...UNFILTERED, ...kept, line: place.line });
  };
  // Going back, or the button, leads to all that was found.
  const showAround = (line: LogLine) => goTo({ trial: line.trial_id, line: line.id }, search);
  const saving = useMutation({
    mutationFn: async () => download(`${name}.log`, await allText(source)),
  });
  const problem = error === null ? null : problemOf(error);
  const isFiltered = (["q", ...FILTERS] as const).some((name) => search[name] !== undefined);
  return (
    <section aria-label="Logs" className={classes.view}>
      {note && (
        <Text size="sm" c="dimmed" mb="sm">
          {note}
        </Text>
      )}
      <div className={classes.controls}>
        <SearchBox
          value={search.q ?? ""}
          isPattern={search.regex ?? false}
          error={problem?.code === "invalid_request" && search.regex ? problem.message : undefined}
          onChange={(q) => change({ q: q || undefined, line: undefined })}
          onPattern={(regex) => change({ regex: regex || undefined, line: undefined })}
        />
        {search.line !== undefined && isFiltered && (
          <Button
            size="xs"
            variant="default"
            leftSection={<IconArrowLeft size={16} />}
            onClick={() => change({ line: undefined })}
          >
            All that was found
          </Button>
        )}
        <Button
          size="xs"
          variant="default"
          className={classes.opener}
          leftSection={<IconFilter size={16} />}
          aria-expanded={isOpen}
          onClick={() => setOpen(!isOpen)}
        >
          Filters
        </Button>
        <div className={classes.filters} data-open={isOpen || undefined}>
          <Select
            aria-label="Lowest level"
            placeholder="Any level"
            size="xs"
            w={130}
            clearable
            data={LEVELS}
            value={search.level ?? null}
            onChange={(level) => change({ level: level ?? undefined, line: undefined })}
          />
          <Select
            aria-label="Stream"
            placeholder="Any stream"
            size="xs"
            w={120}
            clearable
            data={["stdout", "stderr"]}
            value={search.stream ?? null}
            onChange={(stream) => change({ stream: stream ?? undefined, line: undefined })}
          />
          <NumberInput
            aria-label="Rank"
            placeholder="Any rank"
            size="xs"
            w={100}
            min={0}
            value={search.rank ?? ""}
            onChange={(rank) =>
              change({ rank: rank === "" ? undefined : Number(rank), line: undefined })
            }
          />
          <TimeBound
            label="From"
            value={search.since}
            onChange={(since) => change({ since, line: undefined })}
          />
          <TimeBound
            label="Until"
            value={search.until}
            onChange={(until) => change({ until, line: undefined })}
          />
        </div>
        <Button
          size="xs"
          variant="default"
          leftSection={<IconAlertTriangle size={16} />}
          loading={finding.isPending}
          onClick={() => finding.mutate()}
        >
          {finding.isSuccess && finding.data === null ? "No error found" : "First error"}
        </Button>
        <Button
          size="xs"
          variant="default"
          leftSection={<IconDownload size={16} />}
          loading={saving.isPending}
          onClick={() => saving.mutate()}
        >
          Download
        </Button>
        <Switch
          size="sm"
          label="Follow"
          checked={isFollowing}
          onChange={(event) => {
            setFollowing(event.currentTarget.checked);
            if (event.currentTarget.checked) change({ line: undefined });
          }}
        />
        <Text size="xs" c="dimmed" role="status">
          {isLoaded && countText(lines.length, hasEarlier, isFiltered ? undefined : numLines)}
        </Text>
      </div>
      {numDamaged > 0 && (
        <Alert color="yellow" variant="light" mb="sm" p="xs" role="status">
          {plural(numDamaged, "damaged line")} {numDamaged === 1 ? "is" : "are"} left out: the file
          on the master&apos;s disk is not as it was written.
        </Alert>
      )}
      {problem !== null && <ProblemView error={problem} />}
      {!isLoaded && error === null && <Waiting what="logs" />}
      {isLoaded && lines.length === 0 && (
        <Empty title={isFiltered ? "No line matches" : "No output yet"}>
          {isFiltered
            ? "Change or clear the search and the filters."
            : "What the training script prints appears here as it is printed."}
        </Empty>
      )}
      {lines.length > 0 && (
        <Lines
          lines={lines}
          marked={search.regex ? undefined : search.q}
          onAround={isFiltered && search.line === undefined ? showAround : undefined}
          target={search.line}
          isFollowing={isFollowing}
          onFollow={setFollowing}
          onEarlier={hasEarlier ? loadEarlier : undefined}
          showsTrials={showsTrials}
        />
      )}
    </section>
  );
}

function countText(shown: number, hasEarlier: boolean, total: number | undefined): string {
  if (total !== undefined && total > shown)
    return `${hasEarlier ? "The last " : ""}${shown.toLocaleString("en-US")} of ${plural(total, "line")}`;
  return `${hasEarlier ? "The last " : ""}${plural(shown, "line")}`;
}

interface SearchBoxProps {
  value: string;
  isPattern: boolean;
  error: string | undefined;
  onChange: (value: string) => void;
  onPattern: (isPattern: boolean) => void;
}

function SearchBox({ value, isPattern, error, onChange, onPattern }: SearchBoxProps) {
  const [text, setText] = useState(value);
  const tell = useDebouncedCallback(onChange, 300);
  return (
    <TextInput
      aria-label="Search in the logs"
      placeholder={isPattern ? "Regular expression" : "Search"}
      size="xs"
      flex="1 1 160px"
      maw={280}
      aria-invalid={error !== undefined || undefined}
      rightSection={
        <ActionIcon
          size="sm"
          variant={isPattern ? "filled" : "subtle"}
          aria-label="Regular expression"
          title="Regular expression"
          aria-pressed={isPattern}
          onClick={() => onPattern(!isPattern)}
        >
          <IconRegex size={14} />
        </ActionIcon>
      }
      leftSection={<IconSearch size={16} />}
      value={text}
      onChange={(event) => {
        setText(event.currentTarget.value);
        tell(event.currentTarget.value);
      }}
    />
  );
}

interface TimeBoundProps {
  label: string;
  value: number | undefined;
  onChange: (seconds: number | undefined) => void;
}

function TimeBound({ label, value, onChange }: TimeBoundProps) {
  return (
    <TextInput
      type="datetime-local"
      step={1}
      label={label}
      size="xs"
      w={190}
      defaultValue={value === undefined ? "" : localInput(value)}
      onChange={(event) => {
        const time = Date.parse(event.currentTarget.value);
        onChange(Number.isNaN(time) ? undefined : time / 1000);
      }}
    />
  );
}

interface LinesProps {
  lines: readonly LogLine[];
  marked: string | undefined;
  target: number | undefined;
  isFollowing: boolean;
  onFollow: (isFollowing: boolean) => void;
  onEarlier: (() => void) | undefined;
  showsTrials: boolean | undefined;
  /** Shows the lines around one; absent where all lines are shown. */
  onAround: ((line: LogLine) => void) | undefined;
}

const NEAR_END = 30;

function Lines(props: LinesProps) {
  const { lines, marked, target, isFollowing, onFollow, onEarlier, showsTrials, onAround } = props;
  const scroller = useRef<HTMLDivElement>(null);
  const virtual = useVirtualizer({
    count: lines.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => 20,
    overscan: 30,
    getItemKey: (index) => `${lines[index]?.trial_id}-${lines[index]?.id}`,
  });
  // A lower box would hide the newest lines.
  const height = virtual.scrollRect?.height;
  useEffect(() => {
    if (isFollowing) virtual.scrollToIndex(lines.length - 1, { align: "end" });
  }, [lines, isFollowing, virtual, height]);
  const targetIndex = target === undefined ? -1 : lines.findIndex((line) => line.id === target);
  useEffect(() => {
    if (targetIndex >= 0) virtual.scrollToIndex(targetIndex, { align: "center" });
  }, [targetIndex, virtual]);
  const follow = (event: { deltaY: number }) => {
    const element = scroller.current;
    if (element === null) return;
    const below = element.scrollHeight - element.scrollTop - element.clientHeight;
    if (event.deltaY < 0) onFollow(false);
    else if (below < NEAR_END) onFollow(true);
  };
  return (
    <div
      ref={scroller}
      className={classes.scroller}
      tabIndex={0}
      role="log"
      aria-label="Output"
      aria-live="off"
      onWheel={follow}
    >
      {onEarlier && (
        <Button size="compact-xs" variant="subtle" onClick={onEarlier} m={4}>
          Load earlier lines
        </Button>
      )}
      <div style={{ height: virtual.getTotalSize(), position: "relative" }}>
        {virtual.getVirtualItems().map((item) => {
          const line = lines[item.index];
          if (line === undefined) return null;
          return (
            <div
              key={item.key}
              ref={virtual.measureElement}
              data-index={item.index}
              data-level={line.level ?? undefined}
              data-target={line.id === target || undefined}
              className={classes.line}
              style={{ transform: `translateY(${item.start}px)` }}
            >
              <time title={formatTime(line.time)}>{formatClock(line.time)}</time>
              {showsTrials && <span className={classes.rank}>trial {line.trial_id}</span>}
              {line.rank !== null && <span className={classes.rank}>rank {line.rank}</span>}
              <span className={classes.text} data-colored={line.colors ? true : undefined}>
                {piecesOf(line, marked).map((piece, index) => (
                  <LogPiece key={index} piece={piece} />
                ))}
              </span>
              {onAround && (
                <ActionIcon
                  size={20}
                  variant="subtle"
                  className={classes.around}
                  aria-label={`Show the lines around: ${line.text.slice(0, 60)}`}
                  title="Show the lines around"
                  onClick={() => onAround(line)}
                >
                  <IconArrowsVertical size={14} />
                </ActionIcon>
              )}
            </div>
          );
        })}
      </div>
    </div>
  );
}

function LogPiece({ piece }: { piece: Piece }) {
  const { text, isMarked, color, background, isBold, isItalic, isUnderlined } = piece;
  const isPlain = color === undefined && background === undefined;
  const shown = isMarked ? <mark>{text}</mark> : text;
  if (isPlain && !isBold && !isItalic && !isUnderlined) return shown;
  return (
    <span
      className={classes.piece}
      data-color={color}
      data-background={background}
      data-bold={isBold}
      data-italic={isItalic}
      data-underlined={isUnderlined}
    >
      {shown}
    </span>
  );
}
