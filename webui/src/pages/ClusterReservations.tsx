/** Reservations of nodes: who has which one when; administrators make and end them. */

import { Button, Group, Select, Text, TextInput, Title } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";

import { releaseNode, reserveNode } from "../api/actions";
import { keys } from "../api/keys";
import { sessionQuery, usersQuery } from "../api/queries";
import type { Reservation } from "../api/types";
import { Confirm } from "../components/Confirm";
import { FormDialog } from "../components/FormDialog";
import { Scroll } from "../components/Scroll";
import { formatTime, localInput } from "../lib/times";

const HOUR_S = 3600;

interface Props {
  reservations: readonly Reservation[];
  nodes: readonly string[];
}

export function Reservations({ reservations, nodes }: Props) {
  const session = useQuery(sessionQuery).data;
  const isAdmin = session?.scope === "admin" && session.is_shared;
  const client = useQueryClient();
  const [isMaking, setIsMaking] = useState(false);
  const [released, setReleased] = useState<Reservation | null>(null);
  const refresh = () => client.invalidateQueries({ queryKey: keys.nodes() });
  if (reservations.length === 0 && !isAdmin) return null;
  return (
    <section>
      <Group mb="xs" gap="sm">
        <Title order={2}>Reservations</Title>
        {isAdmin && (
          <Button size="xs" variant="default" onClick={() => setIsMaking(true)}>
            Reserve a node
          </Button>
        )}
      </Group>
      {reservations.length === 0 ? (
        <Text size="sm" c="dimmed">
          No node is reserved.
        </Text>
      ) : (
        <Scroll label="Reservations" className="card">
          <table className="plain-table">
            <thead>
              <tr>
                <th>Node</th>
                <th>For</th>
                <th>From</th>
                <th>Until</th>
                {isAdmin && <th>Change</th>}
              </tr>
            </thead>
            <tbody>
              {reservations.map((one) => (
                <tr key={one.id}>
                  <td className="setting">{one.node}</td>
                  <td className="setting">{one.user}</td>
                  <td className="short">{formatTime(one.begins_at)}</td>
                  <td className="short">{formatTime(one.ends_at)}</td>
                  {isAdmin && (
                    <td>
                      <Button
                        size="xs"
                        variant="default"
                        aria-label={`Release ${one.node} of ${one.user}`}
                        onClick={() => setReleased(one)}
                      >
                        Release
                      </Button>
                    </td>
                  )}
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {isMaking && (
        <ReserveDialog nodes={nodes} onDone={refresh} onClose={() => setIsMaking(false)} />
      )}
      {released && (
        <Confirm
          title={`Release ${released.node}?`}
          confirmLabel="Release it"
          isDestructive
          onConfirm={() => releaseNode(released).finally(refresh)}
          onClose={() => setReleased(null)}
        >
          <Text size="sm">
            The reservation for {released.user} ends, or does not begin. Trials of all start there
            again.
          </Text>
        </Confirm>
      )}
    </section>
  );
}

interface DialogProps {
  nodes: readonly string[];
  onDone: () => Promise<unknown>;
  onClose: () => void;
}

function ReserveDialog({ nodes, onDone, onClose }: DialogProps) {
  const users = useQuery(usersQuery).data?.filter((one) => one.is_active) ?? [];
  const [node, setNode] = useState<string | null>(nodes.length === 1 ? (nodes[0] ?? null) : null);
  const [user, setUser] = useState<string | null>(null);
  const [now] = useState(() => Math.floor(Date.now() / 1000));
  const [begins, setBegins] = useState(localInput(now));
  const [ends, setEnds] = useState(localInput(now + HOUR_S));
  const make = useMutation({
    mutationFn: () =>
      reserveNode(node ?? "", {
        user: user ?? "",
        begins_at: Date.parse(begins) / 1000,
        ends_at: Date.parse(ends) / 1000,
      }),
    onSuccess: onClose,
    onSettled: onDone,
  });
  const time = (label: string, value: string, onChange: (value: string) => void) => (
    <TextInput
      type="datetime-local"
      step={60}
      label={label}
      required
      value={value}
      onChange={(event) => onChange(event.currentTarget.value)}
    />
  );
  return (
    <FormDialog
      title="Reserve a node"
      save={make}
      saveLabel="Reserve"
      cancelLabel="Do not reserve"
      isReady={Boolean(node && user)}
      onSave={() => make.mutate()}
      onClose={onClose}
    >
      <Select
        label="Node"
        required
        searchable
        data={[...nodes]}
        value={node}
        onChange={setNode}
        openOnFocus={false}
        data-autofocus
      />
      <Select
        label="For"
        required
        searchable
        data={users.map((one) => one.name)}
        value={user}
        onChange={setUser}
      />
      {time("From", begins, setBegins)}
      {time("Until", ends, setEnds)}
      <Text size="sm" c="dimmed">
        Trials of others do not start there from an hour before on. Those that still run when it
        begins store a checkpoint and go on elsewhere.
      </Text>
    </FormDialog>
  );
}
