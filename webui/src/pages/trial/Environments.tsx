/** What the attempts of a trial ran in. */

import { Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";

import { trialEnvironmentsQuery } from "../../api/queries";
import { Facts } from "../../components/Facts";
import { Scroll } from "../../components/Scroll";
import { attemptsOf, type EnvironmentGroup, factsOf, groupsOf } from "../../lib/environments";
import { plural } from "../../lib/numbers";

export function Environments({ trialId }: { trialId: number }) {
  const attempts = useQuery(trialEnvironmentsQuery(trialId)).data ?? [];
  return groupsOf(attempts).map((group) => (
    <EnvironmentCard key={group.numbers[0]} group={group} />
  ));
}

function EnvironmentCard({ group }: { group: EnvironmentGroup }) {
  const packages = Object.entries(group.environment.packages ?? {}).sort();
  const title = `Environment of ${attemptsOf(group)}`;
  const diff = group.source?.diff;
  return (
    <section className="card" aria-label={title}>
      <Title order={2} mb="xs">
        {title}
      </Title>
      <Facts items={factsOf(group)} />
      {diff && (
        <details>
          <summary>Uncommitted changes</summary>
          <Scroll label={`Uncommitted changes of ${attemptsOf(group)}`}>
            <pre>{diff}</pre>
          </Scroll>
        </details>
      )}
      {packages.length > 0 && (
        <details>
          <summary>{plural(packages.length, "package")}</summary>
          <Scroll label={`Packages of ${attemptsOf(group)}`}>
            <table className="plain-table">
              <thead>
                <tr>
                  <th>Package</th>
                  <th>Version</th>
                </tr>
              </thead>
              <tbody>
                {packages.map(([name, version]) => (
                  <tr key={name}>
                    <td>{name}</td>
                    <td>{version}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </Scroll>
        </details>
      )}
    </section>
  );
}
