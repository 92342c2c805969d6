import { Badge, Code, Group, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";

import { experimentQuery, statusQuery } from "../../api/queries";
import type { Experiment } from "../../api/types";
import { ExperimentActions } from "../../components/ExperimentActions";
import { Failure, LostRecords, ProblemView, Waiting, Warnings } from "../../components/Feedback";
import { LinkText } from "../../components/links";
import { PageHead } from "../../components/PageHead";
import { StateBadge } from "../../components/StateBadge";
import { TabbedPage } from "../../components/Tabs";
import { isId } from "../../lib/search";
import { interactiveKind, isTerminal, shownExperimentState } from "../../lib/states";
import { useTitle } from "../../lib/title";
import { NotFound } from "../NotFound";

export function ExperimentPage() {
  const { id } = useParams({ from: "/experiments/$id" });
  const answer = useQuery({ ...experimentQuery(id), enabled: isId(id) });
  // Problems of the master send no events.
  const isGoing = answer.data !== undefined && !isTerminal(answer.data.state);
  const status = useQuery({ ...statusQuery, enabled: isGoing, refetchInterval: 5000 });
  useTitle(answer.data?.name);
  if (!isId(id)) return <NotFound />;
  if (answer.isPending) return <Waiting what={`experiment ${id}`} />;
  if (answer.isError && !answer.data)
    return (
      <>
        <PageHead
          above={<LinkText to="/experiments">Experiments</LinkText>}
          title={`Experiment ${id}`}
        />
        <ProblemView error={answer.error} onRetry={() => void answer.refetch()} />
      </>
    );
  const experiment = answer.data;
  const problems = isGoing ? (status.data?.problems ?? []) : [];
  const own = problems.filter((problem) => problem.startsWith(`Experiment ${id} `));
  return (
    <TabbedPage
      head={
        <PageHead
          above={
            <>
              <LinkText to="/experiments">Experiments</LinkText> / {id}
            </>
          }
          title={experiment.name}
          beside={<StateBadge state={shownExperimentState(experiment)} />}
          actions={<ExperimentActions experiment={experiment} />}
        />
      }
      notes={
        <>
          {answer.isError && <ProblemView error={answer.error} />}
          <Origin experiment={experiment} />
          {experiment.error && (
            <Failure title="The experiment failed" message={experiment.error}>
              <LinkText to="/experiments/$id/logs" params={{ id }} size="sm">
                Read the logs
              </LinkText>
            </Failure>
          )}
          <Warnings messages={[...(experiment.warnings ?? []), ...own]} />
          <LostRecords count={experiment.num_records_lost ?? 0}>
            <LinkText to="/experiments/$id/logs" params={{ id }} size="sm">
              Read the logs
            </LinkText>
          </LostRecords>
        </>
      }
      label="Views of the experiment"
      tabs={tabsOf(experiment)}
    />
  );
}

function Origin({ experiment }: { experiment: Experiment }) {
  return (
    <Group gap="xs">
      {experiment.description && <Text size="sm">{experiment.description}</Text>}
      {experiment.is_archived && (
        <Badge variant="default" tt="none" fw={500}>
          Archived
        </Badge>
      )}
      {experiment.labels.map((label) => (
        <Badge key={label} variant="default" tt="none" fw={500}>
          {label}
        </Badge>
      ))}
      {experiment.parent_trial_id !== null && (
        <Text size="sm" c="dimmed">
          continues{" "}
          <LinkText to="/trials/$id" params={{ id: experiment.parent_trial_id }}>
            trial {experiment.parent_trial_id}
          </LinkText>
        </Text>
      )}
      {interactiveKind(experiment) !== null && (
        <Text size="sm" c="dimmed" className="wrap-anywhere">
          a {interactiveKind(experiment)} on slots
          {!isTerminal(experiment.state) && (
            <>
              ; its owner opens it by <Code>paceline open {experiment.id}</Code>
            </>
          )}
        </Text>
      )}
      {experiment.is_unmanaged && (
        <Text size="sm" c="dimmed" className="wrap-anywhere">
          {experiment.run_dir
            ? `a run made without a master, in ${experiment.run_dir}`
            : "a run that another tracker's client logs here"}
        </Text>
      )}
    </Group>
  );
}

function tabsOf({ id, has_rungs, num_trials }: Experiment) {
  const at = `/experiments/${id}`;
  return [
    { label: "Overview", to: at, isIndex: true },
    { label: `Trials ${num_trials}`, to: `${at}/trials` },
    { label: "Hyperparameters", to: `${at}/hyperparameters` },
    ...(has_rungs ? [{ label: "Rungs", to: `${at}/search` }] : []),
    { label: "Checkpoints", to: `${at}/checkpoints` },
    { label: "Code and config", to: `${at}/code` },
    { label: "Lineage", to: `${at}/lineage` },
    { label: "Notes", to: `${at}/notes` },
    { label: "Logs", to: `${at}/logs` },
  ];
}
