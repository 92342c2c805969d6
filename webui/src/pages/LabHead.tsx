/** The head of the pages about who shares a master. */

import { useQuery } from "@tanstack/react-query";
import type { ReactNode } from "react";

import { sessionQuery } from "../api/queries";
import { PageHead } from "../components/PageHead";
import { TabLinks } from "../components/Tabs";

const TABS = [
  { label: "Usage", to: "/usage" },
  { label: "Quotas", to: "/quotas" },
  { label: "Templates and policies", to: "/rules" },
] as const;
const USERS = { label: "Users", to: "/users" } as const;

/** Tell whether administrators alone see the rest. */
export function useIsAdmin(): boolean {
  return useQuery(sessionQuery).data?.scope === "admin";
}

export function LabHead({ title, actions }: { title: string; actions?: ReactNode }) {
  const tabs = useIsAdmin() ? [USERS, ...TABS] : TABS;
  return (
    <>
      <PageHead title={title} actions={actions} />
      <TabLinks label="Users and shares" tabs={tabs} />
    </>
  );
}
