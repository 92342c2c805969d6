/** Images of a report: small ones side by side, and one at a time in full. */

import { Button, Group, Modal, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useState } from "react";

import { mediaAddress } from "../../api/media";
import { fetchText } from "../../api/client";
import { problemOf } from "../../api/problem";
import type { MediaFile } from "../../lib/media";
import { FileLink, Unreadable } from "./FileParts";
import classes from "./Media.module.css";

/** More pixels than this take a browser's memory and seconds: they are drawn when asked for. */
const MANY_PIXELS = 16_000_000;
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
  const shown = files.map((file, i) => ({
    trialId,
    file,
    updatedAt,
    name: file.caption ?? (files.length > 1 ? `${title}, image ${i + 1}` : title),
  }));
  return (
    <>
      <ul className={classes.images}>
        {shown.map((one, i) => (
          <li key={`${one.file.path} ${i}`}>
            <figure>
              <Picture {...one} onOpen={() => setOpened(i)} />
              {one.file.caption && <figcaption>{one.file.caption}</figcaption>}
            </figure>
          </li>
        ))}
      </ul>
      {opened !== null && (
        <Enlarged
          pictures={shown}
          index={opened}
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
  onOpen?: () => void;
}

function Picture(props: PictureProps) {
  const { trialId, file, name, updatedAt, onOpen } = props;
  const [failedAt, setFailedAt] = useState<number | null>(null);
  const [isWanted, setIsWanted] = useState(false);
  const address = mediaAddress(trialId, file.path);
  if (failedAt === updatedAt)
    return (
      <NoPicture
        {...props}
        onWanted={() => {
          setIsWanted(true);
          setFailedAt(null);
        }}
      />
    );
  const image = (
    <img
      src={isWanted ? address : `${address}?max_pixels=${MANY_PIXELS}`}
      alt={name}
      loading="lazy"
      decoding="async"
      data-pixels={(file.width ?? PIXEL_ART) < PIXEL_ART || undefined}
      onError={() => setFailedAt(updatedAt)}
    />
  );
  if (onOpen === undefined) return image;
  return (
    <button type="button" onClick={onOpen} aria-label={`Enlarge ${name}`}>
      {image}
    </button>
  );
}

/** Says why an image is not drawn; a large one can be asked for. */
function NoPicture({ trialId, file, name, onWanted }: PictureProps & { onWanted: () => void }) {
  const address = `${mediaAddress(trialId, file.path)}?max_pixels=${MANY_PIXELS}`;
  const { error } = useQuery({
    queryKey: ["no-picture", address],
    // Only the answer's head is wanted: what is not refused is broken.
    queryFn: () => fetchText(address, () => Promise.reject(new Error("broken"))),
    retry: false,
    gcTime: 0,
  });
  if (error === null || problemOf(error).code !== "too_many_pixels")
    return <Unreadable what="image" />;
  return (
    <div>
      <Text size="sm">{problemOf(error).message}</Text>
      <Button size="xs" variant="default" onClick={onWanted}>
        Show {name}
      </Button>
      <FileLink trialId={trialId} file={file} />
    </div>
  );
}

interface EnlargedProps {
  pictures: readonly PictureProps[];
  index: number;
  onMove: (index: number) => void;
  onClose: () => void;
}

function Enlarged({ pictures, index, onMove, onClose }: EnlargedProps) {
  const shown = pictures[index];
  if (shown === undefined) return null;
  const move = (by: number) => onMove((index + by + pictures.length) % pictures.length);
  return (
    <Modal opened onClose={onClose} title={shown.name} size="auto" centered>
      <div
        className={classes.enlarged}
        onKeyDown={({ key }) => {
          if (key === "ArrowLeft") move(-1);
          if (key === "ArrowRight") move(1);
        }}
      >
        <Picture key={shown.file.path} {...shown} />
        <Group justify="space-between" mt="sm">
          {pictures.length > 1 && (
            <Group gap="xs">
              <Button size="xs" variant="default" onClick={() => move(-1)}>
                Previous
              </Button>
              <Button size="xs" variant="default" onClick={() => move(1)} data-autofocus>
                Next
              </Button>
              <Text size="sm">
                {index + 1} of {pictures.length}
              </Text>
            </Group>
          )}
          <FileLink trialId={shown.trialId} file={shown.file} />
        </Group>
      </div>
    </Modal>
  );
}
