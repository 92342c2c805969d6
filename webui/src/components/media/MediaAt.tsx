/** What a trial reported under a name, at a step or at the newest before it. */

import { Text } from "@mantine/core";
import { useIntersection } from "@mantine/hooks";
import { useQuery } from "@tanstack/react-query";
import { type ReactNode, useState } from "react";

import { mediaQuery, mediaStepsQuery, MOST_REPORTS } from "../../api/media";
import type { MediaName } from "../../api/types";
import { indexAt } from "../../lib/media";
import { formatNumber } from "../../lib/numbers";
import { ProblemView } from "../Feedback";
import { HistogramsOverSteps } from "./Histograms";
import classes from "./Media.module.css";
import { MediaView } from "./MediaView";
import { StepSlider } from "./StepSlider";

/** So far beyond the window's edge media are loaded. */
const MARGIN = "300px";
const NONE: number[] = [];

interface MediaAtProps {
  trialId: number;
  media: MediaName;
  step: number | null;
  /** With it, the steps are chosen here too. */
  onStep?: (step: number | null) => void;
  children: ReactNode;
  label: string;
}

/** Loads what it shows while it is in sight, or nearly. */
export function MediaAt({ trialId, media, step, onStep, children, label }: MediaAtProps) {
  const { ref, entry } = useIntersection({ rootMargin: MARGIN });
  const isVisible = entry?.isIntersecting === true;
  const [wasSeen, setWasSeen] = useState(false);
  if (isVisible && !wasSeen) setWasSeen(true);
  const of = { trialId, group: media.group, name: media.name };
  const answer = useQuery({ ...mediaStepsQuery(trialId, of), enabled: isVisible });
  const steps = answer.data ?? NONE;
  const at = steps[indexAt(steps, step)];
  const reports = useQuery({
    ...mediaQuery(of, at === undefined ? [] : [at]),
    enabled: isVisible && at !== undefined,
  });
  const shown = at === undefined ? [] : (reports.data?.items ?? []);
  const found = shown.filter(({ kind }) => kind === media.kind);
  const hasSlider = onStep !== undefined && steps.length > 1;
  const error = answer.error ?? reports.error;
  return (
    <section className={`card ${classes.panel}`} aria-label={label} ref={ref}>
      {children}
      {wasSeen && (
        <>
          {hasSlider && (
            <StepSlider label={`Step of ${label}`} steps={steps} step={step} onChange={onStep} />
          )}
          {error && <ProblemView error={error} />}
          {found[0] !== undefined && !hasSlider && (
            <Text size="xs" c="dimmed">
              Step {formatNumber(found[0].steps_completed)}
            </Text>
          )}
          {answer.isSuccess && at === undefined && <NothingAt step={step} first={steps[0]} />}
          {answer.isPending || (at !== undefined && reports.isPending) ? (
            <Text size="sm" c="dimmed" role="status">
              Loading {media.name} …
            </Text>
          ) : (
            at !== undefined &&
            found.length === 0 &&
            reports.isSuccess && (
              <Text size="sm" c="dimmed">
                No {media.kind} at step {formatNumber(at)}.
              </Text>
            )
          )}
          {reports.data?.next_cursor && (
            <Text size="xs" c="dimmed">
              The first {MOST_REPORTS} reports of this step are shown.
            </Text>
          )}
          {found.map((one, i) => (
            <MediaView key={i} trialId={trialId} media={one} updatedAt={reports.dataUpdatedAt} />
          ))}
          {hasSlider && media.kind === "histogram" && (
            <HistogramsOverSteps of={of} steps={steps} isVisible={isVisible} />
          )}
        </>
      )}
    </section>
  );
}

function NothingAt({ step, first }: { step: number | null; first: number | undefined }) {
  return (
    <Text size="sm" c="dimmed">
      {first === undefined
        ? "Nothing under this name."
        : `Nothing up to step ${formatNumber(step)}; the first is of step ${formatNumber(first)}.`}
    </Text>
  );
}
