/** Reading and writing numbers. */

/** Return the number that the API means, null where there is none. */
export function toNumber(value: unknown): number | null {
  if (typeof value === "number") return value;
  if (typeof value === "object" && value !== null && "$float" in value) {
    const name = String(value.$float);
    if (name === "nan") return NaN;
    if (name === "inf") return Infinity;
    if (name === "-inf") return -Infinity;
  }
  return null;
}

/** Return a number in about five significant digits. */
export function formatNumber(value: number | null | undefined, digits = 5): string {
  if (value === null || value === undefined) return "–";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "-∞";
  // Labels of axes have few digits; elsewhere ids, seeds and times in seconds stay whole.
  if (digits >= 5 ? Number.isSafeInteger(value) : Number.isInteger(value) && Math.abs(value) < 1e9)
    return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(Math.max(0, digits - 3));
  return String(Number(value.toPrecision(digits)));
}

/** Return any reported or configured value as short text. */
export function formatValue(value: unknown): string {
  const number = toNumber(value);
  if (number !== null) return formatNumber(number);
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  return JSON.stringify(value);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

/** Return a size in bytes as people read it. */
export function formatBytes(bytes: number): string {
  let size = bytes;
  let unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? size : size.toFixed(size < 10 ? 1 : 0)} ${UNITS[unit]}`;
}

/** Return a share between 0 and 1 as a percentage. */
export function formatPercent(share: number): string {
  return `${Math.round(share * 100)} %`;
}

/** Return a length in a unit, such as `epochs`, or a metric that counts one, such as `epoch`. */
export function formatLength(length: number, unit: string): string {
  const singular = unit.replace(/(?<=^batch)es$|(?<=^(epoch|record|step))s$/, "");
  const isCounted = /^(batch|epoch|record|step)$/.test(singular);
  const plural = isCounted ? `${singular}${singular === "batch" ? "es" : "s"}` : unit;
  return `${formatNumber(length)} ${length === 1 ? singular : plural}`.trim();
}

/** Return a count with its noun, in the plural where it needs it. */
export function plural(count: number, noun: string): string {
  return `${count.toLocaleString("en-US")} ${noun}${count === 1 ? "" : "s"}`;
}
