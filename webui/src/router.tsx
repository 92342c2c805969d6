/** The addresses of the app; the code of the pages is loaded when needed, or after the first. */

import { createRootRoute, createRoute, createRouter } from "@tanstack/react-router";

import {
  bestTrialsQuery,
  experimentQuery,
  goingQuery,
  masterQuery,
  namesOfTrialsQuery,
  recentQuery,
  type RunFilter,
  runFilterOf,
  runsQuery,
  trialQuery,
} from "./api/queries";
import { queryClient } from "./api/queryClient";
import { ProblemView, Waiting } from "./components/Feedback";
import { Frame } from "./components/Frame";
import { Home } from "./pages/Home";
import { NotFound } from "./pages/NotFound";
import { SignInPage } from "./pages/SignIn";
import { lazyPage, loadAllPages } from "./lib/lazyPage";
import {
  codeSearch,
  compareSearch,
  experimentsSearch,
  hyperparametersSearch,
  isId,
  logsSearch,
  mediaSearch,
  metricsSearch,
  newExperimentSearch,
  signInSearch,
  trialsSearch,
  usageSearch,
} from "./lib/search";

const LOAD_ALL_AFTER_MS = 300;

const root = createRootRoute({ component: Frame, notFoundComponent: NotFound });

const home = createRoute({
  getParentRoute: () => root,
  path: "/",
  // All that the page shows is read at once.
  loader: () => {
    void queryClient.prefetchQuery(masterQuery);
    void queryClient.prefetchInfiniteQuery(goingQuery);
    void queryClient.prefetchInfiniteQuery(recentQuery);
  },
  // The page that most begin at comes with the app: one request less to wait for.
  component: Home,
});

const signIn = createRoute({
  getParentRoute: () => root,
  path: "/sign-in",
  validateSearch: signInSearch,
  component: SignInPage,
});

const experiments = createRoute({
  getParentRoute: () => root,
  path: "/experiments",
  validateSearch: experimentsSearch,
  component: lazyPage(() => import("./pages/Experiments"), "Experiments"),
});

const parseId = {
  parse: ({ id }: { id: string }) => ({ id: Number(id) }),
  stringify: ({ id }: { id: number }) => ({ id: String(id) }),
};

const experiment = createRoute({
  getParentRoute: () => root,
  path: "/experiments/$id",
  params: parseId,
  // What a page begins with is read while its code is loaded and drawn.
  loader: ({ params: { id } }) => {
    if (isId(id)) void queryClient.prefetchQuery(experimentQuery(id));
  },
  component: lazyPage(() => import("./pages/experiment/ExperimentPage"), "ExperimentPage"),
});

const experimentOverview = createRoute({
  getParentRoute: () => experiment,
  path: "/",
  validateSearch: metricsSearch,
  loader: ({ params: { id } }) => {
    if (isId(id)) void queryClient.prefetchInfiniteQuery(bestTrialsQuery(id));
  },
  component: lazyPage(() => import("./pages/experiment/Overview"), "Overview"),
});

const experimentTrials = createRoute({
  getParentRoute: () => experiment,
  path: "/trials",
  validateSearch: trialsSearch,
  component: lazyPage(() => import("./pages/experiment/Trials"), "Trials"),
});

const experimentRungs = createRoute({
  getParentRoute: () => experiment,
  path: "/search",
  component: lazyPage(() => import("./pages/experiment/Rungs"), "Rungs"),
});

const experimentCheckpoints = createRoute({
  getParentRoute: () => experiment,
  path: "/checkpoints",
  component: lazyPage(
    () => import("./pages/experiment/ExperimentCheckpoints"),
    "ExperimentCheckpoints",
  ),
});

const experimentLineage = createRoute({
  getParentRoute: () => experiment,
  path: "/lineage",
  component: lazyPage(() => import("./pages/experiment/Lineage"), "Lineage"),
});

const experimentNotes = createRoute({
  getParentRoute: () => experiment,
  path: "/notes",
  component: lazyPage(() => import("./pages/experiment/Notes"), "Notes"),
});

const experimentLogs = createRoute({
  getParentRoute: () => experiment,
  path: "/logs",
  validateSearch: logsSearch,
  component: lazyPage(() => import("./pages/experiment/ExperimentLogs"), "ExperimentLogs"),
});

const trial = createRoute({
  getParentRoute: () => root,
  path: "/trials/$id",
  params: parseId,
  loader: ({ params: { id } }) => {
    if (isId(id)) void queryClient.prefetchQuery(trialQuery(id));
  },
  component: lazyPage(() => import("./pages/trial/TrialPage"), "TrialPage"),
});

const trialMetrics = createRoute({
  getParentRoute: () => trial,
  path: "/",
  validateSearch: metricsSearch,
  component: lazyPage(() => import("./pages/trial/Metrics"), "Metrics"),
});

const trialCheckpoints = createRoute({
  getParentRoute: () => trial,
  path: "/checkpoints",
  component: lazyPage(() => import("./pages/trial/TrialCheckpoints"), "TrialCheckpoints"),
});

