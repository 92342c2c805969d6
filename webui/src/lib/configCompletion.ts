/** Completion of a config from its JSON Schema. */

import type { CompletionContext, CompletionResult } from "@codemirror/autocomplete";

export interface Schema {
  properties?: Record<string, Schema>;
  $ref?: string;
  $defs?: Record<string, Schema>;
  anyOf?: Schema[];
  oneOf?: Schema[];
  allOf?: Schema[];
  additionalProperties?: Schema | boolean;
  enum?: unknown[];
  const?: unknown;
  type?: string;
  description?: string;
  deprecated?: boolean;
}

/** Return the names of the mappings around a line of YAML, by their indentation. */
export function pathAt(lines: readonly string[]): string[] {
  const path: string[] = [];
  const last = lines.at(-1) ?? "";
  let indent = last.length - last.trimStart().length;
  for (const line of lines.slice(0, -1).toReversed()) {
    if (line.trim() === "" || line.trimStart().startsWith("#")) continue;
    const depth = line.length - line.trimStart().length;
    const name = /^\s*([\w.-]+):\s*(#.*)?$/.exec(line)?.[1];
    if (depth < indent && name !== undefined) {
      path.unshift(name);
      indent = depth;
    }
  }
  return path;
}

/** Return all schemas that `schema` may stand for, references resolved. */
function alternatives(schema: Schema, root: Schema): Schema[] {
  if (schema.$ref !== undefined) {
    const found = root.$defs?.[schema.$ref.replace("#/$defs/", "")];
    return found === undefined ? [] : alternatives(found, root);
  }
  const nested = [...(schema.anyOf ?? []), ...(schema.oneOf ?? []), ...(schema.allOf ?? [])];
  return [schema, ...nested.flatMap((one) => alternatives(one, root))];
}

/** Return the schemas of what stands at a path. */
export function schemasAt(root: Schema, path: readonly string[]): Schema[] {
  let found = alternatives(root, root);
  for (const name of path)
    found = found.flatMap((schema) => {
      const rest =
        typeof schema.additionalProperties === "object" ? schema.additionalProperties : null;
      const child = schema.properties?.[name] ?? rest;
      return child === null ? [] : alternatives(child, root);
    });
  return found;
}

function choicesOf(schemas: readonly Schema[]): string[] {
  const values = schemas.flatMap((schema) => [
    ...(schema.enum ?? []),
    ...(schema.const === undefined ? [] : [schema.const]),
    ...(schema.type === "boolean" ? [true, false] : []),
  ]);
  return [...new Set(values.map(String))];
}

/** Return a completion source for a config in YAML. */
export function completeConfig(root: Schema) {
  return (context: CompletionContext): CompletionResult | null => {
    const before = context.state.doc.sliceString(0, context.pos).split("\n");
    const line = before.at(-1) ?? "";
    const value = /^\s*([\w.-]+):\s+([\w.-]*)$/.exec(line);
    const path = pathAt(before);
    if (value) {
      const [, name = "", typed = ""] = value;
      const options = choicesOf(schemasAt(root, [...path, name])).map((label) => ({ label }));
      return options.length > 0 ? { from: context.pos - typed.length, options } : null;
    }
    const key = /^\s*([\w-]*)$/.exec(line);
    if (key === null || (key[1] === "" && !context.explicit)) return null;
    const fields = new Map<string, Schema>();
    for (const schema of schemasAt(root, path))
      for (const [name, child] of Object.entries(schema.properties ?? {})) fields.set(name, child);
    const options = [...fields].map(([label, { description, deprecated }]) => ({
      label,
      info: description,
      apply: `${label}: `,
      // What has no effect any more comes last.
      boost: deprecated ? -99 : 0,
    }));
    return { from: context.pos - (key[1]?.length ?? 0), options };
  };
}
