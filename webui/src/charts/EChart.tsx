/** A chart of ECharts that follows its options and its frame. */

import { useEffect, useRef } from "react";

import { type EChartsType, init } from "./echartsParts";

type Payload = Parameters<EChartsType["dispatchAction"]>[0];

interface EChartProps {
  label: string;
  options: object;
  height: number;
  /** Actions that bring back what a person has chosen in the chart, after each drawing. */
  actions?: readonly object[];
  onEvent?: Record<string, (event: unknown, chart: EChartsType) => void>;
}

export function EChart({ label, options, height, actions, onEvent }: EChartProps) {
  const holder = useRef<HTMLDivElement>(null);
  const chart = useRef<EChartsType | null>(null);
  const handlers = useRef(onEvent);
  const chosen = useRef(actions);
  useEffect(() => {
    handlers.current = onEvent;
    chosen.current = actions;
  });
  const names = Object.keys(onEvent ?? {}).join(" ");
  useEffect(() => {
    if (holder.current === null) return;
    const made = init(holder.current, undefined, { renderer: "canvas" });
    chart.current = made;
    for (const name of names.split(" ").filter(Boolean))
      made.on(name, (event: unknown) => handlers.current?.[name]?.(event, made));
    const observer = new ResizeObserver(() => made.resize());
    observer.observe(holder.current);
    return () => {
      observer.disconnect();
      made.dispose();
      chart.current = null;
    };
  }, [names]);
  useEffect(() => {
    chart.current?.setOption(options as Record<string, unknown>, { notMerge: true });
    for (const action of chosen.current ?? []) chart.current?.dispatchAction(action as Payload);
  }, [options, names]);
  return <div ref={holder} role="img" aria-label={label} style={{ height, width: "100%" }} />;
}
