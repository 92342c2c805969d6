/** The views of one thing, each with its own address. */

import { Link, useRouterState } from "@tanstack/react-router";
import { useEffect, useRef } from "react";

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
