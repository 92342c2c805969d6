// Prints the compressed size of the first page's JavaScript and fails beyond the budget.
import { readFileSync } from "node:fs";
import { gzipSync } from "node:zlib";

const BUDGET_KB = 300;
const root = process.argv[2] ?? "../src/paceline/_cluster/master/webui";
const manifest = JSON.parse(readFileSync(`${root}/.vite/manifest.json`, "utf8"));

/** Return the files that a chunk needs before it runs. */
function filesOf(name, found = new Set()) {
  const chunk = manifest[name];
  if (found.has(chunk.file)) return found;
  found.add(chunk.file);
  for (const imported of chunk.imports ?? []) filesOf(imported, found);
  return found;
}

const files = filesOf("index.html");
const bytes = [...files].reduce(
  (sum, file) => sum + gzipSync(readFileSync(`${root}/${file}`)).length,
  0,
);
const size = Math.round(bytes / 1024);
process.stdout.write(`First page: ${size} KB of compressed JavaScript (at most ${BUDGET_KB})\n`);
if (size > BUDGET_KB) process.exitCode = 1;
