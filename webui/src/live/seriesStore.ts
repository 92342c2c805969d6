/** Series of points that grow: each is read once, and then only what is new. */

export interface SeriesName {
  trialId: number;
  group: string;
  metric: string;
}

export interface Points {
  xs: number[];
  ys: (number | null)[];
  steps: number[];
  /** The moving average at each point; empty if none was asked for. */
  smoothed: (number | null)[];
  lastStep: number;
  isSampled: boolean;
}

export interface Span {
  min: number;
  max: number;
}

export interface Wanted extends SeriesName {
  /** Only points beyond this step; -1 for all. */
  afterStep: number;
}

/** Reads points; `smoothing` is the extent of the moving average in steps, null for none. */
export type ReadPoints = (
  wanted: readonly Wanted[],
  span: Span | null,
  smoothing: number | null,
) => Promise<Points[]>;

interface Entry {
  name: SeriesName;
  whole: Points | null;
  /** How `whole` was smoothed. */
  smoothing: number | null;
  /** Finer points of the part that is zoomed into. */
  part: Points | null;
}

export interface SeriesView {
  points: ReadonlyMap<string, Points>;
  isPending: boolean;
  error: unknown;
}

const PERIOD_MS = 1000;
const CHUNK = 100;

export function seriesId({ trialId, group, metric }: SeriesName): string {
  return `${trialId}/${group}/${metric}`;
}

/** Return points with later ones behind them. */
export function appended(known: Points, added: Points): Points {
  const from = added.steps.findIndex((step) => step > known.lastStep);
  if (from < 0) return { ...known, lastStep: Math.max(known.lastStep, added.lastStep) };
  const isSmoothed = [known, added].every((one) => one.smoothed.length === one.xs.length);
  return {
    xs: [...known.xs, ...added.xs.slice(from)],
    ys: [...known.ys, ...added.ys.slice(from)],
    steps: [...known.steps, ...added.steps.slice(from)],
    smoothed: isSmoothed ? [...known.smoothed, ...added.smoothed.slice(from)] : [],
    lastStep: Math.max(known.lastStep, added.lastStep),
    isSampled: known.isSampled,
  };
}

export class SeriesStore {
  private readonly entries = new Map<string, Entry>();
  private readonly dirty = new Set<number>();
  private readonly restarted = new Set<number>();
  private zoom: Span | null = null;
  private timer: ReturnType<typeof setTimeout> | null = null;
  private isReading = false;
  private isClosed = false;
  private error: unknown;

  constructor(
    private readonly read: ReadPoints,
    private readonly maxPoints: number,
    private readonly onChange: (view: SeriesView) => void,
    private smoothing: number | null = null,
  ) {}

  /** Say which series are wanted; those that are known already are kept. */
  want(names: readonly SeriesName[]): void {
    const ids = new Set(names.map(seriesId));
    for (const id of this.entries.keys()) if (!ids.has(id)) this.entries.delete(id);
    for (const name of names) {
      const id = seriesId(name);
      if (!this.entries.has(id))
        this.entries.set(id, { name, whole: null, smoothing: null, part: null });
    }
    this.tell();
    void this.update();
  }

  /** Say which part is looked at; where points were left out, it is read in more detail. */
  async lookAt(zoom: Span | null): Promise<void> {
    this.zoom = zoom;
    for (const entry of this.entries.values()) entry.part = null;
    this.tell();
    if (zoom === null) return;
    const coarse = [...this.entries.values()].filter((entry) => entry.whole?.isSampled === true);
    await this.fetch(coarse, zoom, (entry, points, smoothing) => {
      if (this.zoom === zoom && this.smoothing === smoothing) entry.part = points;
    });
  }

  /** Say how all series are smoothed; what is known stays until it is read anew. */
  smoothBy(smoothing: number | null): void {
    if (smoothing === this.smoothing) return;
    this.smoothing = smoothing;
    // Points that are smoothed have their values as reported, too.
    if (smoothing === null) return;
    void this.update();
    if (this.zoom !== null) void this.lookAt(this.zoom);
  }

  /** Say that a trial has reported more; after a restart it may have reported steps anew. */
  note(trialId: number, hasRestarted = false): void {
    this.dirty.add(trialId);
    if (hasRestarted) this.restarted.add(trialId);
    this.timer ??= setTimeout(() => void this.update(), PERIOD_MS);
  }

  /** Say that any trial may have reported more. */
  noteAll(): void {
    for (const { name } of this.entries.values()) this.note(name.trialId);
  }

  close(): void {
    this.isClosed = true;
    if (this.timer !== null) clearTimeout(this.timer);
  }

  private async update(): Promise<void> {
    if (this.timer !== null) clearTimeout(this.timer);
    this.timer = null;
    if (this.isReading) {
      this.timer = setTimeout(() => void this.update(), PERIOD_MS);
      return;
    }
    this.isReading = true;
    const changed = [...this.entries.values()].filter(({ name }) => this.dirty.has(name.trialId));
    for (const entry of changed)
      if (this.restarted.has(entry.name.trialId)) entry.whole = entry.part = null;
    this.dirty.clear();
    this.restarted.clear();
    const isLong = ({ whole }: Entry) => whole !== null && whole.xs.length > 2 * this.maxPoints;
    const isOther = (entry: Entry) => this.smoothing !== null && entry.smoothing !== this.smoothing;
    const anew = [...this.entries.values()].filter(
      (entry) =>
        entry.whole === null || isOther(entry) || (changed.includes(entry) && isLong(entry)),
    );
    const grown = changed.filter((entry) => !anew.includes(entry));
    await this.fetch(anew, null, (entry, points, smoothing) => {
      entry.whole = points;
      entry.smoothing = smoothing;
    });
    await this.fetch(
      grown,
      null,
      (entry, points, smoothing) => {
        if (entry.whole === null) return;
        if (smoothing !== entry.smoothing) entry.smoothing = null;
        // Steps were taken back: what is known may no longer hold.
        if (points.lastStep < entry.whole.lastStep) this.note(entry.name.trialId, true);
        else entry.whole = appended(entry.whole, points);
      },
      true,
    );
    this.isReading = false;
  }

  private async fetch(
    entries: readonly Entry[],
    span: Span | null,
    take: (entry: Entry, points: Points, smoothing: number | null) => void,
    onlyNew = false,
  ): Promise<void> {
    for (let from = 0; from < entries.length && !this.isClosed; from += CHUNK) {
      const chunk = entries.slice(from, from + CHUNK);
      const { smoothing } = this;
      try {
        const wanted = chunk.map(({ name, whole }) => ({
          ...name,
          afterStep: onlyNew ? (whole?.lastStep ?? -1) : -1,
        }));
        const found = await this.read(wanted, span, smoothing);
        this.error = undefined;
        chunk.forEach((entry, i) => {
          const points = found[i];
          if (points !== undefined) take(entry, points, smoothing);
        });
      } catch (error) {
        this.error = error;
        for (const { name } of chunk) this.dirty.add(name.trialId);
      }
      this.tell();
    }
  }

  private tell(): void {
    if (this.isClosed) return;
    const points = new Map<string, Points>();
    let isPending = false;
    for (const [id, { whole, part }] of this.entries) {
      if (whole === null) isPending = true;
      else points.set(id, part === null ? whole : appended(part, whole));
    }
    this.onChange({ points, isPending: isPending && this.error === undefined, error: this.error });
  }
}
