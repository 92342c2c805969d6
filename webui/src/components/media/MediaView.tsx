/** One report of media: its files, or its value. */

import { Text } from "@mantine/core";
import { useState } from "react";

import { mediaAddress } from "../../api/media";
import type { Media } from "../../api/types";
import { filesOf, histogramOf, type MediaFile, viewOf } from "../../lib/media";
import { formatNumber, formatValue } from "../../lib/numbers";
import { Figure, Page, TableOf, TextOf } from "./Documents";
import { FileLink, TextBox, Unreadable } from "./FileParts";
import { HistogramBars } from "./Histograms";
import { Images } from "./Images";
import classes from "./Media.module.css";

interface MediaViewProps {
  trialId: number;
  media: Media;
  /** When the report was read: what was missing before is tried again then. */
  updatedAt: number;
}

export function MediaView({ trialId, media, updatedAt }: MediaViewProps) {
  const files = filesOf(media);
  const images = files.filter((file) => viewOf(media.kind, file) === "image");
  const title = `${media.name}, step ${formatNumber(media.steps_completed)}`;
  return (
    <>
      {files.length === 0 && <Value media={media} title={title} />}
      {images.length > 0 && (
        <Images trialId={trialId} files={images} title={title} updatedAt={updatedAt} />
      )}
      {files
        .filter((file) => !images.includes(file))
        .map((file, i) => (
          // A frame that draws figures is kept from step to step.
          <div key={media.kind === "figure" ? i : file.path} className={classes.file}>
            <FileView
              trialId={trialId}
              file={file}
              kind={media.kind}
              title={file.caption ?? title}
              updatedAt={updatedAt}
            />
            {file.caption && <Text size="xs">{file.caption}</Text>}
            <FileLink trialId={trialId} file={file} />
          </div>
        ))}
    </>
  );
}

function Value({ media, title }: { media: Media; title: string }) {
  if (media.kind !== "histogram") return <TextBox label={title} text={formatValue(media.value)} />;
  const histogram = histogramOf(media.value);
  if (histogram === null) return <Unreadable what="histogram" />;
  return <HistogramBars histogram={histogram} label={title} />;
}

interface FileViewProps {
  trialId: number;
  file: MediaFile;
  kind: string;
  title: string;
  updatedAt: number;
}

function FileView({ trialId, file, kind, title, updatedAt }: FileViewProps) {
  const [failedAt, setFailedAt] = useState<number | null>(null);
  const address = mediaAddress(trialId, file.path);
  const player = { src: address, controls: true, onError: () => setFailedAt(updatedAt) };
  const view = viewOf(kind, file);
  if (failedAt === updatedAt) return <Unreadable what={view} />;
  switch (view) {
    case "audio":
      return <audio {...player} aria-label={title} preload="metadata" className={classes.player} />;
    case "video":
      return <video {...player} aria-label={title} preload="metadata" className={classes.player} />;
    case "table":
      return <TableOf trialId={trialId} file={file} title={title} />;
    case "figure":
      return <Figure trialId={trialId} file={file} title={title} />;
    case "html":
      return <Page trialId={trialId} file={file} title={title} />;
    case "text":
      return <TextOf trialId={trialId} file={file} title={title} />;
    default:
      return null;
  }
}
