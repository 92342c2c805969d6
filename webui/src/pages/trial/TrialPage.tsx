import { Button, Group, Text } from "@mantine/core";
import { notifications } from "@mantine/notifications";
import { IconPlayerTrackNext, IconSkull } from "@tabler/icons-react";
import { useQuery, useQueryClient } from "@tanstack/react-query";
import { useNavigate, useParams } from "@tanstack/react-router";
import { useState } from "react";

import { continueTrial, killTrial } from "../../api/actions";
import { keys } from "../../api/keys";
import { experimentQuery, queuedQuery, trialQuery } from "../../api/queries";
import type { Experiment, Trial } from "../../api/types";
import { Lasted } from "../../components/Ago";
import { AlertList } from "../../components/AlertList";
import { Confirm } from "../../components/Confirm";
import { Facts } from "../../components/Facts";
import { Failure, LostRecords, ProblemView, Quoted, Waiting } from "../../components/Feedback";
import { LinkButton, LinkText } from "../../components/links";
import { WatchButton } from "../../components/Marks";
import { PageHead } from "../../components/PageHead";
import { StateBadge } from "../../components/StateBadge";
import { TabbedPage } from "../../components/Tabs";
import { batchesOf, restartsOf } from "../../lib/attempts";
import { formatNumber, formatPercent, toNumber } from "../../lib/numbers";
import { isId } from "../../lib/search";
import { isTerminal, shownMetric, shownTrialProgress, shownTrialState } from "../../lib/states";
import { useTitle } from "../../lib/title";
import { NotFound } from "../NotFound";

export function TrialPage() {
  const { id } = useParams({ from: "/trials/$id" });
  const answer = useQuery({ ...trialQuery(id), enabled: isId(id) });
  const trial = answer.data;
  const experiment = useQuery({
    ...experimentQuery(trial?.experiment_id ?? 0),
    enabled: trial !== undefined,
  }).data;
  useTitle(`Trial ${id}`);
  if (!isId(id)) return <NotFound />;
  if (answer.isPending) return <Waiting what={`trial ${id}`} />;
  if (trial === undefined)
    return (
      <>
        <PageHead
          above={<LinkText to="/experiments">Experiments</LinkText>}
          title={`Trial ${id}`}
        />
        <ProblemView error={answer.error} onRetry={() => void answer.refetch()} />
      </>
    );
  const at = `/trials/${id}`;
  return (
    <TabbedPage
      head={
        <PageHead
          above={
            <>
              <LinkText to="/experiments">Experiments</LinkText> /{" "}
              <LinkText to="/experiments/$id" params={{ id: trial.experiment_id }}>
                {experiment?.name ?? trial.experiment_id}
              </LinkText>
            </>
          }
          title={`Trial ${id}`}
          beside={<StateBadge state={shownTrialState(trial, experiment?.state)} />}
          actions={experiment && <TrialActions trial={trial} experiment={experiment} />}
        />
      }
      notes={
        <>
          {answer.isError && <ProblemView error={answer.error} />}
          <div className="card">
            <Facts isShort items={factsOf(trial, experiment)} />
          </div>
          {trial.error && (
            <Failure title="The trial failed" message={trial.error}>
              <LinkText to="/trials/$id/logs" params={{ id }} size="sm">
                Read the logs
              </LinkText>
            </Failure>
          )}
          <LostRecords count={trial.num_records_lost ?? 0}>
            <LinkText to="/trials/$id/logs" params={{ id }} size="sm">
              Read the logs
            </LinkText>
          </LostRecords>
          {trial.status && (
            <Text size="sm" mt="xs">
              It says: {trial.status}
            </Text>
          )}
          {shownTrialState(trial, experiment?.state) === "QUEUED" && <WhyQueued trialId={id} />}
          <AlertList alerts={trial.alerts ?? []} />
        </>
      }

      label="Views of the trial"
      tabs={[
        { label: "Metrics", to: at, isIndex: true },
        { label: "Media", to: `${at}/media` },
        { label: "Checkpoints", to: `${at}/checkpoints` },
        { label: "Hyperparameters", to: `${at}/hyperparameters` },
        { label: "Profiler", to: `${at}/profiler` },
        { label: `Attempts ${trial.num_attempts}`, to: `${at}/attempts` },
        { label: "Lineage", to: `${at}/lineage` },
        { label: "Logs", to: `${at}/logs` },
      ]}
    />
  );
}

/** Why a trial waits for slots, which can change without an event. */
function WhyQueued({ trialId }: { trialId: number }) {
  const queued = useQuery({ ...queuedQuery(trialId), refetchInterval: 5000 }).data;
  if (!queued) return null;
  return (
    <Text size="sm" mt="xs" role="status">
      <Quoted text={queued.detail} />
    </Text>
  );
}

