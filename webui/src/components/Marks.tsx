/** Marks of a person: the star of an experiment, and the bell of what one waits for. */

import { ActionIcon } from "@mantine/core";
import { IconBell, IconBellRinging, IconStar, IconStarFilled } from "@tabler/icons-react";

import { useStars } from "../api/stars";
import { useWatch, type Watched } from "../live/watch";

export function StarButton({ id, name }: { id: number; name: string }) {
  const { starred, toggle, isPending } = useStars();
  const is = starred.has(id);
  return (
    <ActionIcon
      variant="default"
      color="gray"
      size={30}
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

/** A star that costs little: tables draw dozens in each frame while one scrolls. */
export function RowStar({ name, is, onClick }: { name: string; is: boolean; onClick: () => void }) {
  return (
    <button
      type="button"
      className="row-star"
      aria-label={`Star ${name}`}
      aria-pressed={is}
      onClick={onClick}
    >
      {is ? "★" : "☆"}
    </button>
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
