/** Code and YAML, to read or to edit. */

import { useComputedColorScheme } from "@mantine/core";
import { autocompletion, type CompletionSource } from "@codemirror/autocomplete";
import { defaultKeymap, history, historyKeymap } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { yaml } from "@codemirror/lang-yaml";
import { HighlightStyle, syntaxHighlighting } from "@codemirror/language";
import { type Diagnostic, lintGutter, setDiagnostics } from "@codemirror/lint";
import { searchKeymap } from "@codemirror/search";
import { EditorState } from "@codemirror/state";
import { EditorView, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";
import { useEffect, useRef } from "react";

export interface CodeProblem {
  line?: number | null;
  message: string;
}

interface CodeViewProps {
  label: string;
  text: string;
  language?: "yaml" | "python" | "text";
  onChange?: (text: string) => void;
  complete?: CompletionSource;
  /** Marked at their lines. */
  problems?: readonly CodeProblem[];
  height?: string;
}

const INK = {
  light: {
    comment: "#59616d",
    keyword: "#8a1f8f",
    string: "#1b6e35",
    number: "#0b5cad",
    name: "#8a4b00",
  },
  dark: {
    comment: "#a3abb8",
    keyword: "#e0a3f5",
    string: "#7fd79a",
    number: "#8fc1ee",
    name: "#f0b878",
  },
};

function highlight(scheme: "light" | "dark") {
  const ink = INK[scheme];
  return HighlightStyle.define([
    { tag: tags.comment, color: ink.comment },
    { tag: [tags.keyword, tags.operatorKeyword, tags.bool], color: ink.keyword },
    { tag: tags.string, color: ink.string },
    { tag: tags.number, color: ink.number },
    {
      tag: [tags.propertyName, tags.function(tags.definition(tags.variableName))],
      color: ink.name,
    },
  ]);
}

function marks({ state }: EditorView, problems: readonly CodeProblem[]): Diagnostic[] {
  return problems.flatMap(({ line, message }): Diagnostic[] => {
    if (!line || line > state.doc.lines) return [];
    const { from, to } = state.doc.line(line);
    return [{ from, to, severity: "error", message }];
  });
}

export function CodeView(props: CodeViewProps) {
  const { label, text, language = "text", onChange, complete, problems, height = "auto" } = props;
  const holder = useRef<HTMLDivElement>(null);
  const view = useRef<EditorView | null>(null);
  const latest = useRef({ text, onChange, complete });
  useEffect(() => {
    latest.current = { text, onChange, complete };
  });
  const scheme = useComputedColorScheme("light");
  const isEditable = onChange !== undefined;

  useEffect(() => {
    if (holder.current === null) return;
    const made = new EditorView({
      parent: holder.current,
      state: EditorState.create({
        doc: view.current?.state.doc ?? latest.current.text,
        extensions: [
          lineNumbers(),
          history(),
          keymap.of([...defaultKeymap, ...historyKeymap, ...searchKeymap]),
          language === "yaml" ? yaml() : language === "python" ? python() : [],
          // An editor made anew when completion arrives would lose what is being typed.
          isEditable
            ? autocompletion({ override: [(at) => latest.current.complete?.(at) ?? null] })
            : [],
          isEditable ? lintGutter() : [],
          syntaxHighlighting(highlight(scheme)),
          EditorState.readOnly.of(!isEditable),
          EditorView.contentAttributes.of({ "aria-label": label, tabindex: "0" }),
          EditorView.lineWrapping,
          EditorView.updateListener.of((update) => {
            if (update.docChanged) latest.current.onChange?.(update.state.doc.toString());
          }),
          EditorView.theme(
            {
              "&": { fontSize: "0.8125rem", height, backgroundColor: "var(--surface)" },
              ".cm-gutters": {
                backgroundColor: "var(--surface-raised)",
                color: "var(--text-quiet)",
                border: "none",
              },
              ".cm-content": { caretColor: "var(--mantine-color-text)" },
              ".cm-scroller": { overflow: "auto" },
              ".cm-tooltip": {
                backgroundColor: "var(--surface-raised)",
                color: "var(--mantine-color-text)",
                border: "1px solid var(--line)",
              },
              ".cm-tooltip-autocomplete ul li[aria-selected]": {
                backgroundColor: "var(--mantine-primary-color-filled)",
                color: "#ffffff",
              },
              // There is no room for it beside the list.
              "@media not all and (min-width: 48em)": { ".cm-completionInfo": { display: "none" } },
            },
            { dark: scheme === "dark" },
          ),
        ],
      }),
    });
    view.current = made;
    return () => made.destroy();
  }, [language, scheme, isEditable, label, height]);

  useEffect(() => {
    const made = view.current;
    if (made === null || made.state.doc.toString() === text) return;
    made.dispatch({ changes: { from: 0, to: made.state.doc.length, insert: text } });
  }, [text]);

  useEffect(() => {
    const made = view.current;
    if (made !== null && problems) made.dispatch(setDiagnostics(made.state, marks(made, problems)));
  }, [problems]);

  return (
    <div
      ref={holder}
      style={{ border: "1px solid var(--line)", borderRadius: 8, overflow: "hidden" }}
    />
  );
}