/** What a kind of error says to whoever has to do something about it. */
const ERROR_KINDS = {
  transient: "transient: it may pass",
  user: "user: code or config",
  memory: "memory: of a GPU or the machine",
  permanent: "permanent: home or installation",
};

function factsOf(trial: Trial, experiment: Experiment | undefined) {
  const best = toNumber(trial.best_metric);
  const metric = experiment === undefined ? "metric" : shownMetric(experiment);
  const none = isTerminal(trial.state) ? "none" : "none yet";
  const metrics = [
    [
      `Best ${metric}`,
      best === null ? none : `${formatNumber(best)} at batch ${formatNumber(trial.best_step)}`,
    ],
    [`Latest ${metric}`, formatNumber(toNumber(trial.latest_metric))],
  ] as const;
  const progress = shownTrialProgress(trial, experiment);
  const numWorkerRestarts = (trial.attempts ?? []).reduce(
    (sum, { restarts = 0 }) => sum + restarts,
    0,
  );
  return [
    // A phone shows the first two.
    ...(trial.error_kind ? [["Kind of error", ERROR_KINDS[trial.error_kind]] as const] : []),
    ...(metric === null ? [] : metrics),
    ["Batches", batchesOf(trial)],
    ...(progress === null ? [] : [["Progress", formatPercent(progress)] as const]),
    ["Duration", <Lasted key="d" from={trial.started_at} to={trial.ended_at} />],
    ["Restarts", restartsOf(trial)],
    ...(numWorkerRestarts > 0 ? [["Worker restarts", String(numWorkerRestarts)] as const] : []),
    ...(trial.retries ? [["Retries after transient errors", String(trial.retries)] as const] : []),
    ["Seed", String(trial.seed)],
    ...(trial.stop_reason ? [["Why it ended", trial.stop_reason] as const] : []),
  ] as const;
}

function TrialActions({ trial, experiment }: { trial: Trial; experiment: Experiment }) {
  const client = useQueryClient();
  const navigate = useNavigate();
  const [asking, setAsking] = useState<"kill" | "continue" | null>(null);
  const close = () => setAsking(null);
  const canContinue = isTerminal(trial.state) && trial.latest_checkpoint !== null;
  return (
    <Group gap="xs">
      {!isTerminal(trial.state) && (
        <WatchButton kind="trial" id={trial.id} name={`${experiment.name}, trial ${trial.id}`} />
      )}
      <LinkButton
        to="/compare"
        search={{ trials: [trial.id] } as never}
        size="xs"
        variant="default"
      >
        Compare
      </LinkButton>
      {canContinue && (
        <Button
          size="xs"
          leftSection={<IconPlayerTrackNext size={16} />}
          onClick={() => setAsking("continue")}
        >
          Continue trial
        </Button>
      )}
      {!isTerminal(trial.state) && !experiment.is_unmanaged && (
        <Button
          size="xs"
          variant="default"
          leftSection={<IconSkull size={16} />}
          onClick={() => setAsking("kill")}
        >
          Kill trial
        </Button>
      )}
      {asking === "kill" && (
        <Confirm
          title={`Kill trial ${trial.id}?`}
          confirmLabel="Kill it"
          isDestructive
          onConfirm={async () =>
            client.setQueryData(keys.trial(trial.id), await killTrial(trial.id))
          }
          onClose={close}
        >
          <Text size="sm">
            Ends it at once: what was trained since{" "}
            {trial.latest_checkpoint ? "its latest checkpoint" : "its start (it has no checkpoint)"}{" "}
            is lost. Metrics, logs and stored checkpoints stay.
          </Text>
        </Confirm>
      )}
      {asking === "continue" && (
        <Confirm
          title={`Continue trial ${trial.id}?`}
          confirmLabel="Continue"
          onConfirm={async () => {
            const created = await continueTrial(trial.id, {});
            notifications.show({
              message: `Experiment ${created.id} continues trial ${trial.id}.`,
            });
            await navigate({ to: "/experiments/$id", params: { id: created.id } });
          }}
          cancelLabel="Not now"
          onClose={close}
        >
          <Text size="sm">
            Creates a new experiment with one trial that starts from the latest checkpoint of this
            one. Nothing is lost. To change the config first,{" "}
            <LinkText to="/new" search={{ trial: trial.id } as never}>
              edit it
            </LinkText>
            .
          </Text>
        </Confirm>
      )}
    </Group>
  );
}
