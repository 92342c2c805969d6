/** Colours and type of the app. */

import { createTheme, type MantineColorsTuple, Menu, Modal } from "@mantine/core";

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

/** Greys with a little blue, as the surfaces in app.css. */
const dark: MantineColorsTuple = [
  "#e4e7ec",
  "#c6ccd6",
  "#a3abb8",
  "#7f8997",
  "#3d4653",
  "#2b323c",
  "#20252d",
  "#14171c",
  "#101318",
  "#0b0d11",
];

export const theme = createTheme({
  primaryColor: "blue",
  primaryShade: { light: 7, dark: 7 },
  colors: { blue, dark },
  autoContrast: true,
  fontFamily:
    'system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif',
  fontFamilyMonospace: 'ui-monospace, SFMono-Regular, Menlo, "DejaVu Sans Mono", monospace',
  defaultRadius: "md",
  cursorType: "pointer",
  components: {
    // Its placeholder is no child that a menu may have; the focus goes to the first entry then.
    Menu: Menu.extend({ defaultProps: { withInitialFocusPlaceholder: false } }),
    Modal: Modal.extend({ defaultProps: { closeButtonProps: { "aria-label": "Close" } } }),
  },
  headings: {
    fontWeight: "650",
    sizes: { h1: { fontSize: "1.5rem" }, h2: { fontSize: "1.1rem" } },
  },
});
