import { Alert, Button, PasswordInput, Stack, Text, TextInput, Title } from "@mantine/core";
import { useMutation, useQuery, useQueryClient } from "@tanstack/react-query";
import { useNavigate, useSearch } from "@tanstack/react-router";
import { type FormEvent, type ReactNode, useEffect, useState } from "react";

import { problemOf } from "../api/problem";
import { sessionQuery } from "../api/queries";
import { signIn } from "../api/signIn";
import { Command } from "../components/Feedback";

interface SignInFormProps {
  onSignedIn: () => void;
  /** Alone on the page rather than over another. */
  isPage?: boolean;
  note?: string;
  /** Where a provider's sign-in ends; by default here. */
  next?: string;
}

const ASK = "Ask an administrator, who finds this sign-in by: paceline audit";
const PROBLEMS: Record<string, string> = {
  link: "This sign-in link was used before or is too old; each works once.",
  oidc_unavailable: "The provider does not answer. Passwords and sign-in links still work.",
  oidc_refused: "The provider refused the sign-in.",
  oidc_expired:
    "The sign-in took too long, was used before, or began in another browser. Sign in again.",
  oidc_untrusted: "The provider's answer does not hold. The master's log says why.",
  oidc_unknown: `There is no user for you here yet. ${ASK}`,
  oidc_name_taken: `The user of your name is not linked to you. ${ASK}`,
  oidc_removed: "Your user was removed here. Ask an administrator.",
};

export function SignInForm({ onSignedIn, isPage, note, next }: SignInFormProps) {
  const [user, setUser] = useState("admin");
  const [password, setPassword] = useState("");
  const client = useQueryClient();
  const provider = useQuery(sessionQuery).data?.oidc;
  // Over another page, which is to be kept, a provider's sign-in is in a tab of its own.
  useEffect(() => {
    if (isPage) return;
    window.addEventListener("focus", onSignedIn);
    return () => window.removeEventListener("focus", onSignedIn);
  }, [isPage, onSignedIn]);
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
  const here = isPage ? window.location.pathname + window.location.search : "/";
  const form = (
    <form onSubmit={submit}>
      <Stack>
        {provider && (
          <Button
            component="a"
            variant="default"
            href={`/api/v1/oidc/sign-in?next=${encodeURIComponent(next ?? here)}`}
            target={isPage ? undefined : "_blank"}
          >
            Sign in with {provider}
          </Button>
        )}
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
  return isPage ? <Alone note={note}>{form}</Alone> : form;
}

function Alone({ note, children }: { note?: string; children: ReactNode }) {
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
      {children}
    </main>
  );
}

export function SignInPage() {
  const navigate = useNavigate();
  const { next, problem, code } = useSearch({ from: "/sign-in" });
  const wanted = next?.startsWith("/") === true && !next.startsWith("//") ? next : "/";
  if (code)
    return (
      <Alone>
        <Text mb="xs">You are signed in. Copy this code to the terminal that asks for it:</Text>
        <Command text={code} />
        <Text size="sm" c="dimmed" mt="md">
          Only if you ran “paceline login” yourself: whoever has the code acts as you. It works for
          five minutes, once.
        </Text>
      </Alone>
    );
  return (
    <SignInForm
      isPage
      next={wanted}
      note={problem && (PROBLEMS[problem] ?? "The sign-in failed.")}
      onSignedIn={() => void navigate({ to: wanted })}
    />
  );
}
