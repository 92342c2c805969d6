/** Marks of a person: the star of an experiment, and the bell of what one waits for. */

import { ActionIcon } from "@mantine/core";
import { IconBell, IconBellRinging, IconStar, IconStarFilled } from "@tabler/icons-react";

import { useStars } from "../api/stars";
import { useWatch, type Watched } from "../live/watch";

export function StarButton({ id, name, size = 30 }: { id: number; name: string; size?: number }) {
  const { starred, toggle, isPending } = useStars();
  const is = starred.has(id);
  return (
    <ActionIcon
      variant={size < 30 ? "subtle" : "default"}
      color="gray"
      size={size}
      aria-label={`Star ${name}`}
      title={is ? "Take the star away" : "Star"}
      aria-pressed={is}
      disabled={isPending}
      onClick={() => toggle(id)}
    >
      {is ? <IconStarFilled size={16} color="var(--state-waiting)" /> : <IconStar size={16} />}
    </ActionIcon>
  );
}

export function WatchButton(watched: Watched) {
  const [is, toggle] = useWatch(watched);
  return (
    <ActionIcon
      variant="default"
      size={30}
      aria-label="Tell me when it ends"
      title={is ? "A notice comes when it ends; click for none" : "Tell me when it ends"}
      aria-pressed={is}
      onClick={() => void toggle()}
    >
      {is ? <IconBellRinging size={16} color="var(--state-running)" /> : <IconBell size={16} />}
    </ActionIcon>
  );
}
