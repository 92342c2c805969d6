import { Alert, Button, PasswordInput, Stack, Text, TextInput, Title } from "@mantine/core";
import { useMutation, useQueryClient } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { type FormEvent, useState } from "react";

import { problemOf } from "../api/problem";
import { signIn } from "../api/signIn";
import { Command } from "../components/Feedback";

interface SignInFormProps {
  onSignedIn: () => void;
  /** Alone on the page rather than over another. */
  isPage?: boolean;
  note?: string;
}

const USED_LINK = "This sign-in link was used before or is too old; each works once.";

export function SignInForm({ onSignedIn, isPage, note }: SignInFormProps) {
  const [user, setUser] = useState("admin");
  const [password, setPassword] = useState("");
  const client = useQueryClient();
  const attempt = useMutation({
    mutationFn: () => signIn(user, password),
    onSuccess: () => {
      setPassword("");
      // Another user may see other things.
      void client.invalidateQueries();
      onSignedIn();
    },
  });
  const submit = (event: FormEvent) => {
    event.preventDefault();
    attempt.mutate();
  };
  const form = (
    <form onSubmit={submit}>
      <Stack>
        <TextInput
          label="User"
          name="username"
          autoComplete="username"
          value={user}
          onChange={(event) => setUser(event.currentTarget.value)}
          required
        />
        <PasswordInput
          label="Password"
          name="password"
          autoComplete="current-password"
          value={password}
          onChange={(event) => setPassword(event.currentTarget.value)}
          error={attempt.isError ? problemOf(attempt.error).message : undefined}
        />
        <Button type="submit" loading={attempt.isPending}>
          Sign in
        </Button>
        <Text size="sm" c="dimmed" component="div">
          No password yet? The master prints a sign-in link when it starts. This prints a new one,
          where the master runs:
          <br />
          <Command text="paceline login" />
        </Text>
      </Stack>
    </form>
  );
  if (!isPage) return form;
  return (
    <main style={{ maxWidth: 380, margin: "12vh auto", padding: 16 }}>
      <Title order={1} mb="md" style={{ display: "flex", alignItems: "center", gap: 10 }}>
        <img src="/icon.svg" alt="" width={32} height={32} />
        Paceline
      </Title>
      {note && (
        <Alert color="yellow" variant="outline" mb="md" role="alert">
          {note}
        </Alert>
      )}
      {form}
    </main>
  );
}

export function SignInPage() {
  const navigate = useNavigate();
  const { next, problem } = useSearch({ from: "/sign-in" });
  const isOwnPath = next?.startsWith("/") === true && !next.startsWith("//");
  return (
    <SignInForm
      isPage
      note={problem === "link" ? USED_LINK : undefined}
      onSignedIn={() => void navigate({ to: isOwnPath ? next : "/" })}
    />
  );
}
