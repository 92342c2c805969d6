/** Shares and limits of users and projects, and what counts against them. */

import { Button, Group, NumberInput, Select, Text } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useState } from "react";

import { deleteQuota, type QuotaLimits, setQuota, type Owner } from "../api/actions";
import { keys } from "../api/keys";
import { ApiProblem } from "../api/problem";
import { projectsQuery, quotasQuery, usersQuery } from "../api/queries";
import type { Quota } from "../api/types";
import { Confirm } from "../components/Confirm";
import { Empty, ProblemView, Waiting } from "../components/Feedback";
import { FormDialog } from "../components/FormDialog";
import { Scroll } from "../components/Scroll";
import { formatBytes, formatNumber } from "../lib/numbers";
import { useTitle } from "../lib/title";
import { LabHead, useIsAdmin } from "./LabHead";

const GIB = 2 ** 30;
const DEFAULTS: QuotaLimits = {
  weight: 1,
  max_slots: null,
  slot_hours: null,
  checkpoint_bytes: null,
  media_bytes: null,
};

export function Quotas() {
  useTitle("Quotas");
  const quotas = useQuery({ ...quotasQuery, refetchInterval: 10_000 });
  const isAdmin = useIsAdmin();
  const client = useQueryClient();
  const [editing, setEditing] = useState<Quota | "new" | null>(null);
  const [deleting, setDeleting] = useState<Quota | null>(null);
  const refresh = () => client.invalidateQueries({ queryKey: keys.quotas() });
  return (
    <>
      <LabHead
        title="Quotas"
        actions={
          isAdmin && (
            <Button size="xs" onClick={() => setEditing("new")}>
              Set a quota
            </Button>
          )
        }
      />
      <Text size="sm" c="dimmed" mb="sm">
        Nothing is killed: when a limit is reached, running trials go on, and others wait and say
        why.
      </Text>
      {quotas.isPending && <Waiting what="quotas" />}
      {quotas.isError && <ProblemView error={quotas.error} onRetry={() => void quotas.refetch()} />}
      {quotas.data?.length === 0 && (
        <Empty title="No quotas">All users have the same weight, and no limits.</Empty>
      )}
      {quotas.data && quotas.data.length > 0 && (
        <Scroll label="Quotas" className="card">
          <table className="plain-table">
            <thead>
              <tr>
                <th>Of</th>
                <th className="number">Weight</th>
                <th className="number">Slots</th>
                <th className="number">Slot hours of this month</th>
                <th className="number">Checkpoints</th>
                <th className="number">Media</th>
                {isAdmin && <th>Change</th>}
              </tr>
            </thead>
            <tbody>
              {quotas.data.map((one) => (
                <tr key={nameOf(one)}>
                  <td className="setting">{nameOf(one)}</td>
                  <td className="number">
                    {one.project === null ? formatNumber(one.weight) : "–"}
                  </td>
                  <td className="number">{usedOf(one.num_slots_used, one.max_slots, String)}</td>
                  <td className="number">
                    {usedOf(one.slot_hours_used, one.slot_hours, (hours) => hours.toFixed(2))}
                  </td>
                  <td className="number">
                    {usedOf(one.checkpoint_bytes_used, one.checkpoint_bytes, formatBytes)}
                  </td>
                  <td className="number">
                    {usedOf(one.media_bytes_used ?? 0, one.media_bytes ?? null, formatBytes)}
                  </td>
                  {isAdmin && (
                    <td>
                      <Group gap="xs" wrap="nowrap">
                        <Button
                          size="xs"
                          variant="default"
                          aria-label={`Edit the quota of ${nameOf(one)}`}
                          onClick={() => setEditing(one)}
                        >
                          Edit
                        </Button>
                        <Button
                          size="xs"
                          variant="default"
                          aria-label={`Delete the quota of ${nameOf(one)}`}
                          onClick={() => setDeleting(one)}
                        >
                          Delete
                        </Button>
                      </Group>
                    </td>
                  )}
                </tr>
              ))}
            </tbody>
          </table>
        </Scroll>
      )}
      {editing && (
        <QuotaDialog
          before={editing === "new" ? null : editing}
          known={quotas.data ?? []}
          onSaved={refresh}
          onClose={() => setEditing(null)}
        />
      )}
      {deleting && (
        <Confirm
          title={`Delete the quota of ${nameOf(deleting)}?`}
          confirmLabel="Delete it"
          isDestructive
          onConfirm={() => deleteQuota(deleting).finally(refresh)}
          onClose={() => setDeleting(null)}
        >
          <Text size="sm">The weight is 1 then, and there is no limit.</Text>
        </Confirm>
      )}
    </>
  );
}

