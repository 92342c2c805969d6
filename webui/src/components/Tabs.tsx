/** The views of one thing, each with its own address. */

import { Link } from "@tanstack/react-router";

import classes from "./Tabs.module.css";

export interface TabLink {
  label: string;
  to: string;
  isIndex?: boolean;
}

export function TabLinks({ label, tabs }: { label: string; tabs: readonly TabLink[] }) {
  return (
    <nav aria-label={label} className={classes.tabs}>
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
