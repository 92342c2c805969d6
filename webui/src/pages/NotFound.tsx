import { LinkButton } from "../components/links";
import { PageHead } from "../components/PageHead";
import { Empty } from "../components/Feedback";

export function NotFound() {
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