function nameOf({ user, group, project }: Owner): string {
  if (user !== null) return `user ${user}`;
  return group ? `group ${group}` : `project ${project}`;
}

function usedOf(used: number, limit: number | null, told: (value: number) => string): string {
  return limit === null ? told(used) : `${told(used)} of ${told(limit)}`;
}

interface QuotaDialogProps {
  before: Quota | null;
  known: readonly Quota[];
  onSaved: () => Promise<unknown>;
  onClose: () => void;
}

function QuotaDialog({ before, known, onSaved, onClose }: QuotaDialogProps) {
  const users = useQuery(usersQuery).data ?? [];
  const projects = useQuery(projectsQuery).data ?? [];
  const [owner, setOwner] = useState<string | null>(null);
  const [limits, setLimits] = useState<QuotaLimits>(before ?? DEFAULTS);
  const [revision, setRevision] = useState(before?.revision ?? 0);
  const of = before ?? ownerOf(owner);
  // A quota that is there already is changed, also by who began a new one.
  const newest = known.find((one) => of !== null && nameOf(one) === nameOf(of));
  const save = useMutation({
    mutationFn: () =>
      setQuota(of ?? { user: null, group: null, project: null }, { ...limits, revision }),
    onSuccess: onClose,
    onSettled: onSaved,
  });
  const isOvertaken = save.error instanceof ApiProblem && save.error.code === "quota_changed";
  const choices = [
    ...users.filter((one) => one.is_active).map((one) => `user ${one.name}`),
    ...[...new Set(users.flatMap(({ group }) => (group ? [`group ${group}`] : [])))].sort(),
    ...projects.map((one) => `project ${one.name}`),
  ];
  const field = (name: keyof QuotaLimits, label: string, scale = 1) => {
    const value = limits[name];
    return (
      <NumberInput
        label={label}
        min={0}
        placeholder="No limit"
        value={value === null || value === undefined ? "" : value / scale}
        onChange={(given) => {
          const number = given === "" ? null : Number(given) * scale;
          const isWhole = name !== "weight" && name !== "slot_hours";
          setLimits({
            ...limits,
            [name]:
              number === null && name === "weight"
                ? 1
                : isWhole && number !== null
                  ? Math.round(number)
                  : number,
          });
        }}
      />
    );
  };
  return (
    <FormDialog
      title={before ? `Quota of ${nameOf(before)}` : "Set a quota"}
      {...{ save, onClose }}
      saveLabel="Save"
      hidesError={isOvertaken}
      isReady={of !== null && !isOvertaken}
      onSave={() => save.mutate()}
    >
      {before === null && (
        <Select
          label="Of"
          searchable
          required
          data={choices}
          value={owner}
          onChange={setOwner}
          openOnFocus={false}
          data-autofocus
        />
      )}
      {!of?.project && field("weight", "Weight in fair shares")}
      {field("max_slots", "Slots at once")}
      {field("slot_hours", "Slot hours in each month")}
      {field("checkpoint_bytes", "GiB of checkpoints", GIB)}
      {field("media_bytes", "GiB of media", GIB)}
      {isOvertaken && (
        <div role="alert">
          <Text size="sm">
            Somebody else has changed this quota since you opened it. Nothing was overwritten: load
            theirs, or replace theirs with what stands here.
          </Text>
          <Group gap="xs" mt="xs">
            <Button
              size="xs"
              variant="default"
              disabled={newest === undefined}
              onClick={() => {
                setLimits(newest ?? DEFAULTS);
                setRevision(newest?.revision ?? 0);
                save.reset();
              }}
            >
              Load theirs
            </Button>
            <Button
              size="xs"
              variant="default"
              onClick={() => {
                setRevision(newest?.revision ?? 0);
                save.reset();
              }}
            >
              Replace theirs
            </Button>
          </Group>
        </div>
      )}
    </FormDialog>
  );
}

function ownerOf(text: string | null): Owner | null {
  const [kind, name] = text?.split(/ (.*)/s) ?? [];
  if (name === undefined) return null;
  return { user: null, group: null, project: null, [kind ?? "project"]: name };
}
