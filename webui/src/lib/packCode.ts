/** Packing a directory that was chosen in the browser as the master takes it: a gzipped tar file. */

export interface CodeFile {
  /** Below the chosen directory. */
  path: string;
  content: Blob;
}

const BLOCK = 512;
const NAME_BYTES = 100;
const PREFIX_BYTES = 155;
const LEFT_OUT = /(^|\/)(\.git|\.venv|venv|node_modules|__pycache__|\.mypy_cache)\//;

/** Return the files of a choice of a directory, without those that no training needs. */
export function filesOf(list: readonly File[]): CodeFile[] {
  return list
    .map((file) => ({
      path: file.webkitRelativePath.slice(file.webkitRelativePath.indexOf("/") + 1),
      content: file,
    }))
    .filter(({ path }) => !LEFT_OUT.test(path))
    .sort((a, b) => (a.path < b.path ? -1 : 1));
}

const encoder = new TextEncoder();

/** Return name and prefix of a header; a long path is divided at a slash. */
function namesOf(path: string): [Uint8Array, Uint8Array] {
  const whole = encoder.encode(path);
  if (whole.length <= NAME_BYTES) return [whole, new Uint8Array()];
  for (let at = path.indexOf("/"); at !== -1; at = path.indexOf("/", at + 1)) {
    const [prefix, name] = [encoder.encode(path.slice(0, at)), encoder.encode(path.slice(at + 1))];
    if (name.length <= NAME_BYTES && prefix.length <= PREFIX_BYTES) return [name, prefix];
  }
  throw new Error(`A file's name must have at most 100 bytes and its path 255, but got ${path}.`);
}

function headerOf(path: string, size: number): Uint8Array<ArrayBuffer> {
  const header = new Uint8Array(BLOCK);
  const [name, prefix] = namesOf(path);
  const put = (text: string, at: number) => header.set(encoder.encode(text), at);
  const octal = (value: number, digits: number) => `${value.toString(8).padStart(digits, "0")}\0`;
  header.set(name, 0);
  put(octal(0o644, 7), 100);
  put(octal(0, 7), 108);
  put(octal(0, 7), 116);
  put(octal(size, 11), 124);
  put(octal(0, 11), 136);
  put(" ".repeat(8), 148);
  put("0", 156);
  put("ustar\x0000", 257);
  header.set(prefix, 345);
  const sum = header.reduce((total, byte) => total + byte, 0);
  put(`${octal(sum, 6)} `, 148);
  return header;
}

/** Return the files as one gzipped tar file. */
export async function packCode(files: readonly CodeFile[]): Promise<ArrayBuffer> {
  const parts = files.flatMap(({ path, content }) => [
    headerOf(path, content.size),
    content,
    new Uint8Array((BLOCK - (content.size % BLOCK)) % BLOCK),
  ]);
  const tar = new Blob([...parts, new Uint8Array(2 * BLOCK)]);
  return new Response(tar.stream().pipeThrough(new CompressionStream("gzip"))).arrayBuffer();
}

/** Return the digest under which the master keeps packed code. */
export async function digestOf(packed: ArrayBuffer): Promise<string> {
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", packed));
  return [...digest].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}
