import { useQuery } from "@tanstack/react-query";
import { Navigate, useLocation } from "@tanstack/react-router";

import { linkQuery } from "../api/queries";
import { Empty, Waiting } from "../components/Feedback";
import { LinkButton } from "../components/links";
import { PageHead } from "../components/PageHead";

/** What clients of W&B print as the address of a project or a run; the app has some of its own. */
const LOGGED = /^(?!experiments\/|trials\/)[^/]+\/[^/]+(\/runs\/[^/]+)?$/;

export function NotFound() {
  const link = useLocation().pathname.slice(1);
  return LOGGED.test(link) ? <LoggedElsewhere link={link} /> : <NoSuchPage />;
}

/** The experiment, or all of a project, that another tracker's client has logged. */
export function LoggedElsewhere({ link }: { link: string }) {
  const target = useQuery(linkQuery(link));
  if (target.isPending) return <Waiting what="the run" />;
  const { experiment_id: id, label } = target.data ?? {};
  if (id != null) return <Navigate to="/experiments/$id" params={{ id }} replace />;
  if (label != null) return <Navigate to="/experiments" search={{ q: label }} replace />;
  return <NoSuchPage />;
}

function NoSuchPage() {
  return (
    <>
      <PageHead title="Not found" />
      <Empty title="There is no such page">
        <p>The address may be mistyped, or what it showed was deleted.</p>
        <LinkButton to="/experiments" variant="default">
          All experiments
        </LinkButton>
      </Empty>
    </>
  );
}
