import { Empty } from "../components/Feedback";

export function NewExperiment() {
  return <Empty title="New experiment" command="paceline experiment create config.yaml ." />;
}
