/** Keys of the query cache; a key without its last parts stands for all that begin with it. */

export const keys = {
  master: () => ["master"] as const,
  status: () => ["status"] as const,
  session: () => ["session"] as const,
  users: () => ["users"] as const,
  link: (link: string) => ["link", link] as const,
  slots: () => ["slots"] as const,
  experiments: () => ["experiments"] as const,
  experimentList: (parameters: object) => ["experiments", parameters] as const,
  experiment: (id: number) => ["experiment", id] as const,
  trials: (experimentId: number) => ["trials", experimentId] as const,
  trialList: (experimentId: number, parameters: object) =>
    ["trials", experimentId, parameters] as const,
  search: (experimentId: number) => ["search", experimentId] as const,
  trial: (id: number) => ["trial", id] as const,
  metricNames: (experimentId: number) => ["metric-names", experimentId] as const,
  trialEnvironments: (id: number) => ["trial", id, "environments"] as const,
  trialTime: (id: number) => ["trial", id, "time"] as const,
  checkpoints: (of: "trial" | "experiment", id: number) => ["checkpoints", of, id] as const,
  /** Everything that a comparison reads, which follows the events by itself. */
  compared: () => ["compared"] as const,
  comparedRuns: (filter: object) => ["compared", "runs", filter] as const,
  comparedNames: (trialIds: readonly number[]) => ["compared", "names", trialIds] as const,
  comparedGroups: (request: object) => ["compared", "groups", request] as const,
  comparedGone: (trialIds: readonly number[]) => ["compared", "gone", trialIds] as const,
  views: () => ["views"] as const,
  spark: (trialId: number, ...of: readonly string[]) => ["spark", trialId, ...of] as const,
  found: (text: string) => ["found", text] as const,
  tree: (experimentId: number) => ["tree", experimentId] as const,
  notesHistory: (experimentId: number, version: string) =>
    ["notes-history", experimentId, version] as const,
  completions: (query: string) => ["completions", query] as const,
  columns: () => ["columns"] as const,
  hyperparameters: (experimentId: number) => ["hyperparameters", experimentId] as const,
  config: (experimentId: number) => ["config", experimentId] as const,
  files: (experimentId: number) => ["files", experimentId] as const,
  file: (experimentId: number, path: string) => ["files", experimentId, path] as const,
  schema: () => ["schema"] as const,
  queue: () => ["queue"] as const,
  queued: (trialId: number) => ["queue", trialId] as const,
  media: (trialId: number) => ["media", trialId] as const,
  mediaNames: (trialId: number) => ["media", trialId, "names"] as const,
  mediaSteps: (trialId: number, ...of: readonly unknown[]) =>
    ["media", trialId, "steps", ...of] as const,
  mediaReports: (trialId: number, ...of: readonly unknown[]) =>
    ["media", trialId, "reports", ...of] as const,
  mediaFile: (trialId: number, path: string, digest: string) =>
    ["media-file", trialId, path, digest] as const,
  nodes: () => ["nodes"] as const,
  pools: () => ["pools"] as const,
  loss: (experimentId: number) => ["loss", experimentId] as const,
};
