/** The users of a shared master, for administrators: add, remove, sign-in links. */

import { Button, Group, Select, Switch, Text, TextInput } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { type FormEvent, useState } from "react";

import { addUser, removeUser, setAdmin, signInLink } from "../api/actions";
import { keys } from "../api/keys";
import { problemOf } from "../api/problem";
import { usersQuery } from "../api/queries";
import type { Role, User } from "../api/types";
import { Confirm } from "../components/Confirm";
import { Command, ProblemView, Waiting } from "../components/Feedback";
import { Scroll } from "../components/Scroll";
import { useTitle } from "../lib/title";
import { LabHead, useIsAdmin } from "./LabHead";

const ROLES: readonly Role[] = ["viewer", "editor", "admin"];

interface Link {
  user: string;
  url: string;
}

export function Users() {
  useTitle("Users");
  const isAdmin = useIsAdmin();
  const users = useQuery(usersQuery);
  const [link, setLink] = useState<Link | null>(null);
  const [removed, setRemoved] = useState<string | null>(null);
  const client = useQueryClient();
  const refresh = () => client.invalidateQueries({ queryKey: keys.users() });
  const showLink = async (user: string) => setLink({ user, url: await signInLink(user) });
  const change = useMutation({
    mutationFn: (one: User) => setAdmin(one.name, !one.is_admin),
    onSettled: refresh,
  });
  const ask = useMutation({ mutationFn: showLink });
  const failed = change.error ?? ask.error;
  return (
    <>
      <LabHead title="Users" />
      {isAdmin && (
        <AddUser
          onAdded={async (name) => {
            await refresh();
            await showLink(name);
          }}
        />
      )}
      {link && (
        <Text size="sm" mb="sm" component="div" role="status">
          This link signs {link.user} in, once:
          <Command text={link.url} />
        </Text>
      )}
      {failed && <ProblemView error={failed} />}
      {users.isPending && <Waiting what="users" />}
      {users.isError && <ProblemView error={users.error} onRetry={() => void users.refetch()} />}
      {users.data && (
        <Scroll label="Users" className="card">
          <table className="plain-table">
            <thead>
              <tr>
                <th>Name</th>
                <th>State</th>
                <th>Group</th>
                <th>Administrator</th>
                <th>Access</th>
              </tr>
            </thead>
            <tbody>
              {users.data.map((one) => (
                <tr key={one.name}>
                  <td className="setting">{one.name}</td>
                  <td>
                    {!one.is_active ? "removed" : one.is_service ? "service" : "active"}
                    {one.oidc && `, OpenID Connect: ${one.oidc}`}
                  </td>
                  <td className="setting">{one.group}</td>
                  <td>
                    <Switch
                      aria-label={`${one.name} is an administrator`}
                      checked={one.is_admin}
                      disabled={!one.is_active || !isAdmin}
                      onChange={() => change.mutate(one)}
                    />
                  </td>
                  <td>
                    {one.is_active && isAdmin && (
                      <Group gap="xs" wrap="nowrap">
                        <Button size="xs" variant="default" onClick={() => ask.mutate(one.name)}>
                          Sign-in link
                        </Button>
                        <Button size="xs" variant="default" onClick={() => setRemoved(one.name)}>
                          Remove
                        </Button>
                      </Group>
                    )}
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {removed !== null && (
        <Confirm
          title={`Remove ${removed}?`}
          confirmLabel="Remove"
          isDestructive
          onConfirm={() => removeUser(removed).finally(refresh)}
          onClose={() => setRemoved(null)}
        >
          <Text size="sm">
            Tokens and sign-ins of {removed} end. Experiments stay, and their trials continue.
          </Text>
        </Confirm>
      )}
    </>
  );
}

function AddUser({ onAdded }: { onAdded: (name: string) => Promise<void> }) {
  const [name, setName] = useState("");
  const [role, setRole] = useState<Role | null>("editor");
  const add = useMutation({
    mutationFn: () => addUser(name, role),
    onSuccess: async () => {
      setName("");
      await onAdded(name);
    },
  });
  const submit = (event: FormEvent) => {
    event.preventDefault();
    add.mutate();
  };
  return (
    <form onSubmit={submit}>
      <Group align="flex-end" gap="sm" mb="sm">
        <TextInput
          label="Name"
          size="xs"
          required
          value={name}
          onChange={(event) => setName(event.currentTarget.value)}
          error={add.isError ? problemOf(add.error).message : undefined}
        />
        <Select
          label="Role in the project Default"
          size="xs"
          clearable
          placeholder="None"
          data={ROLES}
          value={role}
          onChange={setRole}
        />
        <Button type="submit" size="xs" loading={add.isPending}>
          Add user
        </Button>
      </Group>
    </form>
  );
}
