/** Mantine's components as links of the router. */

import { Anchor, Button, NavLink } from "@mantine/core";
import type { AnchorProps, ButtonProps, NavLinkProps } from "@mantine/core";
import { createLink, useRouter } from "@tanstack/react-router";
import type { AnchorHTMLAttributes, MouseEvent, ReactNode, Ref } from "react";

type Native<Props> = Omit<AnchorHTMLAttributes<HTMLAnchorElement>, keyof Props> & {
  ref?: Ref<HTMLAnchorElement>;
};

function PlainAnchor(props: AnchorProps & Native<AnchorProps>) {
  return <Anchor {...props} />;
}

function ButtonAnchor(props: ButtonProps & Native<ButtonProps>) {
  return <Button component="a" {...props} />;
}

function NavAnchor(props: NavLinkProps & Native<NavLinkProps>) {
  return <NavLink component="a" {...props} />;
}

export const LinkText = createLink(PlainAnchor);
export const LinkButton = createLink(ButtonAnchor);
export const LinkNav = createLink(NavAnchor);

interface RowLinkProps {
  /** An address within the app. */
  to: string;
  title?: string;
  children: ReactNode;
}

/** A link that costs little: tables draw dozens in each frame while one scrolls. */
export function RowLink({ to, title, children }: RowLinkProps) {
  const router = useRouter();
  const follow = (event: MouseEvent) => {
    const isForBrowser = event.metaKey || event.ctrlKey || event.shiftKey || event.altKey;
    if (isForBrowser || event.button !== 0) return;
    event.preventDefault();
    void router.navigate({ href: to });
  };
  return (
    <a href={to} title={title} className="row-link" onClick={follow}>
      {children}
    </a>
  );
}
