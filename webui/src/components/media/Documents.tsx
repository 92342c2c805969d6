/** Files that are read before they are shown: tables, texts, pages and figures. */

import { Text, TextInput } from "@mantine/core";
import { queryOptions, useQuery } from "@tanstack/react-query";
import plotlyAddress from "plotly.js-cartesian-dist-min/plotly-cartesian.min.js?url";
import { useDeferredValue, useEffect, useMemo, useRef, useState } from "react";

import { fetchText } from "../../api/client";
import { mediaTextQuery } from "../../api/media";
import { type MediaFile, type Table, tableOf } from "../../lib/media";
import { formatValue, plural, toNumber } from "../../lib/numbers";
import { compareValues } from "../../lib/sorting";
import { type Column, DataTable, type Sort, widthFor } from "../DataTable";
import { ProblemView, Quoted } from "../Feedback";
import { TextBox, Unreadable } from "./FileParts";
import classes from "./Media.module.css";

const MIB = 2 ** 20;
const LARGEST_TEXT = MIB;
const LARGEST_PAGE = 8 * MIB;
const LARGEST_FIGURE = 16 * MIB;
const LARGEST_TABLE = 32 * MIB;
const MOST_COLUMNS = 100;
const FEW_ROWS = 8;
const CELL_CHARACTERS = 300;

interface DocumentProps {
  trialId: number;
  file: MediaFile;
  title: string;
}

/** Reads the text of a file; `shown` is what stands there until it is read, or instead. */
function useText({ trialId, file }: DocumentProps, maxBytes: number) {
  const answer = useQuery(mediaTextQuery(trialId, file, maxBytes));
  const shown = answer.isError ? (
    <ProblemView error={answer.error} onRetry={() => void answer.refetch()} />
  ) : (
    <Loading />
  );
  return { text: answer.data, shown };
}

function Loading() {
  return (
    <Text size="sm" c="dimmed" role="status">
      Loading …
    </Text>
  );
}

export function TextOf(props: DocumentProps) {
  const { text, shown } = useText(props, LARGEST_TEXT);
  return text === undefined ? shown : <TextBox label={props.title} text={text} />;
}

/** A page may show what it brings along; whatever it wants to load or run, it cannot. */
const PAGE_HEAD =
  '<!doctype html><meta http-equiv="Content-Security-Policy" content="default-src \'none\';' +
  " style-src 'unsafe-inline'; img-src data:; media-src data:; font-src data:\">";

export function Page(props: DocumentProps) {
  const { text, shown } = useText(props, LARGEST_PAGE);
  if (text === undefined) return shown;
  return (
    <>
      <iframe
        className={classes.frame}
        title={props.title}
        sandbox=""
        referrerPolicy="no-referrer"
        srcDoc={PAGE_HEAD + text}
      />
      {/<script/i.test(text) && (
        <Text size="xs" c="dimmed">
          Scripts of this page do not run here. Download it to see all of it.
        </Text>
      )}
    </>
  );
}

export function TableOf(props: DocumentProps) {
  const { text, shown } = useText(props, LARGEST_TABLE);
  const table = useMemo(() => (text === undefined ? null : tableOf(text)), [text]);
  if (text === undefined) return shown;
  if (table === null) return <Unreadable what="table" />;
  return <TableView table={table} title={props.title} />;
}

type Row = readonly [index: number, cells: readonly unknown[]];

function TableView({ table, title }: { table: Table; title: string }) {
  const [sort, setSort] = useState<Sort | undefined>();
  const [filter, setFilter] = useState("");
  const wanted = useDeferredValue(filter.toLowerCase());
  const columns = useMemo(() => columnsOf(table), [table]);
  const rows = useMemo(() => table.rows.map((cells, i): Row => [i, cells]), [table]);
  const matching = useMemo(
    () =>
      wanted === ""
        ? rows
        : rows.filter(([, cells]) =>
            cells.some((cell) => formatValue(cell).toLowerCase().includes(wanted)),
          ),
    [rows, wanted],
  );
  const sorted = useMemo(() => {
    if (sort === undefined) return matching;
    const by = Number(sort.by);
    return matching.toSorted(([, a], [, b]) => compareValues(a[by], b[by], sort.isDescending));
  }, [matching, sort]);
  return (
    <>
      {rows.length > FEW_ROWS && (
        <TextInput
          size="xs"
          aria-label={`Filter the rows of ${title}`}
          placeholder="Filter the rows"
          value={filter}
          onChange={(event) => setFilter(event.currentTarget.value)}
        />
      )}
      <DataTable
        label={title}
        rows={sorted}
        columns={columns}
        rowId={([index]) => String(index)}
        sort={sort}
        onSort={setSort}
        maxHeight="330px"
      />
      <Text size="xs" c="dimmed" role="status">
        {sorted.length < rows.length
          ? `${sorted.length.toLocaleString("en-US")} of ${plural(rows.length, "row")}`
          : plural(rows.length, "row")}
        {columns.length < table.columns.length &&
          `; the first ${columns.length} of ${plural(table.columns.length, "column")}`}
      </Text>
    </>
  );
}

function columnsOf({ columns, rows }: Table): Column<Row>[] {
  return columns.slice(0, MOST_COLUMNS).map((title, i) => ({
    id: String(i),
    title,
    width: widthFor(title, 90),
    doesGrow: true,
    isSortable: true,
    isNumeric: rows.length > 0 && rows.slice(0, FEW_ROWS).every((row) => toNumber(row[i]) !== null),
    cell: ([, cells]) => {
      const text = formatValue(cells[i]);
      return <span title={text.slice(0, 2000)}>{text.slice(0, CELL_CHARACTERS)}</span>;
    },
  }));
}

const plotlyQuery = queryOptions({
  queryKey: ["plotly"],
  queryFn: () => fetchText(plotlyAddress),
  staleTime: Infinity,
});

/**
 * A figure of Plotly. What draws it is loaded for the first one, and runs in a frame without an
 * origin: a figure is a stranger's.
 */
export function Figure(props: DocumentProps) {
  const { text, shown } = useText(props, LARGEST_FIGURE);
  const frame = useRef<HTMLIFrameElement>(null);
  const [said, setSaid] = useState<string | null>(null);
  const [isReady, setIsReady] = useState(false);
  const code = useQuery(plotlyQuery);
  useEffect(() => {
    const listen = ({ source, data }: MessageEvent) => {
      if (source === null || source !== frame.current?.contentWindow) return;
      if (data === "ready") setIsReady(true);
      else setSaid(String(data).slice(0, 500));
    };
    window.addEventListener("message", listen);
    return () => window.removeEventListener("message", listen);
  }, []);
  useEffect(() => {
    if (isReady && text !== undefined && code.data !== undefined)
      frame.current?.contentWindow?.postMessage({ code: code.data, figure: text }, "*");
  }, [isReady, text, code.data]);
  if (text === undefined) return shown;
  const hasFailed = said !== null && said !== "drawn";
  if (code.isError) return <ProblemView error={code.error} onRetry={() => void code.refetch()} />;
  return (
    <>
      {said === null && <Loading />}
      {hasFailed && (
        <Text size="sm" role="note" className="wrap-anywhere">
          The figure cannot be drawn here: <Quoted text={said} /> Download it to see it.
        </Text>
      )}
      <iframe
        ref={frame}
        className={classes.frame}
        title={props.title}
        sandbox="allow-scripts"
        src="/figure.html"
        hidden={hasFailed}
      />
    </>
  );
}
