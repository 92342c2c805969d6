/** What surrounds every page: navigation, theme, how the connection stands, the session. */

import { ActionIcon, AppShell, Group, Menu, Modal, Text, Tooltip } from "@mantine/core";
import { useMantineColorScheme } from "@mantine/core";
import { useHotkeys } from "@mantine/hooks";
import {
  IconBook,
  IconBox,
  IconChartDots3,
  IconDeviceDesktop,
  IconFlask,
  IconHome,
  IconLogout,
  IconMoon,
  IconSearch,
  IconServer2,
  IconSun,
  IconUsers,
} from "@tabler/icons-react";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { Link, Outlet, useNavigate, useRouterState } from "@tanstack/react-router";
import { Suspense, useRef, useState } from "react";

import { masterQuery, sessionQuery } from "../api/queries";
import { noteSignOut, useSession } from "../api/session";
import { signOut } from "../api/signIn";
import { slotsInWords } from "../lib/cluster";
import { useEventStream, useStreamState } from "../live/useLive";
import { useWatcher } from "../live/watch";
import { lazyPage } from "../lib/lazyPage";
import { SignInForm } from "../pages/SignIn";
import { ProblemView, Waiting } from "./Feedback";
import classes from "./Frame.module.css";

const SearchDialog = lazyPage(() => import("./Search"), "SearchDialog");
const ShortcutSheet = lazyPage(() => import("./Search"), "ShortcutSheet");

const PAGES = [
  { to: "/", label: "Home", Icon: IconHome },
  { to: "/experiments", label: "Experiments", Icon: IconFlask },
  { to: "/compare", label: "Compare", Icon: IconChartDots3 },
  { to: "/models", label: "Models", Icon: IconBox },
  { to: "/cluster", label: "Cluster", Icon: IconServer2 },
] as const;

export function Frame() {
  const session = useSession();
  const path = useRouterState({ select: (state) => state.location.pathname });
  const isSignInPage = path === "/sign-in";
  const master = useQuery({ ...masterQuery, enabled: !isSignInPage });
  useEventStream(session === "in" || session === "expired");
  useWatcher(session === "in");

  if (isSignInPage) return <Outlet />;
  if (session === "out") return <SignInForm onSignedIn={() => void master.refetch()} isPage />;
  if (session === "unknown")
    return master.isError ? (
      <main className={classes.alone}>
        <ProblemView error={master.error} onRetry={() => void master.refetch()} />
      </main>
    ) : (
      <Waiting what="Paceline" />
    );
  return (
    <>
      <a href="#main" className="skip-link">
        Skip to the content
      </a>
      <AppShell
        header={{ height: 48 }}
        navbar={{ width: 190, breakpoint: "sm", collapsed: { mobile: true } }}
        padding="md"
      >
        <AppShell.Header className={classes.header}>
          <Link to="/" className={classes.brand}>
            <img src="/icon.svg" alt="" width={24} height={24} />
            Paceline
          </Link>
          <Group gap={4}>
            <Connection />
            <Shortcuts />
            <Tooltip label="Documentation">
              <ActionIcon
                component="a"
                href="/docs/"
                target="_blank"
                variant="subtle"
                color="gray"
                aria-label="Documentation"
                size="lg"
              >
                <IconBook size={20} />
              </ActionIcon>
            </Tooltip>
            <ThemeMenu />
            <SignOut />
          </Group>
        </AppShell.Header>
        <AppShell.Navbar className={classes.navbar}>
          <Navigation className={classes.side} label="Pages" />
          <div className={classes.slots}>
            {master.data && (
              <>
                <Text size="xs" c="dimmed">
                  Slots in use
                </Text>
                <Text size="sm" fw={600}>
                  {slotsInWords(master.data)}
                </Text>
                <Text size="xs" c="dimmed" mt={8}>
                  Version {master.data.version}
                </Text>
              </>
            )}
          </div>
        </AppShell.Navbar>
        <AppShell.Main id="main" tabIndex={-1} className={classes.main}>
          <Outlet />
        </AppShell.Main>
      </AppShell>
      <Navigation className={classes.bottom} label="Pages, at the bottom" />
      <Modal
        opened={session === "expired"}
        onClose={() => undefined}
        withCloseButton={false}
        title="Sign in again"
        // Above a dialog that is open.
        zIndex={400}
        centered
      >
        <Text size="sm" mb="md">
          Your session has ended. What you typed on this page is kept.
        </Text>
        <SignInForm onSignedIn={() => void master.refetch()} />
      </Modal>
    </>
  );
}

const USERS = { to: "/users", label: "Users", Icon: IconUsers } as const;
const USAGE = { to: "/usage", label: "Usage", Icon: IconUsers } as const;

