import { Group, SimpleGrid, Stack, Text, Title } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";
import { useLocation } from "@tanstack/react-router";

import { goingQuery, masterQuery, queueQuery, RECENT, recentQuery } from "../api/queries";
import type { Experiment } from "../api/types";
import { Ago } from "../components/Ago";
import { Empty, ProblemView, Quoted, Waiting } from "../components/Feedback";
import { LinkButton, LinkText } from "../components/links";
import { PageHead } from "../components/PageHead";
import { ProgressCell } from "../components/ProgressCell";
import { StateBadge } from "../components/StateBadge";
import { slotsInWords, usableSlots } from "../lib/cluster";
import { formatNumber, formatPercent, plural, toNumber } from "../lib/numbers";
import { shownExperimentState, shownMetric, shownProgress, workWord } from "../lib/states";
import { useTitle } from "../lib/title";
import { LoggedElsewhere } from "./NotFound";

const QUEUE_PERIOD_MS = 5000;

export function Home() {
  // Clients of MLflow print addresses of this form.
  const { hash } = useLocation();
  return hash.startsWith("/experiments/") ? <LoggedElsewhere link={hash.slice(1)} /> : <Overview />;
}

function Overview() {
  useTitle("Home");
  const goingList = useInfiniteQuery(goingQuery);
  const recentList = useInfiniteQuery(recentQuery);
  const master = useQuery(masterQuery);
  const failed = [goingList, recentList].find((list) => list.isError);
  if (failed) return <ProblemView error={failed.error} onRetry={() => void failed.refetch()} />;
  if (goingList.isPending || recentList.isPending) return <Waiting what="experiments" />;
  // What has just ended stays in its list until that is read again.
  const going = goingList.data?.pages.flatMap((page) => page.items) ?? [];
  const recent = recentList.data?.pages.flatMap((page) => page.items).slice(0, RECENT) ?? [];
  // The list may have pages that are not read: what is counted here is a part then.
  const numGoing = goingList.data?.pages[0]?.total ?? going.length;
  const isPart = numGoing > going.length;
  const isEmpty = going.length === 0 && recent.length === 0;
  const counts = master.data ?? { num_slots: 0, num_slots_used: 0 };
  const { used, usable } = usableSlots(counts);
  return (
    <>
      <PageHead
        title="Home"
        actions={
          <LinkButton to="/new" size="sm">
            New experiment
          </LinkButton>
        }
      />
      {isEmpty ? (
        <Empty title="No experiments yet" command="paceline experiment create config.yaml .">
          An experiment is a config, your code and a search. Create one in the directory of your
          code:
        </Empty>
      ) : (
        <Stack gap="xl">
          <SimpleGrid cols={3} spacing={{ base: "xs", sm: "md" }}>
            <Tile name="Experiments going on" value={numGoing.toLocaleString("en")} />
            <Tile
              name="Slots in use"
              value={slotsInWords(counts)}
              note={usable > 0 ? formatPercent(used / usable) : ""}
            />
            <Tile
              name="Trials running"
              value={String(going.reduce((sum, one) => sum + one.num_running, 0))}
              note={isPart ? `in the newest ${going.length} experiments` : ""}
            />
          </SimpleGrid>
          <section aria-label="Running and waiting">
            <Title order={2} mb="sm">
              Running and waiting
            </Title>
            {going.length === 0 ? (
              <Text c="dimmed" size="sm">
                Nothing runs or waits.
              </Text>
            ) : (
              <SimpleGrid cols={{ base: 1, md: 2, xl: 3 }}>
                {going.map((one) => (
                  <GoingCard key={one.id} experiment={one} />
                ))}
              </SimpleGrid>
            )}
            {isPart && (
              <Text size="sm" c="dimmed" mt="xs">
                The newest {going.length} of {plural(numGoing, "experiment")}.{" "}
                <LinkText to="/experiments" search={{ state: "ACTIVE" } as never} size="sm">
                  All that run or wait
                </LinkText>
              </Text>
            )}
          </section>
          {recent.length > 0 && (
            <section aria-label="Recently ended">
              <Group justify="space-between" mb="xs">
                <Title order={2}>Recently ended</Title>
                <LinkText to="/experiments" size="sm">
                  All experiments
                </LinkText>
              </Group>
              <div className="card" style={{ padding: "4px 16px" }}>
                {recent.map((one) => (
                  <RecentRow key={one.id} experiment={one} />
                ))}
              </div>
            </section>
          )}
        </Stack>
      )}
    </>
  );
}

function Tile({ name, value, note }: { name: string; value: string; note?: string }) {
  return (
    <div className="card">
      <Text size="xs" c="dimmed">
        {name}
      </Text>
      <Text size="xl" fw={650}>
        {value}
      </Text>
      {note && (
        <Text size="xs" c="dimmed">
          {note}
        </Text>
      )}
    </div>
  );
}

function GoingCard({ experiment }: { experiment: Experiment }) {
  const progress = shownProgress(experiment);
  const metric = shownMetric(experiment);
  const state = shownExperimentState(experiment);
  const queue = useQuery({
    ...queueQuery,
    enabled: state === "QUEUED",
    // Why something waits can change without an event.
    refetchInterval: QUEUE_PERIOD_MS,
  }).data;
  const waits = state === "QUEUED" && queue?.find((one) => one.experiment_id === experiment.id);
  return (
    <article className="card">
      <Group justify="space-between" wrap="nowrap" align="flex-start">
        <LinkText
          to="/experiments/$id"
          params={{ id: experiment.id }}
          fw={600}
          className="wrap-anywhere"
        >
          {experiment.name}
        </LinkText>
        <StateBadge state={state} />
      </Group>
      {waits && (
        <Text size="xs" mb={4} className="wrap-anywhere">
          <Quoted text={waits.detail} />
        </Text>
      )}
      <Text size="xs" c="dimmed" mb="sm">
        Experiment {experiment.id} ·{" "}
        {workWord(experiment, "made without a master")} · created{" "}
        <Ago time={experiment.created_at} />
      </Text>
      {progress !== null && (
        <ProgressCell value={progress} label={`Progress of ${experiment.name}`} />
      )}
      <Group justify="space-between" mt="sm" gap="xs">
        <Text size="sm">
          {metric !== null && (
            <>
              Best {metric}: <strong>{formatNumber(toNumber(experiment.best_metric))}</strong>
            </>
          )}
        </Text>
        <Text size="sm" c="dimmed">
          {experiment.num_running} of {plural(experiment.num_trials, "trial")} running
        </Text>
      </Group>
    </article>
  );
}

function RecentRow({ experiment }: { experiment: Experiment }) {
  return (
    <div className="ended">
      <LinkText to="/experiments/$id" params={{ id: experiment.id }} className="wrap-anywhere">
        {experiment.name}
      </LinkText>
      <StateBadge state={experiment.state} />
      <Text size="sm" className="wrap-anywhere">
        {shownMetric(experiment)} <strong>{formatNumber(toNumber(experiment.best_metric))}</strong>
      </Text>
      <Text size="sm" c="dimmed">
        <Ago time={experiment.ended_at ?? experiment.created_at} />
      </Text>
    </div>
  );
}
