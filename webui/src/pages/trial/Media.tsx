/** The media of a trial: a panel for each name; only those in sight are loaded. */

import { Text, TextInput, Title } from "@mantine/core";
import { useDebouncedCallback } from "@mantine/hooks";
import { IconSearch } from "@tabler/icons-react";
import { useQuery } from "@tanstack/react-query";
import { useParams, useSearch } from "@tanstack/react-router";
import { useMemo, useState } from "react";

import { mediaNamesQuery, mediaStepsQuery } from "../../api/media";
import { trialQuery } from "../../api/queries";
import type { MediaName } from "../../api/types";
import { useSearchChange } from "../../charts/ChartControls";
import { Empty, ProblemView, Waiting } from "../../components/Feedback";
import classes from "../../components/media/Media.module.css";
import { MediaAt } from "../../components/media/MediaAt";
import { StepSlider } from "../../components/media/StepSlider";
import { mediaId, sectionsOf } from "../../lib/media";
import { plural } from "../../lib/numbers";
import { isTerminal } from "../../lib/states";

const FEW_NAMES = 6;

export function Media() {
  const { id } = useParams({ from: "/trials/$id" });
  const search = useSearch({ from: "/trials/$id/media" });
  const change = useSearchChange();
  const trial = useQuery(trialQuery(id)).data;
  const answer = useQuery(mediaNamesQuery(id));
  const steps = useQuery(mediaStepsQuery(id)).data ?? [];
  // Steps of single panels hold until all are moved.
  const [own, setOwn] = useState<ReadonlyMap<string, number | null>>(new Map());
  const names = answer.data;
  const sections = useMemo(() => sectionsOf(names ?? [], search.q), [names, search.q]);
  if (answer.isPending) return <Waiting what="media" />;
  if (names === undefined)
    return <ProblemView error={answer.error} onRetry={() => void answer.refetch()} />;
  if (names.length === 0)
    return (
      <Empty
        title={trial && !isTerminal(trial.state) ? "No media yet" : "No media"}
        command="context.train.report_image(steps, name, image)"
      >
        Images, audio, video, tables, histograms, texts, figures and files appear here as soon as
        they are reported: in your code, for example
      </Empty>
    );
  const numShown = sections.reduce((sum, section) => sum + section.names.length, 0);
  const moveAll = (step: number | null) => {
    setOwn(new Map());
    change({ step: step ?? undefined });
  };
  return (
    <>
      <div className={classes.bar}>
        {(names.length > FEW_NAMES || search.q !== undefined) && (
          <Filter value={search.q ?? ""} numShown={numShown} numAll={names.length} />
        )}
        {steps.length > 1 && (
          <>
            <Text size="sm" fw={600}>
              All at step
            </Text>
            <StepSlider
              label="Step of all media"
              steps={steps}
              step={search.step ?? null}
              onChange={moveAll}
            />
          </>
        )}
      </div>
      {sections.length === 0 && <Empty title="No media match">Change or clear the filter.</Empty>}
      {sections.map((section) => (
        <section key={section.title} aria-label={section.title || "Media"}>
          {section.title !== "" && (
            <Title order={2} size="h4" mb="xs" className="wrap-anywhere">
              {section.title}
            </Title>
          )}
          <div className={classes.grid}>
            {section.names.map((one) => {
              const key = mediaId(one);
              return (
                <MediaAt
                  key={key}
                  trialId={id}
                  media={one}
                  label={labelOf(one, names)}
                  step={own.has(key) ? (own.get(key) ?? null) : (search.step ?? null)}
                  onStep={(step) => setOwn(new Map(own).set(key, step))}
                >
                  <Title order={section.title === "" ? 2 : 3} size="h5" className="wrap-anywhere">
                    {labelOf(one, names).slice(section.title === "" ? 0 : section.title.length + 1)}
                  </Title>
                </MediaAt>
              );
            })}
          </div>
        </section>
      ))}
    </>
  );
}

/** Return the name, with what tells it from others of the same name. */
function labelOf(one: MediaName, names: readonly MediaName[]): string {
  const same = names.filter(({ name }) => name === one.name);
  const parts = [
    ...(same.some(({ group }) => group !== one.group) ? [one.group] : []),
    ...(same.some(({ kind }) => kind !== one.kind) ? [one.kind] : []),
  ];
  return parts.length === 0 ? one.name : `${one.name} (${parts.join(", ")})`;
}

interface FilterProps {
  value: string;
  numShown: number;
  numAll: number;
}

function Filter({ value, numShown, numAll }: FilterProps) {
  const change = useSearchChange();
  const [text, setText] = useState(value);
  const tell = useDebouncedCallback((q: string) => change({ q: q || undefined }), 200);
  return (
    <>
      <TextInput
        aria-label="Filter the media"
        placeholder="Filter the media"
        size="xs"
        flex="1 1 160px"
        maw={300}
        leftSection={<IconSearch size={16} />}
        value={text}
        onChange={(event) => {
          setText(event.currentTarget.value);
          tell(event.currentTarget.value);
        }}
      />
      <Text size="xs" c="dimmed" role="status">
        {numShown < numAll ? `${numShown} of ${plural(numAll, "name")}` : plural(numAll, "name")}
      </Text>
    </>
  );
}
