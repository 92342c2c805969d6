/** A menu that is made when it is opened first: lists and charts have dozens of them. */

import { ActionIcon, Menu, type MenuProps } from "@mantine/core";
import { type ReactNode, type Ref, useImperativeHandle, useRef, useState } from "react";
import { flushSync } from "react-dom";

interface LazyMenuProps {
  label: string;
  icon: ReactNode;
  size?: number;
  position?: MenuProps["position"];
  children: ReactNode;
}

export function LazyMenu({ label, icon, size, position, children }: LazyMenuProps) {
  const button = useRef<HTMLButtonElement>(null);
  const [isMade, setMade] = useState(false);
  const [isOpen, setOpen] = useState(false);
  const toggle = () => {
    // The focus returns only where the menu was there before it opened.
    flushSync(() => setMade(true));
    setOpen(!isOpen);
  };
  return (
    <>
      <ActionIcon
        ref={button}
        variant="subtle"
        color="gray"
        size={size}
        aria-label={label}
        aria-haspopup="menu"
        aria-expanded={isOpen}
        onClick={toggle}
      >
        {icon}
      </ActionIcon>
      {isMade && (
        <Menu opened={isOpen} onChange={setOpen} position={position}>
          <Menu.Target>
            <There node={button} />
          </Menu.Target>
          <Menu.Dropdown aria-label={label} aria-labelledby={undefined}>
            {children}
          </Menu.Dropdown>
        </Menu>
      )}
    </>
  );
}

/** Hands an element on that stands elsewhere. */
function There({ node, ref }: { node: { current: HTMLElement | null }; ref?: Ref<HTMLElement> }) {
  useImperativeHandle(ref, () => node.current as HTMLElement, [node]);
  return null;
}
