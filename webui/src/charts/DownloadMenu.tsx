/** What a chart shows, as a table or as a picture. */

import { Menu } from "@mantine/core";
import { notifications } from "@mantine/notifications";
import { IconDownload } from "@tabler/icons-react";

import { LazyMenu } from "../components/LazyMenu";
import { download } from "../lib/download";

interface DownloadMenuProps {
  title: string;
  csvName: string;
  onCsv: () => void;
  /** Returns the chart as an SVG file. */
  drawn: () => Promise<string>;
}

export function DownloadMenu({ title, csvName, onCsv, drawn }: DownloadMenuProps) {
  const draw = async (kind: "svg" | "png") => {
    try {
      const svg = await drawn();
      const { pngOf } = await import("./picture");
      if (kind === "svg") download(`${title}.svg`, svg, "image/svg+xml");
      else download(`${title}.png`, await pngOf(svg));
    } catch (error) {
      const message = `${String(error)}. Is the master there? Then try again.`;
      notifications.show({ color: "red", title: "The picture could not be drawn", message });
    }
  };
  return (
    <LazyMenu label={`Download ${title}`} icon={<IconDownload size={18} />} position="bottom-end">
      <Menu.Item onClick={onCsv}>{csvName}</Menu.Item>
      <Menu.Item onClick={() => void draw("svg")}>SVG, as drawn</Menu.Item>
      <Menu.Item onClick={() => void draw("png")}>PNG, as drawn</Menu.Item>
    </LazyMenu>
  );
}
