/** What an experiment came from, and all that came of it, as a tree. */

import { Badge, Group, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";

import { treeQuery } from "../../api/queries";
import type { components } from "../../api/schema";
import { Empty, ProblemView, Waiting } from "../../components/Feedback";
import { LinkText } from "../../components/links";
import { Scroll } from "../../components/Scroll";
import { StateBadge } from "../../components/StateBadge";
import { formatNumber, toNumber } from "../../lib/numbers";

type Relative = components["schemas"]["Relative"];

export function Lineage() {
  const { id } = useParams({ from: "/experiments/$id" });
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
