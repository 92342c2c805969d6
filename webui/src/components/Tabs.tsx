/** The views of one thing, each with its own address. */

import { Link, Outlet, useRouterState } from "@tanstack/react-router";
import { type ReactNode, useEffect, useRef } from "react";

import { useIsPhone } from "../lib/width";
import classes from "./Tabs.module.css";

export interface TabLink {
  label: string;
  to: string;
  isIndex?: boolean;
}

export function TabLinks({ label, tabs }: { label: string; tabs: readonly TabLink[] }) {
  const bar = useRef<HTMLElement>(null);
  const path = useRouterState({ select: (state) => state.location.pathname });
  // On a phone not all of them fit.
  useEffect(() => {
    const current = bar.current?.querySelector<HTMLElement>("[aria-current]");
    if (!bar.current || !current) return;
    bar.current.scrollLeft =
      current.offsetLeft - (bar.current.clientWidth - current.offsetWidth) / 2;
  }, [path]);
  return (
    <nav aria-label={label} className={classes.tabs} ref={bar}>
      {tabs.map((tab) => (
        <Link
          key={tab.to}
          to={tab.to}
          activeOptions={{ exact: tab.isIndex === true, includeSearch: false }}
          className={classes.tab}
          activeProps={{ className: `${classes.tab} ${classes.active}`, "aria-current": "page" }}
        >
          {tab.label}
        </Link>
      ))}
    </nav>
  );
}

interface TabbedPageProps {
  head: ReactNode;
  /** Facts and messages, above the tabs. */
  notes: ReactNode;
  label: string;
  tabs: readonly TabLink[];
}

/** The page of one thing; on a phone its notes are below the logs, whose tail is in sight. */
export function TabbedPage({ head, notes, label, tabs }: TabbedPageProps) {
  const isAtLogs = useRouterState({ select: (state) => state.location.pathname.endsWith("/logs") });
  const isTailFirst = useIsPhone() && isAtLogs;
  return (
    <>
      <div className={isTailFirst ? classes.screen : undefined}>
        {head}
        {!isTailFirst && notes}
        <TabLinks label={label} tabs={tabs} />
        <Outlet />
      </div>
      {isTailFirst && notes}
    </>
  );
}
