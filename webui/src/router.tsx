/** The addresses of the app; each page's code is loaded when it is first opened. */

import {
  createRootRoute,
  createRoute,
  createRouter,
  lazyRouteComponent,
} from "@tanstack/react-router";

import { goingQuery, masterQuery, recentQuery } from "./api/queries";
import { queryClient } from "./api/queryClient";
import { ProblemView, Waiting } from "./components/Feedback";
import { Frame } from "./components/Frame";
import { Home } from "./pages/Home";
import { NotFound } from "./pages/NotFound";
import { SignInPage } from "./pages/SignIn";
import {
  codeSearch,
  compareSearch,
  experimentsSearch,
  hyperparametersSearch,
  logsSearch,
  metricsSearch,
  newExperimentSearch,
  signInSearch,
  trialsSearch,
} from "./lib/search";

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
  component: lazyRouteComponent(() => import("./pages/Experiments"), "Experiments"),
});

const newExperiment = createRoute({
  getParentRoute: () => root,
  path: "/new",
  validateSearch: newExperimentSearch,
  component: lazyRouteComponent(() => import("./pages/NewExperiment"), "NewExperiment"),
});

const parseId = {
  parse: ({ id }: { id: string }) => ({ id: Number(id) }),
  stringify: ({ id }: { id: number }) => ({ id: String(id) }),
};

const experiment = createRoute({
  getParentRoute: () => root,
  path: "/experiments/$id",
  params: parseId,
  component: lazyRouteComponent(
    () => import("./pages/experiment/ExperimentPage"),
    "ExperimentPage",
  ),
});

const experimentOverview = createRoute({
  getParentRoute: () => experiment,
  path: "/",
  validateSearch: metricsSearch,
  component: lazyRouteComponent(() => import("./pages/experiment/Overview"), "Overview"),
});

const experimentTrials = createRoute({
  getParentRoute: () => experiment,
  path: "/trials",
  validateSearch: trialsSearch,
  component: lazyRouteComponent(() => import("./pages/experiment/Trials"), "Trials"),
});

const experimentHyperparameters = createRoute({
  getParentRoute: () => experiment,
  path: "/hyperparameters",
  validateSearch: hyperparametersSearch,
  component: lazyRouteComponent(
    () => import("./pages/experiment/Hyperparameters"),
    "Hyperparameters",
  ),
});

const experimentRungs = createRoute({
  getParentRoute: () => experiment,
  path: "/search",
  component: lazyRouteComponent(() => import("./pages/experiment/Rungs"), "Rungs"),
});

const experimentCheckpoints = createRoute({
  getParentRoute: () => experiment,
  path: "/checkpoints",
  component: lazyRouteComponent(
    () => import("./pages/experiment/ExperimentCheckpoints"),
    "ExperimentCheckpoints",
  ),
});

const experimentCode = createRoute({
  getParentRoute: () => experiment,
  path: "/code",
  validateSearch: codeSearch,
  component: lazyRouteComponent(() => import("./pages/experiment/Code"), "Code"),
});

const experimentNotes = createRoute({
  getParentRoute: () => experiment,
  path: "/notes",
  component: lazyRouteComponent(() => import("./pages/experiment/Notes"), "Notes"),
});

const experimentLogs = createRoute({
  getParentRoute: () => experiment,
  path: "/logs",
  validateSearch: logsSearch,
  component: lazyRouteComponent(
    () => import("./pages/experiment/ExperimentLogs"),
    "ExperimentLogs",
  ),
});

const trial = createRoute({
  getParentRoute: () => root,
  path: "/trials/$id",
  params: parseId,
  component: lazyRouteComponent(() => import("./pages/trial/TrialPage"), "TrialPage"),
});

const trialMetrics = createRoute({
  getParentRoute: () => trial,
  path: "/",
  validateSearch: metricsSearch,
  component: lazyRouteComponent(() => import("./pages/trial/Metrics"), "Metrics"),
});

const trialCheckpoints = createRoute({
  getParentRoute: () => trial,
  path: "/checkpoints",
  component: lazyRouteComponent(() => import("./pages/trial/TrialCheckpoints"), "TrialCheckpoints"),
});

const trialHyperparameters = createRoute({
  getParentRoute: () => trial,
  path: "/hyperparameters",
  component: lazyRouteComponent(
    () => import("./pages/trial/TrialHyperparameters"),
    "TrialHyperparameters",
  ),
});

const trialProfiler = createRoute({
  getParentRoute: () => trial,
  path: "/profiler",
  validateSearch: metricsSearch,
  component: lazyRouteComponent(() => import("./pages/trial/Profiler"), "Profiler"),
});

const trialAttempts = createRoute({
  getParentRoute: () => trial,
  path: "/attempts",
  component: lazyRouteComponent(() => import("./pages/trial/Attempts"), "Attempts"),
});

const trialLogs = createRoute({
  getParentRoute: () => trial,
  path: "/logs",
  validateSearch: logsSearch,
  component: lazyRouteComponent(() => import("./pages/trial/TrialLogs"), "TrialLogs"),
});

const compare = createRoute({
  getParentRoute: () => root,
  path: "/compare",
  validateSearch: compareSearch,
  component: lazyRouteComponent(() => import("./pages/Compare"), "Compare"),
});

const cluster = createRoute({
  getParentRoute: () => root,
  path: "/cluster",
  component: lazyRouteComponent(() => import("./pages/Cluster"), "Cluster"),
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
    experimentNotes,
    experimentLogs,
  ]),
  trial.addChildren([
    trialMetrics,
    trialCheckpoints,
    trialHyperparameters,
    trialProfiler,
    trialAttempts,
    trialLogs,
  ]),
  compare,
  cluster,
]);

export const router = createRouter({
  routeTree,
  defaultPreload: "intent",
  defaultPendingComponent: () => <Waiting />,
  defaultErrorComponent: ({ error, reset }) => <ProblemView error={error} onRetry={reset} />,
  scrollRestoration: true,
});

declare module "@tanstack/react-router" {
  interface Register {
    router: typeof router;
  }
}
