/** Dialog of a panel: how it is drawn, further metrics in it, and its own x axis. */

import { Button, Group, Modal, MultiSelect, Select, Stack } from "@mantine/core";

import { CHOICES_SHOWN, manyChoices, useSearchChange } from "../../charts/ChartControls";
import type { Panel } from "../../lib/panels";
import type { PanelChange } from "../../lib/search";

interface PanelDialogProps {
  panel: Panel;
  known: readonly Panel[];
  xNames: readonly string[];
  changes: Readonly<Record<string, PanelChange>>;
  onClose: () => void;
}

export function PanelDialog({ panel, known, xNames, changes, onClose }: PanelDialogProps) {
  const change = useSearchChange();
  const { [panel.id]: own = {}, ...others } = changes;
  const tell = (next: PanelChange) => {
    const isSame = Object.values(next).every((part) => part === undefined);
    const panels = isSame ? others : { ...others, [panel.id]: next };
    change({ panels: Object.keys(panels).length > 0 ? panels : undefined });
  };
  const xData = [
    { value: "", label: "As on the page" },
    { value: "batches", label: "Batches" },
    { value: "time", label: "Time" },
    ...xNames.map((name) => ({ value: name, label: name })),
  ];
  return (
    <Modal opened onClose={onClose} title={`Panel ${panel.metrics[0]?.title}`} centered>
      <Stack>
        <Select
          label="Drawn as"
          data={[
            { value: "", label: "Curves" },
            { value: "bars", label: "Bars: one number of each run" },
            { value: "box", label: "Box plots: one number of each run" },
          ]}
          value={own.as ?? ""}
          allowDeselect={false}
          onChange={(as) => tell({ ...own, as: (as || undefined) as PanelChange["as"] })}
        />
        {own.as !== undefined && (
          <Select
            label="Number"
            data={[
              { value: "", label: "Last value" },
              { value: "min", label: "Least value" },
              { value: "max", label: "Greatest value" },
            ]}
            value={own.value ?? ""}
            allowDeselect={false}
            onChange={(one) => tell({ ...own, value: (one || undefined) as PanelChange["value"] })}
          />
        )}
        <MultiSelect
          disabled={own.as !== undefined}
          label="Further metrics"
          data={known
            .filter(({ id }) => id !== panel.id)
            .map(({ id, title }) => ({ value: id, label: title }))}
          searchable
          limit={CHOICES_SHOWN}
          value={panel.metrics.slice(1).map(({ id }) => id)}
          onChange={(add) => tell({ ...own, add: add.length > 0 ? add : undefined })}
          nothingFoundMessage="No such metric"
        />
        <Select
          disabled={own.as !== undefined}
          label="X axis"
          data={xData}
          {...manyChoices(xData.length)}
          value={own.x ?? ""}
          allowDeselect={false}
          onChange={(x) => tell({ ...own, x: x || undefined })}
        />
        <Group justify="flex-end">
          <Button onClick={onClose} data-autofocus>
            Done
          </Button>
        </Group>
      </Stack>
    </Modal>
  );
}
