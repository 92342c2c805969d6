/** Mantine's components as links of the router. */

import { Anchor, Button, NavLink } from "@mantine/core";
import type { AnchorProps, ButtonProps, NavLinkProps } from "@mantine/core";
import { createLink } from "@tanstack/react-router";
import type { AnchorHTMLAttributes, Ref } from "react";

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