function Navigation({ className, label }: { className: string | undefined; label: string }) {
  const session = useQuery(sessionQuery).data;
  const lab = session?.scope === "admin" ? USERS : USAGE;
  const pages = session?.is_shared ? [...PAGES, lab] : PAGES;
  const path = useRouterState({ select: (state) => state.location.pathname });
  // Trials belong to experiments.
  const isWithin = (to: string) =>
    (to === "/experiments" && /^\/(trials\/|new$)/.test(path)) ||
    (to === lab.to && /^\/(users|usage|quotas|rules)$/.test(path));
  return (
    <nav aria-label={label} className={className}>
      {pages.map(({ to, label: name, Icon }) => (
        <Link
          key={to}
          to={to}
          className={isWithin(to) ? `${classes.entry} ${classes.current}` : classes.entry}
          activeOptions={{ exact: to === "/", includeSearch: false }}
          activeProps={{ className: `${classes.entry} ${classes.current}` }}
        >
          <Icon size={20} aria-hidden />
          <span>{name}</span>
        </Link>
      ))}
    </nav>
  );
}

const GO_MS = 1500;
const TARGETS = { H: "/", E: "/experiments", C: "/compare", L: "/cluster", N: "/new" } as const;

/** The button that opens the search, and the keys that work on all pages. */
function Shortcuts() {
  const [open, setOpen] = useState<"search" | "sheet" | null>(null);
  const navigate = useNavigate();
  const goAt = useRef(0);
  const search = () => setOpen("search");
  const close = () => setOpen(null);
  // It works in fields too.
  useHotkeys([["mod+K", search]], []);
  useHotkeys([
    ["/", search],
    ["shift+?", () => setOpen("sheet")],
    ["G", () => void (goAt.current = Date.now())],
    ...Object.entries(TARGETS).map(([key, to]): [string, () => void] => [
      key,
      () => {
        if (Date.now() - goAt.current < GO_MS) void navigate({ to });
      },
    ]),
  ]);
  return (
    <>
      <Tooltip label="Search (Ctrl K); all shortcuts: ?">
        <ActionIcon variant="subtle" color="gray" aria-label="Search" size="lg" onClick={search}>
          <IconSearch size={20} />
        </ActionIcon>
      </Tooltip>
      <Suspense>
        {open === "search" && <SearchDialog onClose={close} />}
        {open === "sheet" && <ShortcutSheet onClose={close} />}
      </Suspense>
    </>
  );
}

function Connection() {
  const state = useStreamState();
  const words = {
    live: "Live: this page follows what happens",
    connecting: "Connecting to the master",
    lost: "The master does not answer; trying again",
  }[state];
  return (
    <Tooltip label={words}>
      <span className={classes.connection} data-state={state} role="status" aria-label={words}>
        {state === "lost" ? "No connection" : state === "live" ? "Live" : "Connecting"}
      </span>
    </Tooltip>
  );
}

function ThemeMenu() {
  const { colorScheme, setColorScheme } = useMantineColorScheme();
  const choices = [
    { value: "light", label: "Light", Icon: IconSun },
    { value: "dark", label: "Dark", Icon: IconMoon },
    { value: "auto", label: "As the system", Icon: IconDeviceDesktop },
  ] as const;
  const Current = choices.find((choice) => choice.value === colorScheme)?.Icon ?? IconDeviceDesktop;
  return (
    <Menu position="bottom-end">
      <Menu.Target>
        <ActionIcon variant="subtle" color="gray" aria-label="Theme" size="lg">
          <Current size={20} />
        </ActionIcon>
      </Menu.Target>
      <Menu.Dropdown>
        {choices.map(({ value, label, Icon }) => (
          <Menu.Item
            key={value}
            leftSection={<Icon size={16} />}
            onClick={() => setColorScheme(value)}
            fw={value === colorScheme ? 700 : 400}
          >
            {label}
            {value === colorScheme && " ✓"}
          </Menu.Item>
        ))}
      </Menu.Dropdown>
    </Menu>
  );
}

function SignOut() {
  const client = useQueryClient();
  const leave = useMutation({
    mutationFn: signOut,
    onSuccess: () => {
      noteSignOut();
      // The next user may not see it.
      client.clear();
    },
  });
  return (
    <Tooltip label="Sign out">
      <ActionIcon
        variant="subtle"
        color="gray"
        aria-label="Sign out"
        size="lg"
        loading={leave.isPending}
        onClick={() => leave.mutate()}
      >
        <IconLogout size={20} />
      </ActionIcon>
    </Tooltip>
  );
}
