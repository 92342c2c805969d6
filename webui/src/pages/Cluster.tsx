import { Stack, Title } from "@mantine/core";
import { useInfiniteQuery, useQuery } from "@tanstack/react-query";

import {
  experimentsQuery,
  masterQuery,
  nodesQuery,
  poolsQuery,
  queueQuery,
  slotsQuery,
} from "../api/queries";
import type { Pool } from "../api/types";
import { Ago } from "../components/Ago";
import { Facts } from "../components/Facts";
import { Failure, ProblemView, Waiting } from "../components/Feedback";
import { LinkButton } from "../components/links";
import { PageHead } from "../components/PageHead";
import { ProgressCell } from "../components/ProgressCell";
import { Scroll } from "../components/Scroll";
import {
  countSlots,
  labelsInWords,
  rulesInWords,
  shownNodes,
  slotsInWords,
  usableSlots,
} from "../lib/cluster";
import { useTitle } from "../lib/title";
import { NodeCard } from "./ClusterNode";
import { Queue } from "./ClusterQueue";
import { Reservations } from "./ClusterReservations";
import { Storages } from "./ClusterStorages";

// Runners that come, go and fall silent send no events.
const REFRESHED = { refetchInterval: 5000 } as const;
const POLICIES: Record<Pool["policy"], string> = {
  fifo: "first come, first served",
  priority: "by priority",
  fair_share: "fair share by weight",
};

export function Cluster() {
  useTitle("Cluster");
  const slots = useQuery({ ...slotsQuery, ...REFRESHED });
  const nodes = useQuery({ ...nodesQuery, ...REFRESHED }).data ?? [];
  const pools = useQuery({ ...poolsQuery, ...REFRESHED }).data ?? [];
  const queue = useQuery({ ...queueQuery, ...REFRESHED }).data ?? [];
  const master = useQuery(masterQuery).data;
  const active = useInfiniteQuery(experimentsQuery({ states: ["ACTIVE"] }));
  if (slots.isPending) return <Waiting what="the cluster" />;
  if (slots.isError)
    return <ProblemView error={slots.error} onRetry={() => void slots.refetch()} />;
  const experiments = active.data?.pages.flatMap((page) => page.items) ?? [];
  const names = new Map(experiments.map((one) => [one.id, one.name]));
  const counts = countSlots(slots.data);
  const { used, usable } = usableSlots(counts);
  const shown = shownNodes(nodes, slots.data);
  // Lost nodes are in no pool of the list, but say to which one they belong.
  const poolNames = [...pools.map((pool) => pool.name), ...shown.map((node) => node.pool)];
  const hasPools = new Set(poolNames).size > 1;
  const hasSettings = pools.some(
    (pool) =>
      pool.policy !== "fifo" || pool.max_slots !== null || pool.backfill || rulesInWords(pool),
  );
  const failed = pools.flatMap(({ name, failure }) => (failure ? [{ name, failure }] : []));
  return (
    <>
      <PageHead
        title="Cluster"
        actions={
          <LinkButton to="/usage" size="xs" variant="default">
            Usage
          </LinkButton>
        }
      />
      <Stack gap="lg">
        <div className="card">
          <Facts
            items={[
              [
                "Slots in use",
                <ProgressCell
                  key="u"
                  value={usable > 0 ? used / usable : 0}
                  label="Slots in use"
                />,
              ],
              ["Slots", slotsInWords(counts)],
              ["Nodes", String(shown.length)],
              ["Active experiments", String(experiments.length)],
              ...(master
                ? ([
                    ["Master started", <Ago key="s" time={master.started_at} />],
                    ["Version", master.version],
                    ["Home", <span key="h">{master.home}</span>],
                  ] as const)
                : []),
            ]}
          />
        </div>
        {failed.map(({ name, failure }) => (
          <Failure key={name} title={`Pool ${name}`} message={failure} />
        ))}
        {(pools.length > 1 || hasSettings) && <Pools pools={pools} />}
        <section>
          <Title order={2} mb="xs">
            Nodes
          </Title>
          <Stack gap="sm">
            {shown.map((node) => (
              <NodeCard key={node.name} shown={node} names={names} hasPools={hasPools} />
            ))}
          </Stack>
        </section>
        <Reservations
          reservations={nodes.flatMap((node) => node.reservations ?? [])}
          nodes={shown.map((node) => node.name)}
        />
        <Queue queue={queue} hasPools={hasPools} />
        <Storages />
      </Stack>
    </>
  );
}

function Pools({ pools }: { pools: readonly Pool[] }) {
  return (
    <section>
      <Title order={2} mb="xs">
        Pools
      </Title>
      <Scroll label="Pools" className="card">
        <table className="plain-table">
          <thead>
            <tr>
              <th>Pool</th>
              <th>Who is next</th>
              <th className="number">Nodes</th>
              <th className="number">Slots in use</th>
              <th className="number">Limit</th>
              <th>Labels</th>
              <th>Rules</th>
            </tr>
          </thead>
          <tbody>
            {pools.map((pool) => (
              <tr key={pool.name}>
                <td className="setting">{pool.name}</td>
                <td className="setting">
                  {POLICIES[pool.policy]}
                  {pool.backfill && ", gaps filled"}
                </td>
                <td className="number">{pool.num_nodes}</td>
                <td className="number">{slotsInWords(pool)}</td>
                <td className="number">{pool.max_slots ?? "none"}</td>
                <td className="setting">{labelsInWords(pool.labels)}</td>
                <td className="setting">{rulesInWords(pool)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </section>
  );
}
