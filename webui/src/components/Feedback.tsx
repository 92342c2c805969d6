/** Waiting, nothing there, and errors: never a blank page. */

import {
  ActionIcon,
  Alert,
  Button,
  Code,
  CopyButton,
  Loader,
  Stack,
  Text,
  Title,
  Tooltip,
} from "@mantine/core";
import { IconAlertTriangle, IconCheck, IconCopy } from "@tabler/icons-react";
import { type ReactNode, useEffect, useState, useSyncExternalStore } from "react";

import { problemOf } from "../api/problem";

export function Waiting({ what = "this page" }: { what?: string }) {
  return (
    <div role="status" style={{ padding: 32, textAlign: "center" }}>
      <Loader size="sm" aria-hidden />
      <Text size="sm" c="dimmed" mt="xs">
        Loading {what} …
      </Text>
    </div>
  );
}

/** A message in which names stand between back-ticks. */
export function Quoted({ text }: { text: string }) {
  return text
    .split(/`([^`]+)`/)
    .map((part, i) => (i % 2 === 1 ? <code key={i}>{part}</code> : part));
}

interface FailureProps {
  title: string;
  message: string;
  /** What one can do or read next. */
  children?: ReactNode;
}

export function Failure({ title, message, children }: FailureProps) {
  return (
    <Alert
      icon={<IconAlertTriangle aria-hidden />}
      color="red"
      variant="outline"
      styles={{ title: { color: "var(--state-failed)" }, icon: { color: "var(--state-failed)" } }}
      title={title}
      role="alert"
      my="md"
    >
      <Text size="sm" className="wrap-anywhere" style={{ whiteSpace: "pre-wrap" }}>
        <Quoted text={message} />
      </Text>
      {children}
    </Alert>
  );
}

/** What a config asks for that is not done. */
export function Warnings({ messages }: { messages: string[] }) {
  if (messages.length === 0) return null;
  return (
    <Alert
      icon={<IconAlertTriangle aria-hidden />}
      color="yellow"
      variant="outline"
      styles={{ title: { color: "var(--mantine-color-text)" } }}
      title={messages.length === 1 ? "1 warning" : `${messages.length} warnings`}
      role="note"
    >
      <ul style={{ margin: 0, paddingLeft: 18 }}>
        {messages.map((message) => (
          <li key={message} className="wrap-anywhere">
            <Quoted text={message} />
          </li>
        ))}
      </ul>
    </Alert>
  );
}

/** Says that records are missing, if any are. */
export function LostRecords({ count, children }: { count: number; children?: ReactNode }) {
  if (count === 0) return null;
  const title = count === 1 ? "1 record is lost" : `${count} records are lost`;
  return (
    <Failure
      title={title}
      message="This page is not complete. The log says what is missing and why."
    >
      {children}
    </Failure>
  );
}

/** Views of a master that does not answer: the first one speaks for the page. */
const unreachable = new Set<object>();
const listeners = new Set<() => void>();

function useSpeaks(isUnreachable: boolean): boolean {
  const [self] = useState(() => ({}));
  useEffect(() => {
    if (!isUnreachable) return;
    const change = (update: () => void) => {
      update();
      for (const listener of listeners) listener();
    };
    change(() => unreachable.add(self));
    return () => change(() => unreachable.delete(self));
  }, [isUnreachable, self]);
  return useSyncExternalStore(subscribe, () => {
    const [first] = unreachable;
    return !isUnreachable || first === undefined || first === self;
  });
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function ProblemView({ error, onRetry }: { error: unknown; onRetry?: () => void }) {
  const problem = problemOf(error);
  if (!useSpeaks(problem.status === 0 && problem.code === "unreachable")) return null;
  return (
    <Failure title={problem.title} message={problem.message}>
      {onRetry && (
        <Button size="xs" mt="sm" variant="default" onClick={onRetry}>
          Try again
        </Button>
      )}
    </Failure>
  );
}

export function CopyText({ text, label = "Copy" }: { text: string; label?: string }) {
  return (
    <CopyButton value={text}>
      {({ copied, copy }) => (
        <Tooltip label={copied ? "Copied" : label}>
          <ActionIcon variant="subtle" color="gray" onClick={copy} aria-label={label} size="md">
            {copied ? <IconCheck size={16} /> : <IconCopy size={16} />}
          </ActionIcon>
        </Tooltip>
      )}
    </CopyButton>
  );
}

export function Command({ text }: { text: string }) {
  return (
    <span style={{ display: "inline-flex", alignItems: "center", gap: 4, maxWidth: "100%" }}>
      <Code className="wrap-anywhere">{text}</Code>
      <CopyText text={text} label="Copy the command" />
    </span>
  );
}

interface NoCurvesProps {
  who: string;
  /** What reports them. */
  call: string;
  hasEnded: boolean;
  hasReported: boolean;
}

/** Why there are no curves, and how to get some. */
export function NoCurves({ who, call, hasEnded, hasReported }: NoCurvesProps) {
  const code = <code>core_context.train.{call}(...)</code>;
  if (hasReported)
    return (
      <Empty title="No curves">What was reported cannot be drawn: it is not finite, or text.</Empty>
    );
  if (hasEnded)
    return <Empty title="No metrics">None were reported: in your code, {code} does.</Empty>;
  return (
    <Empty title="No metrics yet">
      Curves appear as soon as {who} reports: in your code, {code}.
    </Empty>
  );
}

interface EmptyProps {
  title: string;
  children?: ReactNode;
  command?: string;
}

export function Empty({ title, children, command }: EmptyProps) {
  return (
    <Stack align="center" gap="xs" p="xl" ta="center">
      <Title order={2} size="h4">
        {title}
      </Title>
      {children && (
        <Text c="dimmed" size="sm" maw={520} component="div" className="wrap-anywhere">
          {children}
        </Text>
      )}
      {command && <Command text={command} />}
    </Stack>
  );
}
