import { MantineProvider } from "@mantine/core";
import { render, screen } from "@testing-library/react";
import { expect, it } from "vitest";

import { ProblemView } from "../src/components/Feedback";

it("says once that there is no connection, and each other problem", () => {
  const away = new TypeError("Failed to fetch");
  const page = (first: boolean) => (
    <MantineProvider>
      {first && <ProblemView error={away} />}
      <ProblemView error={away} />
      <ProblemView error={new Error("another")} />
    </MantineProvider>
  );
  const { rerender } = render(page(true));
  expect(screen.getAllByText("No connection")).toHaveLength(1);
  expect(screen.getAllByText("another")).toHaveLength(1);
  rerender(page(false));
  expect(screen.getAllByText("No connection")).toHaveLength(1);
});
