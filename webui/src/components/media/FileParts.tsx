/** Parts of which files are shown: text, a link, and what stands where there is nothing. */

import { Anchor, Text } from "@mantine/core";

import { mediaAddress } from "../../api/media";
import type { MediaFile } from "../../lib/media";
import { formatBytes } from "../../lib/numbers";
import { Scroll } from "../Scroll";
import classes from "./Media.module.css";

const MOST_CHARACTERS = 100_000;

/** Text of a run as it is. */
export function TextBox({ label, text }: { label: string; text: string }) {
  const shown = text.slice(0, MOST_CHARACTERS);
  return (
    <>
      <Scroll label={label} className={classes.text}>
        <pre>{shown}</pre>
      </Scroll>
      {shown.length < text.length && (
        <Text size="xs" c="dimmed">
          The first {MOST_CHARACTERS.toLocaleString("en-US")} of{" "}
          {text.length.toLocaleString("en-US")} characters.
        </Text>
      )}
    </>
  );
}

export function FileLink({ trialId, file }: { trialId: number; file: MediaFile }) {
  const name = file.path.slice(file.path.lastIndexOf("/") + 1);
  return (
    <Text size="xs" className="wrap-anywhere">
      <Anchor href={mediaAddress(trialId, file.path)} download={name} size="xs">
        Download {name}
      </Anchor>
      {file.size !== null && ` (${formatBytes(file.size)})`}
    </Text>
  );
}

/** Stands where something cannot be shown. */
export function Unreadable({ what }: { what: string }) {
  return (
    <Text size="sm" c="dimmed" role="note">
      This {what} cannot be shown: its file is missing or damaged.
    </Text>
  );
}
