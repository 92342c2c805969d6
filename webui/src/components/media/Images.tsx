/** Images of a report: small ones side by side, and one at a time in full. */

import { Anchor, Button, Group, Modal, Text } from "@mantine/core";
import { useState } from "react";

import { mediaAddress } from "../../api/media";
import { isHuge, type MediaFile } from "../../lib/media";
import { formatNumber } from "../../lib/numbers";
import { FileLink, Unreadable } from "./FileParts";
import classes from "./Media.module.css";

/** Images up to so many pixels wide are drawn with their pixels as squares. */
const PIXEL_ART = 128;

interface ImagesProps {
  trialId: number;
  files: readonly MediaFile[];
  title: string;
  updatedAt: number;
}

export function Images({ trialId, files, title, updatedAt }: ImagesProps) {
  const [opened, setOpened] = useState<number | null>(null);
  const nameOf = (i: number) =>
    files[i]?.caption ?? (files.length > 1 ? `${title}, image ${i + 1}` : title);
  return (
    <>
      <ul className={classes.images}>
        {files.map((file, i) => (
          <li key={`${file.path} ${i}`}>
            <figure>
              <Picture
                trialId={trialId}
                file={file}
                name={nameOf(i)}
                updatedAt={updatedAt}
                onOpen={() => setOpened(i)}
              />
              {file.caption && <figcaption>{file.caption}</figcaption>}
            </figure>
          </li>
        ))}
      </ul>
      {opened !== null && (
        <Enlarged
          trialId={trialId}
          files={files}
          index={opened}
          nameOf={nameOf}
          onMove={setOpened}
          onClose={() => setOpened(null)}
        />
      )}
    </>
  );
}

interface PictureProps {
  trialId: number;
  file: MediaFile;
  name: string;
  updatedAt: number;
  onOpen: () => void;
}

function Picture({ trialId, file, name, updatedAt, onOpen }: PictureProps) {
  const [failedAt, setFailedAt] = useState<number | null>(null);
  const [isWanted, setIsWanted] = useState(!isHuge(file));
  const size = `${formatNumber(file.width)} × ${formatNumber(file.height)} pixels`;
  if (!isWanted)
    return (
      <div>
        <Text size="sm">{size}: a large image</Text>
        <Button size="xs" variant="default" onClick={() => setIsWanted(true)}>
          Show {name}
        </Button>
        <FileLink trialId={trialId} file={file} />
      </div>
    );
  if (failedAt === updatedAt) return <Unreadable what="image" />;
  return (
    <button type="button" onClick={onOpen} aria-label={`Enlarge ${name}`}>
      <img
        src={mediaAddress(trialId, file.path)}
        alt={name}
        loading="lazy"
        decoding="async"
        data-pixels={(file.width ?? PIXEL_ART) < PIXEL_ART || undefined}
        onError={() => setFailedAt(updatedAt)}
      />
    </button>
  );
}

interface EnlargedProps {
  trialId: number;
  files: readonly MediaFile[];
  index: number;
  nameOf: (index: number) => string;
  onMove: (index: number) => void;
  onClose: () => void;
}

function Enlarged({ trialId, files, index, nameOf, onMove, onClose }: EnlargedProps) {
  const file = files[index];
  if (file === undefined) return null;
  const move = (by: number) => onMove((index + by + files.length) % files.length);
  return (
    <Modal opened onClose={onClose} title={nameOf(index)} size="auto" centered>
      <div
        className={classes.enlarged}
        onKeyDown={({ key }) => {
          if (key === "ArrowLeft") move(-1);
          if (key === "ArrowRight") move(1);
        }}
      >
        <img
          src={mediaAddress(trialId, file.path)}
          alt={nameOf(index)}
          data-pixels={(file.width ?? PIXEL_ART) < PIXEL_ART || undefined}
        />
        <Group justify="space-between" mt="sm">
          {files.length > 1 && (
            <Group gap="xs">
              <Button size="xs" variant="default" onClick={() => move(-1)}>
                Previous
              </Button>
              <Button size="xs" variant="default" onClick={() => move(1)} data-autofocus>
                Next
              </Button>
              <Text size="sm">
                {index + 1} of {files.length}
              </Text>
            </Group>
          )}
          <Text size="xs" c="dimmed">
            {file.width !== null && `${formatNumber(file.width)} × ${formatNumber(file.height)} · `}
            <Anchor href={mediaAddress(trialId, file.path)} download size="xs">
              Download
            </Anchor>
          </Text>
        </Group>
      </div>
    </Modal>
  );
}
