/** Text of people in Markdown: no HTML of theirs counts, and a link leads to a page or a site. */

import { useRouter } from "@tanstack/react-router";
import DOMPurify from "dompurify";
import MarkdownIt from "markdown-it";
import { type MouseEvent, useMemo } from "react";

import classes from "./Markdown.module.css";

const LONGEST = 100_000;
/** Pages of the app, other sites, and mail; `//host` is another site without saying so. */
const LINK = /^(?:https?:\/\/|mailto:|\/(?![/\\]))/i;
const NAMED = /\b(trial|experiment|view) (\d{1,15})\b/gi;
const PLACES: Record<string, string> = {
  trial: "/trials/",
  experiment: "/experiments/",
  view: "/compare?saved=",
};

const TAGS = ["a", "p", "br", "hr", "em", "strong", "s", "code", "pre", "blockquote", "ul", "ol"];
TAGS.push("li", "h3", "h4", "h5", "h6", "table", "thead", "tbody", "tr", "th", "td");

const markdown = makeMarkdown();
type Token = ReturnType<typeof markdown.parse>[number];

function makeMarkdown() {
  const made = new MarkdownIt({ html: false, linkify: true, breaks: true });
  // A picture of another site would tell it who reads; its link stays.
  made.disable("image");
  made.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
  made.core.ruler.push("paceline", ({ tokens, Token }) => {
    for (const { type, children } of tokens) {
      if (type !== "inline" || children === null) continue;
      let depth = 0;
      for (let at = 0; at < children.length; at++) {
        const one = children[at];
        if (one === undefined) break;
        if (one.type === "link_open") depth++;
        else if (one.type === "link_close") depth--;
        else if (one.type === "text" && depth === 0) {
          const parts = linked(one.content, (type, tag, nesting) => new Token(type, tag, nesting));
          children.splice(at, 1, ...parts);
          at += parts.length - 1;
        }
      }
    }
    // The page's own headings are above those of a note.
    for (const token of tokens)
      if (token.tag.startsWith("h") && token.type.startsWith("heading"))
        token.tag = `h${Math.min(6, Number(token.tag[1]) + 2)}`;
  });
  return made;
}

type MakeToken = (type: string, tag: string, nesting: -1 | 0 | 1) => Token;

/** Return a text in which `trial 12` and the like are links. */
function linked(content: string, make: MakeToken): Token[] {
  const found: Token[] = [];
  let start = 0;
  const text = (end: number) => {
    if (end > start)
      found.push(Object.assign(make("text", "", 0), { content: content.slice(start, end) }));
  };
  for (const match of content.matchAll(NAMED)) {
    text(match.index);
    const [words, kind = "", id] = match;
    const open = make("link_open", "a", 1);
    open.attrSet("href", `${PLACES[kind.toLowerCase()]}${id}`);
    const inside = Object.assign(make("text", "", 0), { content: words });
    found.push(open, inside, make("link_close", "a", -1));
    start = match.index + words.length;
  }
  text(content.length);
  return found;
}

/** Return the HTML of Markdown, with nothing but the tags and links above. */
export function safeHtml(text: string): string {
  return DOMPurify.sanitize(markdown.render(text.slice(0, LONGEST)), {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "title", "start"],
    ALLOWED_URI_REGEXP: LINK,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
  });
}

export function Markdown({ text, label }: { text: string; label: string }) {
  const router = useRouter();
  const html = useMemo(() => safeHtml(text), [text]);
  const follow = (event: MouseEvent<HTMLElement>) => {
    const link = (event.target as Element).closest("a");
    if (link === null || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    const { origin, href } = new URL(link.href);
    if (origin === window.location.origin) router.history.push(href.slice(origin.length));
    else window.open(href, "_blank", "noopener,noreferrer");
  };
  return (
    <section aria-label={label}>
      <div
        className={classes.text}
        onClick={follow}
        // Sanitised above.
        dangerouslySetInnerHTML={{ __html: html }}
      />
      {text.length > LONGEST && (
        <p className="quiet">
          Only the first {LONGEST.toLocaleString("en-US")} characters are shown.
        </p>
      )}
    </section>
  );
}