const trialHyperparameters = createRoute({
  getParentRoute: () => trial,
  path: "/hyperparameters",
  component: lazyPage(() => import("./pages/trial/TrialHyperparameters"), "TrialHyperparameters"),
});

const trialProfiler = createRoute({
  getParentRoute: () => trial,
  path: "/profiler",
  validateSearch: metricsSearch,
  component: lazyPage(() => import("./pages/trial/Profiler"), "Profiler"),
});

const trialAttempts = createRoute({
  getParentRoute: () => trial,
  path: "/attempts",
  component: lazyPage(() => import("./pages/trial/Attempts"), "Attempts"),
});

const trialLineage = createRoute({
  getParentRoute: () => trial,
  path: "/lineage",
  component: lazyPage(() => import("./pages/experiment/Lineage"), "TrialLineage"),
});

const trialLogs = createRoute({
  getParentRoute: () => trial,
  path: "/logs",
  validateSearch: logsSearch,
  component: lazyPage(() => import("./pages/trial/TrialLogs"), "TrialLogs"),
});

const compare = createRoute({
  getParentRoute: () => root,
  path: "/compare",
  validateSearch: compareSearch,
  loaderDeps: ({ search }) => runFilterOf(search),
  loader: ({ deps }) => void prefetchComparison(deps),
  component: lazyPage(() => import("./pages/Compare"), "Compare"),
});

const cluster = createRoute({
  getParentRoute: () => root,
  path: "/cluster",
  component: lazyPage(() => import("./pages/Cluster"), "Cluster"),
});

const users = createRoute({
  getParentRoute: () => root,
  path: "/users",
  component: lazyPage(() => import("./pages/Users"), "Users"),
});

const models = createRoute({
  getParentRoute: () => root,
  path: "/models",
  component: lazyPage(() => import("./pages/Models"), "Models"),
});

const model = createRoute({
  getParentRoute: () => root,
  path: "/models/$name",
  component: lazyPage(() => import("./pages/Models"), "ModelPage"),
});

const usage = createRoute({
  getParentRoute: () => root,
  path: "/usage",
  validateSearch: usageSearch,
  component: lazyPage(() => import("./pages/Usage"), "Usage"),
});

const quotas = createRoute({
  getParentRoute: () => root,
  path: "/quotas",
  component: lazyPage(() => import("./pages/Quotas"), "Quotas"),
});

const rules = createRoute({
  getParentRoute: () => root,
  path: "/rules",
  component: lazyPage(() => import("./pages/Rules"), "Rules"),
});

// The code of all pages is loaded in this order: what is large comes last.
const newExperiment = createRoute({
  getParentRoute: () => root,
  path: "/new",
  validateSearch: newExperimentSearch,
  component: lazyPage(() => import("./pages/NewExperiment"), "NewExperiment"),
});

const experimentHyperparameters = createRoute({
  getParentRoute: () => experiment,
  path: "/hyperparameters",
  validateSearch: hyperparametersSearch,
  component: lazyPage(() => import("./pages/experiment/Hyperparameters"), "Hyperparameters"),
});

const experimentCode = createRoute({
  getParentRoute: () => experiment,
  path: "/code",
  validateSearch: codeSearch,
  component: lazyPage(() => import("./pages/experiment/Code"), "Code"),
});

const trialMedia = createRoute({
  getParentRoute: () => trial,
  path: "/media",
  validateSearch: mediaSearch,
  component: lazyPage(() => import("./pages/trial/Media"), "Media"),
});

const routeTree = root.addChildren([
  home,
  signIn,
  experiments,
  newExperiment,
  experiment.addChildren([
    experimentOverview,
    experimentTrials,
    experimentHyperparameters,
    experimentRungs,
    experimentCheckpoints,
    experimentCode,
    experimentLineage,
    experimentNotes,
    experimentLogs,
  ]),
  trial.addChildren([
    trialMetrics,
    trialCheckpoints,
    trialHyperparameters,
    trialMedia,
    trialProfiler,
    trialAttempts,
    trialLineage,
    trialLogs,
  ]),
  compare,
  cluster,
  models,
  model,
  users,
  usage,
  quotas,
  rules,
]);

/** Read the runs of a comparison, and at once the names of their metrics. */
async function prefetchComparison(filter: RunFilter): Promise<void> {
  await queryClient.prefetchQuery(runsQuery(filter));
  const found = queryClient.getQueryData(runsQuery(filter).queryKey);
  if (found) await queryClient.prefetchQuery(namesOfTrialsQuery(found.items.map(({ id }) => id)));
}

export const router = createRouter({
  routeTree,
  defaultPreload: "intent",
  defaultPendingComponent: () => <Waiting />,
  defaultErrorComponent: ({ error, reset }) => <ProblemView error={error} onRetry={reset} />,
  scrollRestoration: true,
});

// The first page comes first.
const stopWaiting = router.subscribe("onRendered", () => {
  stopWaiting();
  setTimeout(() => void loadAllPages(), LOAD_ALL_AFTER_MS);
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
