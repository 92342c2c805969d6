/** The parts of ECharts that charts of hyperparameters and of single numbers are drawn with. */

import { BarChart, BoxplotChart, HeatmapChart, ParallelChart, ScatterChart } from "echarts/charts";
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
  BarChart,
  BoxplotChart,
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
