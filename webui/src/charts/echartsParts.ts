/** The parts of ECharts that the hyperparameter page draws with. */

import { HeatmapChart, ParallelChart, ScatterChart } from "echarts/charts";
import {
  AriaComponent,
  GridComponent,
  ParallelComponent,
  TooltipComponent,
  VisualMapComponent,
} from "echarts/components";
import { init, use as register } from "echarts/core";
import { CanvasRenderer } from "echarts/renderers";

register([
  ParallelChart,
  ScatterChart,
  HeatmapChart,
  ParallelComponent,
  GridComponent,
  TooltipComponent,
  VisualMapComponent,
  AriaComponent,
  CanvasRenderer,
]);

export { init };
export type { EChartsType } from "echarts/core";
