import { Anchor, Group, NavLink, Select, Text } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams, useSearch } from "@tanstack/react-router";

import {
  configQuery,
  experimentQuery,
  fileAddress,
  filesQuery,
  fileQuery,
} from "../../api/queries";
import { useSearchChange } from "../../charts/ChartControls";
import { CodeView } from "../../components/CodeView";
import { CopyText, ProblemView, Waiting } from "../../components/Feedback";
import { formatBytes } from "../../lib/numbers";
import classes from "./Code.module.css";

const RESOLVED = "config:resolved";
const SUBMITTED = "config:submitted";
/** Longer files are for downloading. */
const MOST_BYTES = 1024 * 1024;

export function Code() {
  const { id } = useParams({ from: "/experiments/$id" });
  const { file } = useSearch({ from: "/experiments/$id/code" });
  const change = useSearchChange();
  const config = useQuery(configQuery(id));
  const files = useQuery(filesQuery(id));
  const isUnmanaged = useQuery(experimentQuery(id)).data?.is_unmanaged === true;
  if (config.isPending || files.isPending) return <Waiting what="the code" />;
  if (config.isError) return <ProblemView error={config.error} />;
  const { submitted, resolved_yaml: resolved } = config.data;
  const entries = [
    ...(submitted === null ? [] : [{ value: SUBMITTED, label: "Config as submitted" }]),
    { value: RESOLVED, label: "Config as resolved" },
    ...(files.data ?? []).map(({ path, size }) => ({
      value: path,
      label: path,
      size: formatBytes(size),
    })),
  ];
  const shown = entries.find(({ value }) => value === file)?.value ?? entries[0]?.value ?? RESOLVED;
  const open = (value: string) => change({ file: value });
  return (
    <>
      {files.isError && <ProblemView error={files.error} />}
      <Select
        className={classes.choice}
        label="File"
        data={entries}
        value={shown}
        allowDeselect={false}
        onChange={(value) => value && open(value)}
      />
      <div className={classes.split}>
        <nav aria-label="Files" className={classes.files}>
          {entries.map((entry) => (
            <NavLink
              key={entry.value}
              component="button"
              label={entry.label}
              description={"size" in entry ? entry.size : undefined}
              active={entry.value === shown}
              aria-current={entry.value === shown ? "true" : undefined}
              onClick={() => open(entry.value)}
              className="wrap-anywhere"
              variant="light"
              color="gray"
            />
          ))}
          {files.data?.length === 0 && (
            <Text size="sm" c="dimmed" p="xs">
              {isUnmanaged
                ? "No code was sent: the run was made without a master."
                : "No code was sent: it runs in a directory of its own."}
            </Text>
          )}
        </nav>
        <div style={{ minWidth: 0 }}>
          {shown === RESOLVED && <Shown name="Config as resolved" text={resolved} isYaml />}
          {shown === SUBMITTED && (
            <Shown name="Config as submitted" text={submitted ?? ""} isYaml />
          )}
          {!shown.startsWith("config:") && (
            <CodeFile
              key={shown}
              id={id}
              path={shown}
              size={files.data?.find(({ path }) => path === shown)?.size ?? 0}
            />
          )}
        </div>
      </div>
    </>
  );
}

function CodeFile({ id, path, size }: { id: number; path: string; size: number }) {
  const isSmall = size <= MOST_BYTES;
  const answer = useQuery({ ...fileQuery(id, path), enabled: isSmall });
  const address = fileAddress(id, path);
  if (!isSmall)
    return (
      <Text>
        {path} has {formatBytes(size)}, too much to show.{" "}
        <Anchor href={address} download>
          Download it
        </Anchor>
      </Text>
    );
  if (answer.isPending) return <Waiting what={path} />;
  if (answer.isError) return <ProblemView error={answer.error} />;
  return (
    <Shown
      name={path}
      text={answer.data}
      isYaml={/\.ya?ml$/.test(path)}
      isPython={path.endsWith(".py")}
      address={address}
    />
  );
}

interface ShownProps {
  name: string;
  text: string;
  isYaml?: boolean;
  isPython?: boolean;
  address?: string;
}

function Shown({ name, text, isYaml, isPython, address }: ShownProps) {
  return (
    <section aria-label={name}>
      <Group gap="xs" mb={6}>
        <Text fw={650} className="wrap-anywhere">
          {name}
        </Text>
        <CopyText text={text} label={`Copy ${name}`} />
        {address && (
          <Anchor size="sm" href={address} download={name.split("/").at(-1)}>
            Download
          </Anchor>
        )}
      </Group>
      <CodeView
        label={name}
        text={text}
        language={isYaml ? "yaml" : isPython ? "python" : "text"}
      />
    </section>
  );
}
