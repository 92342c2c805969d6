/** A table that stays smooth with tens of thousands of rows. */

import { Checkbox, UnstyledButton } from "@mantine/core";
import { IconArrowDown, IconArrowUp } from "@tabler/icons-react";
import { createColumnHelper, tableFeatures, useTable } from "@tanstack/react-table";
import { useVirtualizer } from "@tanstack/react-virtual";
import { memo, type ReactNode, useCallback, useEffect, useMemo, useRef } from "react";

import { useIsPhone } from "../lib/width";
import classes from "./DataTable.module.css";

const features = tableFeatures({});
const ROW_HEIGHT = 41;
const NEAR_END = 40;

export interface Column<Row> {
  id: string;
  title: string;
  width: number;
  /** On a phone, where it is to leave room for the next columns. */
  narrowWidth?: number;
  /** Takes what is left of the width. */
  doesGrow?: boolean;
  /** Stays in sight while the others scroll sideways. */
  isPinned?: boolean;
  isNumeric?: boolean;
  isSortable?: boolean;
  cell: (row: Row) => ReactNode;
}

export interface Sort {
  by: string;
  isDescending: boolean;
}

interface DataTableProps<Row> {
  label: string;
  rows: readonly Row[];
  columns: readonly Column<Row>[];
  rowId: (row: Row) => string;
  rowLabel?: (row: Row) => string;
  sort?: Sort;
  onSort?: (sort: Sort) => void;
  selected?: ReadonlySet<string>;
  onSelect?: (selected: Set<string>) => void;
  onNearEnd?: () => void;
  maxHeight?: string;
  highlighted?: string;
}

/** Return a width in which a title can be read, at least `least` and not too much. */
export function widthFor(title: string, least: number): number {
  return Math.max(least, Math.min(150, 8 * title.length + 16));
}

function classOf<Row>(column: Column<Row>): string {
  const pinned = column.isPinned ? classes.pinned : "";
  return `${classes.cell} ${column.isNumeric ? classes.numeric : ""} ${pinned}`;
}

export function DataTable<Row extends object>(props: DataTableProps<Row>) {
  const { label, rows, columns, rowId, selected, onSelect, onNearEnd, highlighted } = props;
  const scroller = useRef<HTMLDivElement>(null);
  const data = useMemo(() => [...rows], [rows]);
  const definitions = useMemo(() => {
    const helper = createColumnHelper<typeof features, Row>();
    return columns.map((column) =>
      helper.display({ id: column.id, header: column.title, meta: {} }),
    );
  }, [columns]);
  const table = useTable({
    features,
    columns: definitions,
    data,
    getRowId: (row: Row) => rowId(row),
  });
  const tableRows = table.getRowModel().rows;
  const virtual = useVirtualizer({
    count: tableRows.length,
    getScrollElement: () => scroller.current,
    estimateSize: () => ROW_HEIGHT,
    overscan: 8,
  });
  const items = virtual.getVirtualItems();
  const lastShown = items.at(-1)?.index ?? 0;
  useEffect(() => {
    if (onNearEnd && lastShown >= tableRows.length - NEAR_END) onNearEnd();
  }, [lastShown, tableRows.length, onNearEnd]);

  const toggle = useCallback(
    (id: string) => onSelect?.(toggled(selected ?? new Set(), id)),
    [onSelect, selected],
  );
  const isNarrow = useIsPhone();
  const widthOf = (column: Column<Row>) => (isNarrow && column.narrowWidth) || column.width;
  const template = [
    ...(onSelect ? ["44px"] : []),
    ...columns.map((column) =>
      column.doesGrow ? `minmax(${widthOf(column)}px, 1fr)` : `${widthOf(column)}px`,
    ),
  ].join(" ");
  const total = columns.reduce((sum, column) => sum + widthOf(column), onSelect ? 44 : 0);

  return (
    <div
      ref={scroller}
      className={classes.scroller}
      style={{ maxHeight: props.maxHeight ?? "calc(100dvh - 250px)" }}
      onScroll={({ currentTarget: shown }) =>
        shown.toggleAttribute("data-scrolled", shown.scrollLeft > 0)
      }
      tabIndex={0}
      role="region"
      aria-label={label}
    >
      <div
        role="table"
        aria-label={label}
        aria-rowcount={rows.length + 1}
        style={{ minWidth: total }}
      >
        <Head
          {...{ columns, template, rows, rowId, selected, onSelect }}
          sort={props.sort}
          onSort={props.onSort}
        />
        <div role="rowgroup" style={{ height: virtual.getTotalSize(), position: "relative" }}>
          {items.map((item) => {
            const row = tableRows[item.index];
            if (row === undefined) return null;
            const original = row.original as Row;
            return (
              <BodyRow
                key={row.id}
                id={row.id}
                row={original}
                index={item.index}
                start={item.start}
                size={item.size}
                columns={columns}
                template={template}
                isHighlighted={row.id === highlighted}
                isSelected={selected?.has(row.id) ?? false}
                label={props.rowLabel?.(original) ?? row.id}
                onToggle={onSelect ? toggle : undefined}
              />
            );
          })}
        </div>
      </div>
    </div>
  );
}

