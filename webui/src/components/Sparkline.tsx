/** The outline of a metric in a row of a table. */

import { useQuery } from "@tanstack/react-query";

import { sparkQuery } from "../api/series";
import { formatNumber } from "../lib/numbers";
import { useReady } from "../lib/ready";

const WIDTH = 76;
const HEIGHT = 22;
const EDGE = 2;
/** Rows that are scrolled past are not read. */
const READY_MS = 120;

interface SparklineProps {
  trialId: number | null | undefined;
  metric: string | null;
}

/** Draw the metric that a search goes by, of one trial; nothing before it is reported. */
export function Sparkline({ trialId, metric }: SparklineProps) {
  const isReady = useReady(READY_MS);
  if (!isReady || typeof trialId !== "number" || metric === null) return null;
  return <Outline trialId={trialId} metric={metric} />;
}

/** Only rows that stay follow a query: one for each row that passes would slow the scrolling. */
function Outline({ trialId, metric }: { trialId: number; metric: string }) {
  const { data } = useQuery(sparkQuery({ trialId, group: "validation", metric }));
  const path = data ? sparkPath(data.xs, data.ys) : "";
  if (path === "" || !data) return null;
  const known = data.ys.filter((y) => y !== null);
  const ends = [known[0], known.at(-1)].map((y) => formatNumber(y));
  return (
    <svg
      width={WIDTH}
      height={HEIGHT}
      role="img"
      aria-label={`${metric} from ${ends[0]} to ${ends[1]}`}
    >
      <path d={path} fill="none" stroke="currentColor" strokeWidth="1.25" />
    </svg>
  );
}

/** Return the path of a curve in the box of a sparkline, with gaps where nothing was reported. */
export function sparkPath(xs: readonly number[], ys: readonly (number | null)[]): string {
  const points = xs.flatMap((x, i) => [{ x, y: ys[i] ?? null }]);
  const known = points.flatMap(({ y }) => (y === null ? [] : [y]));
  if (known.length < 2) return "";
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const [first, last] = [xs[0] ?? 0, xs.at(-1) ?? 0];
  const place = (value: number, from: number, to: number, size: number) =>
    EDGE + (to > from ? (value - from) / (to - from) : 0.5) * (size - 2 * EDGE);
  let command = "M";
  return points
    .flatMap(({ x, y }) => {
      if (y === null) {
        command = "M";
        return [];
      }
      const right = place(x, first, last, WIDTH).toFixed(1);
      const down = (HEIGHT - place(y, low, high, HEIGHT)).toFixed(1);
      const text = `${command}${right} ${down}`;
      command = "L";
      return [text];
    })
    .join("");
}
