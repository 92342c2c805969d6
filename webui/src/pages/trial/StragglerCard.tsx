/** Who holds up a trial: its slowest rank, and GPUs that do nothing. */

import { Text, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useMemo } from "react";

import { trialQuery } from "../../api/queries";
import { useSeries } from "../../api/series";
import type { Trial } from "../../api/types";
import { formatNumber, formatPercent, plural } from "../../lib/numbers";
import {
  batchSeconds,
  gpusOf,
  hasRanks,
  isIdle,
  LAG,
  SLOWEST,
  stragglerOf,
} from "../../lib/stragglers";

const NONE = { xs: [], ys: [] };
/** A rank that is the slowest as often as any other, or by this part of a batch, holds up nobody. */
const SMALL = 0.05;

export function StragglerCard({ trialId }: { trialId: number }) {
  const trial = useQuery(trialQuery(trialId)).data;
  if (trial === undefined) return null;
  const gpus = gpusOf(trial.summary ?? {});
  const isCompared = hasRanks(trial.summary ?? {});
  if (gpus.length === 0 && !isCompared) return null;
  const idle = gpus.filter(isIdle);
  return (
    <section className="card" aria-labelledby="stragglers-title" style={{ marginBottom: 16 }}>
      <Title order={2} id="stragglers-title">
        Stragglers and idle GPUs
      </Title>
      {isCompared && <Slowest trial={trial} />}
      {gpus.length > 0 && (
        <Text size="sm">
          {idle.length === 0
            ? `All ${plural(gpus.length, "GPU")} worked.`
            : `${idle.length} of ${plural(gpus.length, "GPU")} idle: ${idle
                .map(
                  (one) =>
                    `${placeOf(one.group)}GPU ${one.number} (used ${formatNumber(one.mean, 2)} % of the time)`,
                )
                .join(", ")}.`}
        </Text>
      )}
    </section>
  );
}

function placeOf(group: string): string {
  const rank = /_rank_(\d+)$/.exec(group)?.[1];
  return rank === undefined ? "" : `node of rank ${rank}, `;
}

function Slowest({ trial }: { trial: Trial }) {
  const requests = useMemo(
    () => [SLOWEST, LAG].map((name) => ({ trialId: trial.id, ...name })),
    [trial.id],
  );
  const { series } = useSeries(requests, "batches", null, null);
  const found = stragglerOf(series[0] ?? NONE, series[1] ?? NONE);
  if (found === null) return null;
  const batch = batchSeconds(trial.summary ?? {});
  const part = batch > 0 ? found.lag / batch : null;
  const isSmall = part !== null && part < SMALL;
  return (
    <Text size="sm" fw={isSmall ? undefined : 600}>
      Rank {found.rank} was the slowest in {formatPercent(found.share)} of the reports, by{" "}
      {formatNumber(found.lag * 1000, 3)} ms per batch beyond the mean of all ranks
      {part !== null && ` (${formatPercent(part)} of a batch)`}
      {isSmall ? ": it holds up nobody." : ": the others wait for it."}
    </Text>
  );
}
