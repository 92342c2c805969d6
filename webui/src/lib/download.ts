/** Handing files to the browser. */

/** Store text as a file. */
export function download(name: string, text: string, type = "text/plain"): void {
  const address = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
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
