/** Conditions on the columns of the experiment table, as the API and the address have them. */

export const OPERATORS = [
  "<",
  "<=",
  ">",
  ">=",
  "=",
  "!=",
  "contains",
  "empty",
  "not empty",
] as const;
export type Operator = (typeof OPERATORS)[number];

/** Column, operator, and the value unless it is about emptiness. */
export type Condition = [string, Operator] | [string, Operator, number | string | boolean];

const NEEDS_NUMBER = new Set<Operator>(["<", "<=", ">", ">="]);

/** Tell whether a condition compares to a value. */
export function needsValue(operator: Operator): boolean {
  return operator !== "empty" && operator !== "not empty";
}

/** Return a condition from what was typed; null while it makes no sense. */
export function conditionFrom(column: string, operator: Operator, typed: string): Condition | null {
  if (column === "") return null;
  if (!needsValue(operator)) return [column, operator];
  const text = typed.trim();
  if (text === "") return null;
  const number = Number(text);
  if (operator !== "contains" && Number.isFinite(number)) return [column, operator, number];
  if (NEEDS_NUMBER.has(operator)) return null;
  if (operator !== "contains" && (text === "true" || text === "false"))
    return [column, operator, text === "true"];
  return [column, operator, text];
}

/** Return the conditions of an address; what is none is left out. */
export function conditions(raw: unknown): Condition[] | undefined {
  if (!Array.isArray(raw)) return undefined;
  const found = raw.filter((one: unknown): one is Condition => {
    if (!Array.isArray(one)) return false;
    const [column, operator, value] = one as unknown[];
    return (
      typeof column === "string" &&
      OPERATORS.includes(operator as Operator) &&
      (value === undefined || ["number", "string", "boolean"].includes(typeof value))
    );
  });
  return found.length > 0 ? found : undefined;
}
