/** What an experiment came from, and all that came of it, as a tree. */

import { Badge, Group, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";

import { treeQuery, trialCheckpointsQuery, trialQuery } from "../../api/queries";
import type { components } from "../../api/schema";
import { Empty, ProblemView, Waiting } from "../../components/Feedback";
import { LinkText } from "../../components/links";
import { Scroll } from "../../components/Scroll";
import { StateBadge } from "../../components/StateBadge";
import { formatNumber, plural, toNumber } from "../../lib/numbers";

type Relative = components["schemas"]["Relative"];

export function Lineage() {
  const { id } = useParams({ from: "/experiments/$id" });
  return <Tree id={id} />;
}

/** Where a trial began, and what began from its checkpoints. */
export function TrialLineage() {
  const { id } = useParams({ from: "/trials/$id" });
  const experimentId = useQuery(trialQuery(id)).data?.experiment_id;
  const tree = useQuery({ ...treeQuery(experimentId ?? 0), enabled: experimentId !== undefined });
  const checkpoints = useQuery(trialCheckpointsQuery(id)).data ?? [];
  if (experimentId === undefined) return <Waiting what="the lineage" />;
  const uuids = new Set(checkpoints.map(({ uuid }) => uuid));
  const children = (tree.data ?? []).filter(
    (one) => one.parent_trial_id === id || (one.checkpoint && uuids.has(one.checkpoint)),
  );
  const origin = tree.data?.find((one) => one.id === experimentId);
  return (
    <>
      <Text size="sm" mb="xs" component="div">
        {origin?.checkpoint
          ? `It began from checkpoint ${origin.checkpoint.slice(0, 8)}.`
          : "It began from nothing."}{" "}
        {children.length === 0
          ? "Nothing began from its checkpoints."
          : `${plural(children.length, "experiment")} began from its checkpoints: `}
        {children.map(({ id: child, name }, index) => (
          <span key={child}>
            {index > 0 && ", "}
            <LinkText to="/experiments/$id" params={{ id: child }} underline="always">
              {name} ({child})
            </LinkText>
          </span>
        ))}
      </Text>
      <Tree id={experimentId} />
    </>
  );
}

function Tree({ id }: { id: number }) {
  const tree = useQuery(treeQuery(id));
  if (tree.isPending) return <Waiting what="the lineage" />;
  if (tree.isError) return <ProblemView error={tree.error} onRetry={() => void tree.refetch()} />;
  const [root] = tree.data;
  if (root === undefined || tree.data.length === 1)
    return (
      <Empty title="No relatives">
        Nothing was forked from this experiment or continues it, and it came from no other.
      </Empty>
    );
  return (
    <Scroll label="Lineage">
      <ul style={LIST}>
        <Branch relative={root} all={tree.data} current={id} />
      </ul>
    </Scroll>
  );
}

const LIST = { listStyle: "none", margin: 0, paddingLeft: 20 };

interface BranchProps {
  relative: Relative;
  all: readonly Relative[];
  current: number;
}

function Branch({ relative, all, current }: BranchProps) {
  const children = all.filter(({ parent }) => parent === relative.id);
  const { id, name, labels, best_metric: best, has_changed_code: isChanged } = relative;
  const isCurrent = id === current;
  return (
    <li>
      <Group gap="xs" py={4} aria-current={isCurrent || undefined}>
        {isCurrent ? (
          <Text size="sm" fw={700}>
            {name} ({id}), this one
          </Text>
        ) : (
          <LinkText to="/experiments/$id/lineage" params={{ id }} size="sm">
            {name} ({id})
          </LinkText>
        )}
        <StateBadge state={relative.state} />
        <Text size="sm">best {formatNumber(toNumber(best))}</Text>
        <Origin relative={relative} />
        {isChanged && <Tag text="changed code" />}
        {labels.map((label) => (
          <Tag key={label} text={label} />
        ))}
      </Group>
      {children.length > 0 && (
        <ul style={LIST}>
          {children.map((one) => (
            <Branch key={one.id} relative={one} all={all} current={current} />
          ))}
        </ul>
      )}
    </li>
  );
}

function Tag({ text }: { text: string }) {
  return (
    <Badge variant="default" tt="none" fw={500}>
      {text}
    </Badge>
  );
}

/** How it came of its parent, and the checkpoint that went from one to the other. */
function Origin({ relative }: { relative: Relative }) {
  const { parent, parent_trial_id: trial, checkpoint } = relative;
  if (parent === null) return null;
  const from = checkpoint ? ` from checkpoint ${checkpoint.slice(0, 8)}` : "";
  if (typeof trial !== "number")
    return (
      <Text size="sm" c="dimmed">
        forked{from}
      </Text>
    );
  return (
    <Text size="sm" c="dimmed">
      continues{" "}
      <LinkText to="/trials/$id/checkpoints" params={{ id: trial }}>
        trial {trial}
      </LinkText>
      {from}
    </Text>
  );
}
