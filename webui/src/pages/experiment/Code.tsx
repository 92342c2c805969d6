import { Group, Stack, Title } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";
import { useMemo } from "react";
import { stringify } from "yaml";

import { experimentQuery } from "../../api/queries";
import { CodeView } from "../../components/CodeView";
import { CopyText, Waiting } from "../../components/Feedback";

export function Code() {
  const { id } = useParams({ from: "/experiments/$id" });
  const experiment = useQuery(experimentQuery(id)).data;
  const resolved = useMemo(() => stringify(experiment?.config ?? {}), [experiment?.config]);
  if (!experiment) return <Waiting />;
  return (
    <Stack>
      <Group gap="xs">
        <Title order={2}>Config as resolved</Title>
        <CopyText text={resolved} label="Copy the config" />
      </Group>
      <CodeView label="Config as resolved" text={resolved} language="yaml" />
    </Stack>
  );
}
