import { TextInput } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";
import { useParams } from "@tanstack/react-router";
import { useState } from "react";

import { trialQuery } from "../../api/queries";
import { Empty } from "../../components/Feedback";
import { Scroll } from "../../components/Scroll";
import { flatten } from "../../lib/flatten";
import { formatValue } from "../../lib/numbers";

export function TrialHyperparameters() {
  const { id } = useParams({ from: "/trials/$id" });
  const trial = useQuery(trialQuery(id)).data;
  const [wanted, setWanted] = useState("");
  const all = Object.entries(flatten(trial?.hparams ?? {}));
  const said = <Metadata metadata={trial?.metadata ?? {}} />;
  if (all.length === 0)
    return (
      <>
        <Empty title="No hyperparameters">The config sets none for this trial.</Empty>
        {said}
      </>
    );
  const shown = all.filter(([name]) => name.toLowerCase().includes(wanted.toLowerCase()));
  return (
    <>
      <TextInput
        aria-label="Search hyperparameters"
        placeholder="Search"
        size="xs"
        maw={260}
        mb="sm"
        value={wanted}
        onChange={(event) => setWanted(event.currentTarget.value)}
      />
      <Values title="Hyperparameter" label="Hyperparameters" values={shown} />
      {said}
    </>
  );
}

/** What the trial's code says of it as a whole. */
function Metadata({ metadata }: { metadata: Record<string, unknown> }) {
  const values = Object.entries(flatten(metadata));
  if (values.length === 0) return null;
  return (
    <div style={{ marginTop: 16 }}>
      <Values title="Metadata" label="Metadata of the trial" values={values} />
    </div>
  );
}

interface ValuesProps {
  title: string;
  label: string;
  values: [string, unknown][];
}

function Values({ title, label, values }: ValuesProps) {
  return (
    <Scroll label={label} className="card">
      <table className="plain-table">
        <thead>
          <tr>
            <th>{title}</th>
            <th>Value</th>
          </tr>
        </thead>
        <tbody>
          {values.map(([name, value]) => (
            <tr key={name}>
              <td className="wrap-anywhere">{name}</td>
              <td
                className="mono wrap-anywhere"
                title={String(JSON.stringify(value)).slice(0, 2000)}
              >
                {typeof value === "number" ? value : formatValue(value).slice(0, 10_000)}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </Scroll>
  );
}
