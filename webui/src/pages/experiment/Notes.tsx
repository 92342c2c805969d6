import { Empty } from "../../components/Feedback";

export function Notes() {
  return <Empty title="No notes yet" />;
}
