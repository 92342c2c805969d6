/** Handing files to the browser. */

/** Store text, or other content, as a file. */
export function download(name: string, content: string | Blob, type = "text/plain"): void {
  const file =
    content instanceof Blob ? content : new Blob([content], { type: `${type};charset=utf-8` });
  const address = URL.createObjectURL(file);
  downloadFrom(name, address);
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

/** Store what lies at an address as a file, while it comes. */
export function downloadFrom(name: string, address: string): void {
  const link = document.createElement("a");
  link.href = address;
  link.download = name.replaceAll(/[^\w.-]+/g, "-");
  link.click();
}
