/** Media of several runs side by side, of one name and at one step. */

import { Group, Select, Text, Title } from "@mantine/core";
import { useQueries } from "@tanstack/react-query";
import { useSearch } from "@tanstack/react-router";

import { mediaNamesQuery, mediaStepsQuery } from "../api/media";
import { manyChoices, useSearchChange } from "../charts/ChartControls";
import { LinkText } from "../components/links";
import classes from "../components/media/Media.module.css";
import { MediaAt } from "../components/media/MediaAt";
import { StepSlider } from "../components/media/StepSlider";
import { mediaId, unionOf } from "../lib/media";
import { plural } from "../lib/numbers";

const MOST_RUNS = 50;

interface CompareMediaProps {
  /** Trials and what they are called. */
  runs: readonly { id: number; label: string }[];
}

export function CompareMedia({ runs }: CompareMediaProps) {
  const search = useSearch({ from: "/compare" });
  const change = useSearchChange();
  const asked = runs.slice(0, MOST_RUNS);
  const answers = useQueries({ queries: asked.map(({ id }) => mediaNamesQuery(id)) });
  const idsOf = answers.map(({ data }) => new Set((data ?? []).map(mediaId)));
  const all = new Map(
    answers.flatMap(({ data }) => (data ?? []).map((one) => [mediaId(one), one] as const)),
  );
  const images = [...all].find(([, one]) => one.kind === "image");
  const key = search.media !== undefined && all.has(search.media) ? search.media : images?.[0];
  const chosen = all.get(key ?? "") ?? [...all.values()][0];
  const shown = chosen ? asked.filter((_, i) => idsOf[i]?.has(mediaId(chosen))) : [];
  const steps = unionOf(
    useQueries({
      queries: shown.map(({ id }) =>
        mediaStepsQuery(id, chosen && { trialId: id, group: chosen.group, name: chosen.name }),
      ),
    }).map(({ data }) => data ?? []),
  );
  if (chosen === undefined) return null;
  return (
    <section aria-label="Media side by side">
      <Title order={2} mb="xs">
        Media side by side
      </Title>
      <Group gap="8px 16px" align="flex-end" mb="sm">
        <Select
          label="Media"
          size="xs"
          w={340}
          maw="100%"
          data={[...all].map(([value, { name, group, kind }]) => ({
            value,
            label: `${name} (${group}, ${kind})`,
          }))}
          {...manyChoices(all.size)}
          value={mediaId(chosen)}
          allowDeselect={false}
          onChange={(media) => change({ media: media ?? undefined, step: undefined })}
        />
        {steps.length > 1 && (
          <StepSlider
            label="Step of the media"
            steps={steps}
            step={search.step ?? null}
            onChange={(step) => change({ step: step ?? undefined })}
          />
        )}
      </Group>
      {(shown.length < asked.length || asked.length < runs.length) && (
        <Text size="sm" mb="xs" role="status">
          {shown.length} of the first {plural(asked.length, "trial")} reported {chosen.name}.
        </Text>
      )}
      <div className={`${classes.grid} ${classes.narrow}`}>
        {shown.map(({ id, label }) => (
          <MediaAt
            key={`${id} ${mediaId(chosen)}`}
            trialId={id}
            media={chosen}
            label={label}
            step={search.step ?? null}
          >
            <Title order={3} size="h5" className="wrap-anywhere">
              <LinkText to="/trials/$id/media" params={{ id }}>
                {label}
              </LinkText>
            </Title>
          </MediaAt>
        ))}
      </div>
    </section>
  );
}