type HeadProps<Row> = Pick<
  DataTableProps<Row>,
  "rows" | "columns" | "rowId" | "selected" | "onSelect" | "sort" | "onSort"
> & { template: string };

/** While one scrolls, the head stays as it is. */
const Head = memo(function Head<Row>(props: HeadProps<Row>) {
  const { rows, columns, rowId, selected, onSelect, sort, onSort } = props;
  const isAll = selected !== undefined && rows.length > 0 && selected.size >= rows.length;
  return (
    <div role="rowgroup" className={classes.head}>
      <div role="row" className={classes.row} style={{ gridTemplateColumns: props.template }}>
        {onSelect && (
          <div role="columnheader" className={classes.cell}>
            <Checkbox
              size="xs"
              aria-label="Select all rows that are loaded"
              checked={isAll}
              indeterminate={!isAll && (selected?.size ?? 0) > 0}
              onChange={() => onSelect(isAll ? new Set() : new Set(rows.map(rowId)))}
            />
          </div>
        )}
        {columns.map((column) => (
          <HeaderCell key={column.id} {...{ column, sort, onSort }} />
        ))}
      </div>
    </div>
  );
}) as <Row>(props: HeadProps<Row>) => ReactNode;

interface BodyRowProps<Row> {
  id: string;
  row: Row;
  index: number;
  start: number;
  size: number;
  columns: readonly Column<Row>[];
  template: string;
  isHighlighted: boolean;
  isSelected: boolean;
  label: string;
  onToggle: ((id: string) => void) | undefined;
}

/** While one scrolls, rows that stay on the screen are not drawn again. */
const BodyRow = memo(function BodyRow<Row>(props: BodyRowProps<Row>) {
  const { id, row, columns, onToggle } = props;
  return (
    <div
      role="row"
      aria-rowindex={props.index + 2}
      className={classes.row}
      data-highlighted={props.isHighlighted || undefined}
      style={{
        gridTemplateColumns: props.template,
        position: "absolute",
        top: 0,
        left: 0,
        right: 0,
        height: props.size,
        transform: `translateY(${props.start}px)`,
      }}
    >
      {onToggle && (
        <div role="cell" className={classes.cell}>
          <input
            type="checkbox"
            className={classes.check}
            aria-label={`Select ${props.label}`}
            checked={props.isSelected}
            onChange={() => onToggle(id)}
          />
        </div>
      )}
      {columns.map((column) => (
        <div key={column.id} role="cell" className={classOf(column)}>
          {column.cell(row)}
        </div>
      ))}
    </div>
  );
}) as <Row>(props: BodyRowProps<Row>) => ReactNode;

function toggled(selected: ReadonlySet<string>, id: string): Set<string> {
  const next = new Set(selected);
  if (!next.delete(id)) next.add(id);
  return next;
}

interface HeaderCellProps<Row> {
  column: Column<Row>;
  sort: Sort | undefined;
  onSort: ((sort: Sort) => void) | undefined;
}

function HeaderCell<Row>({ column, sort, onSort }: HeaderCellProps<Row>) {
  const isSorted = sort?.by === column.id;
  const className = classOf(column);
  if (!column.isSortable || !onSort)
    return (
      <div role="columnheader" className={className} title={column.title}>
        <span className={classes.title}>{column.title}</span>
      </div>
    );
  const order = isSorted ? (sort.isDescending ? "descending" : "ascending") : "none";
  return (
    <div role="columnheader" aria-sort={order} className={className} title={column.title}>
      <UnstyledButton
        className={classes.sorter}
        onClick={() =>
          onSort({ by: column.id, isDescending: isSorted ? !sort.isDescending : false })
        }
      >
        <span className={classes.title}>{column.title}</span>
        {isSorted &&
          (sort.isDescending ? (
            <IconArrowDown size={14} aria-hidden />
          ) : (
            <IconArrowUp size={14} aria-hidden />
          ))}
      </UnstyledButton>
    </div>
  );
}
