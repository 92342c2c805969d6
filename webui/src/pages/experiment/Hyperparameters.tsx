import { Empty } from "../../components/Feedback";

export function Hyperparameters() {
  return <Empty title="Hyperparameters" />;
}
