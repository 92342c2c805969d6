import { Stack, Text, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";

import { experimentQuery, searchQuery } from "../../api/queries";
import type { Experiment, Rung, RungArrival } from "../../api/types";
import { Empty, ProblemView, Waiting } from "../../components/Feedback";
import { LinkText } from "../../components/links";
import { formatLength, formatNumber, plural, toNumber } from "../../lib/numbers";
import classes from "./Rungs.module.css";

const WORDS: Record<string, string> = {
  waiting: "on its way",
  paused: "pauses here",
  continued: "goes on",
  stopped: "stopped here",
  finished: "full length",
  failed: "failed",
};
const PLURALS: Record<string, string> = { waiting: "on their way", continued: "go on", paused: "pause here" };

export function Rungs() {
  const { id } = useParams({ from: "/experiments/$id" });
  const experiment = useQuery(experimentQuery(id)).data;
  const search = useQuery(searchQuery(id));
  if (search.isPending || !experiment) return <Waiting what="the search" />;
  if (search.isError)
    return <ProblemView error={search.error} onRetry={() => void search.refetch()} />;
  if (search.data.brackets.length === 0)
    return (
      <Empty title="This search has no rungs">
        Only searches that stop trials early have them, such as adaptive_asha.
      </Empty>
    );
  return (
    <Stack gap="lg">
      <Text size="sm" c="dimmed" maw={760}>
        At each rung a trial goes on if its {experiment.metric} is among the best so far; others
        stop there, and their slots go to trials that promise more. Each is compared to those that
        arrived before it: an early one may go on with a metric that stops a later one.
      </Text>
      {search.data.brackets.map((rungs, i) => (
        <section key={i}>
          {search.data.brackets.length > 1 && (
            <Title order={2} mb="xs">
              Bracket {i + 1}
            </Title>
          )}
          <div
            className={classes.bracket}
            tabIndex={0}
            role="region"
            aria-label={`Bracket ${i + 1}`}
          >
            {rungs.map((rung) => (
              <RungColumn key={rung.length} rung={rung} experiment={experiment} />
            ))}
          </div>
        </section>
      ))}
    </Stack>
  );
}

function RungColumn({ rung, experiment }: { rung: Rung; experiment: Experiment }) {
  const numbers = rung.num_by_decision;
  const total = Object.values(numbers).reduce((sum, number) => sum + number, 0);
  const counts = Object.entries(WORDS)
    .map(([decision, words]) => {
      const count = numbers[decision] ?? 0;
      return count === 0 ? null : `${count} ${(count > 1 && PLURALS[decision]) || words}`;
    })
    .filter((part) => part !== null);
  const unit = unitOf(experiment);
  return (
    <div className={classes.rung}>
      <Text fw={650}>
        {unit === "" && "Length "}
        {formatLength(rung.length, unit)}
      </Text>
      <Text size="xs" c="dimmed" mb="xs">
        {plural(total, "trial")}
        {counts.length > 0 && `: ${counts.join(", ")}`}
        {rung.entries.length < total &&
          `. Shown are ${rung.entries.length} of them, spread evenly over the ranks.`}
      </Text>
      <ol className={classes.entries}>
        {rung.entries.map((entry) => (
          <li key={entry.trial_id} className={classes.entry} data-decision={entry.decision}>
            <LinkText to="/trials/$id" params={{ id: entry.trial_id }} size="sm">
              Trial {entry.trial_id}
            </LinkText>
            <span>{formatNumber(toNumber(entry.metric), 4)}</span>
            <span className={classes.decision}>{WORDS[entry.decision] ?? entry.decision}</span>
            {entry.arrival && (
              <span className={classes.arrival}>
                {arrivalInWords(entry.arrival, entry.decision === "finished")}
              </span>
            )}
          </li>
        ))}
      </ol>
    </div>
  );
}

/** Return what a decision was made from; at the last rung no trial goes on. */
export function arrivalInWords(
  { order, rank, num_kept: kept, cutoff }: RungArrival,
  isLast: boolean,
): string {
  const arrived = `Arrived as number ${order}, rank ${rank}`;
  if (isLast) return arrived;
  const needed = toNumber(cutoff);
  const goesOn = kept === 1 ? "the best 1 goes on" : `the best ${kept} go on`;
  const from = needed === null ? "" : `, cut-off ${formatNumber(needed, 4)}`;
  return `${arrived}: ${goesOn}${from}`;
}

function unitOf({ config }: Experiment): string {
  const searcher = config.searcher as { time_metric?: string; max_length?: unknown } | undefined;
  if (typeof searcher?.time_metric === "string") return searcher.time_metric;
  const length = searcher?.max_length;
  return typeof length === "object" && length !== null ? (Object.keys(length)[0] ?? "") : "";
}
