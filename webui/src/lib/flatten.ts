/** Nested settings as flat ones, and what differs between some. */

/** Return nested objects as one, with dotted names; lists stay values. */
export function flatten(value: unknown, prefix = ""): Record<string, unknown> {
  if (typeof value !== "object" || value === null || Array.isArray(value))
    return prefix === "" ? {} : { [prefix]: value };
  const entries = Object.entries(value);
  if (entries.length === 0) return prefix === "" ? {} : { [prefix]: value };
  const flat: Record<string, unknown> = {};
  for (const [name, inner] of entries)
    Object.assign(flat, flatten(inner, prefix === "" ? name : `${prefix}.${name}`));
  return flat;
}

/** Return the names whose values are not the same in all of `settings`. */
export function differing(settings: readonly Record<string, unknown>[]): Set<string> {
  const names = new Set(settings.flatMap((one) => Object.keys(one)));
  const differ = new Set<string>();
  for (const name of names) {
    const values = new Set(settings.map((one) => JSON.stringify(one[name])));
    if (values.size > 1) differ.add(name);
  }
  return differ;
}
