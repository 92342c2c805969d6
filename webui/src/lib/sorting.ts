/** Sorting rows by any value; what has no value comes last either way. */

import { toNumber } from "./numbers";

export function compareValues(a: unknown, b: unknown, isDescending: boolean): number {
  const left = comparable(a);
  const right = comparable(b);
  if (left === null || right === null) return Number(left === null) - Number(right === null);
  const order =
    typeof left === "number" && typeof right === "number"
      ? left - right
      : String(left).localeCompare(String(right), "en", { numeric: true });
  return isDescending ? -order : order;
}

function comparable(value: unknown): number | string | null {
  const number = toNumber(value);
  if (number !== null) return Number.isNaN(number) ? null : number;
  if (value === null || value === undefined) return null;
  return typeof value === "string" ? value : JSON.stringify(value);
}
