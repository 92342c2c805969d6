/** Colours and type of the app. */

import { createTheme, type MantineColorsTuple, Modal } from "@mantine/core";

const blue: MantineColorsTuple = [
  "#eef3fd",
  "#dce5f8",
  "#b6c9f0",
  "#8dabe8",
  "#6b92e2",
  "#5682de",
  "#3f6fd8",
  "#2456c7",
  "#1f4db4",
  "#15429f",
];

export const theme = createTheme({
  primaryColor: "blue",
  primaryShade: { light: 7, dark: 7 },
  colors: { blue },
  autoContrast: true,
  fontFamily:
    'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif',
  fontFamilyMonospace: 'ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace',
  defaultRadius: "md",
  cursorType: "pointer",
  components: {
    Modal: Modal.extend({ defaultProps: { closeButtonProps: { "aria-label": "Close" } } }),
  },
  headings: {
    fontWeight: "650",
    sizes: { h1: { fontSize: "1.5rem" }, h2: { fontSize: "1.1rem" } },
  },
});
