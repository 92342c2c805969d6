/** Short names of the API's models. */

import type { components } from "./schema";

type Schemas = components["schemas"];

export type Experiment = Schemas["Experiment"];
export type Trial = Schemas["Trial"];
export type TrialTime = Schemas["TrialTime"];
export type TrialAlert = Schemas["Alert"];
export type Attempt = Schemas["Attempt"];
export type AttemptEnvironment = Schemas["AttemptEnvironment"];
export type Checkpoint = Schemas["Checkpoint"];
export type LogLine = Schemas["LogLine"];
export type MasterInfo = Schemas["MasterInfo"];
export type Media = Schemas["Media"];
export type MediaName = Schemas["MediaName"];
export type MetricRow = Schemas["MetricRow"];
export type MetricSummary = Schemas["MetricSummary"];
export type Slot = Schemas["Slot"];
export type SearchView = Schemas["SearchView"];
export type RungArrival = Schemas["RungArrival"];
export type Rung = Schemas["Rung"];
export type SearchPreview = Schemas["SearchPreview"];
export type ExperimentState = Schemas["ExperimentState"];
export type TrialState = Schemas["TrialState"];
export type ShownState = Schemas["ShownState"];

/** A change, as the event stream tells it. */
export interface LiveEvent {
  id: number;
  time: number;
  experiment_id: number;
  trial_id: number | null;
  kind: string;
  data: Record<string, unknown>;
}

/** A number of the API: NaN and the infinities travel as `{"$float": ...}`. */
export type ApiNumber = number | Record<string, string>;

export type HparamTable = Schemas["HparamTable"];
export type HparamRow = Schemas["HparamRow"];
export type HparamAxis = Schemas["HparamAxis"];
export type Loss = Schemas["Loss"];
export type QueueEntry = Schemas["QueueEntry"];
export type ClusterNode = Schemas["Node"];
export type View = Schemas["View"];
export type Pool = Schemas["Pool"];
export type User = Schemas["User"];
export type Role = Schemas["Role"];
export type Usage = Schemas["Usage"];
export type UsageKey = Schemas["UsageKey"];
export type Quota = Schemas["Quota"];
export type ConfigRule = Schemas["ConfigRule"];
export type Storage = Schemas["Storage"];
export type Reservation = Schemas["Reservation"];
export type Project = Schemas["Project"];
export type BulkPreview = Schemas["BulkPreview"];
export type BulkRequest = Schemas["BulkAction"];
