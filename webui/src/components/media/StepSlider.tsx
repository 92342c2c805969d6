/** A slider over steps at which something was reported; its end follows the newest. */

import { useDebouncedCallback } from "@mantine/hooks";
import { useState } from "react";

import { indexAt } from "../../lib/media";
import { formatNumber } from "../../lib/numbers";
import classes from "./Media.module.css";

const PAUSE_MS = 100;

interface StepSliderProps {
  label: string;
  steps: readonly number[];
  /** The step that is wanted, null for the newest. */
  step: number | null;
  onChange: (step: number | null) => void;
}

export function StepSlider({ label, steps, step, onChange }: StepSliderProps) {
  const [dragged, setDragged] = useState<number | null>(null);
  const tell = useDebouncedCallback((index: number) => {
    setDragged(null);
    onChange(index >= steps.length - 1 ? null : (steps[index] ?? null));
  }, PAUSE_MS);
  const index = dragged ?? Math.max(0, indexAt(steps, step));
  const shown = formatNumber(steps[index]);
  const newest = index === steps.length - 1 && step === null ? ", the newest" : "";
  return (
    <div className={classes.slider}>
      <input
        type="range"
        aria-label={label}
        aria-valuetext={`Step ${shown}${newest}`}
        min={0}
        max={Math.max(0, steps.length - 1)}
        value={index}
        disabled={steps.length < 2}
        onChange={(event) => {
          const next = Number(event.currentTarget.value);
          setDragged(next);
          tell(next);
        }}
      />
      <span className={classes.step}>{shown}</span>
    </div>
  );
}
