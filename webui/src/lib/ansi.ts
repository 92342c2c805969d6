/** Colours of terminals: a line of output as pieces that look alike, never as HTML. */

import type { LogLine } from "../api/types";

/** A piece of a line; colours are numbers of the palette, from 0 (black) to 7 (white). */
export interface Piece {
  text: string;
  color?: number;
  background?: number;
  isBold?: boolean;
  isItalic?: boolean;
  isUnderlined?: boolean;
  isMarked?: boolean;
}

type Look = Omit<Piece, "text" | "isMarked">;

/** Return the pieces of a line: its colours, and what was looked for. */
export function piecesOf(line: Pick<LogLine, "text" | "colors" | "found">, part?: string): Piece[] {
  const { text, colors } = line;
  const marks = line.found ? [toUnits(text, line.found)] : placesOf(text, part);
  const places = toUnits(text, colors?.map(([at]) => at) ?? []);
  const changes = (colors ?? []).map(([, codes], n): [number, string] => [places[n] ?? 0, codes]);
  if (changes.length === 0 && marks.length === 0) return [{ text }];
  const edges = [0, text.length, ...changes.map(([at]) => at), ...marks.flat()];
  const order = [...new Set(edges)].sort((a, b) => a - b);
  const pieces: Piece[] = [];
  let look: Look = {};
  let next = 0;
  order.forEach((start, index) => {
    for (let change = changes[next]; change !== undefined && change[0] <= start;) {
      look = changed(look, change[1]);
      change = changes[++next];
    }
    const end = order[index + 1] ?? start;
    if (end === start) return;
    const isMarked = marks.some(
      ([from, to]) => from !== undefined && from <= start && end <= (to ?? 0),
    );
    pieces.push({ text: text.slice(start, end), ...look, ...(isMarked && { isMarked }) });
  });
  return pieces;
}

function placesOf(text: string, part: string | undefined): number[][] {
  const at = part ? text.toLowerCase().indexOf(part.toLowerCase()) : -1;
  return at < 0 || part === undefined ? [] : [[at, at + part.length]];
}

/** Return places in characters as places in UTF-16, within the text. */
function toUnits(text: string, places: readonly number[]): number[] {
  // Only a few texts hold characters of two units.
  if (!/[\ud800-\udbff]/.test(text)) return places.map((at) => Math.min(at, text.length));
  const characters = Array.from(text);
  return places.map((at) => characters.slice(0, at).join("").length);
}

/** Return a look after the parameters of a sequence; unknown ones change nothing. */
function changed(before: Look, parameters: string): Look {
  let look = { ...before };
  const codes = parameters.split(";").map(Number);
  for (let index = 0; index < codes.length; index++) {
    const code = codes[index] ?? 0;
    if (code === 0) look = {};
    else if (code === 1) look.isBold = true;
    else if (code === 3) look.isItalic = true;
    else if (code === 4) look.isUnderlined = true;
    else if (code === 7) look = { ...look, color: look.background, background: look.color ?? 7 };
    else if (code === 22) look.isBold = undefined;
    else if (code === 23) look.isItalic = undefined;
    else if (code === 24) look.isUnderlined = undefined;
    else if (code === 27) look = { ...look, color: look.background, background: look.color };
    else if (code === 38 || code === 48) {
      const [color, used] = extended(codes.slice(index + 1));
      look = code === 38 ? { ...look, color } : { ...look, background: color };
      index += used;
    } else if (code === 39) look.color = undefined;
    else if (code === 49) look.background = undefined;
    else {
      const base = [30, 90, 40, 100].find((first) => code >= first && code < first + 8);
      if (base === undefined) continue;
      if (base === 30 || base === 90) look.color = code - base;
      else look.background = code - base;
    }
  }
  return look;
}

/** Return the nearest colour of the palette for `5;n` or `2;r;g;b`, and how many codes it took. */
function extended(codes: readonly number[]): [number | undefined, number] {
  const [kind, first = 0, green = 0, blue = 0] = codes;
  if (kind === 2) return [nearest(first, green, blue), 4];
  if (kind !== 5) return [undefined, 0];
  if (first < 16) return [first % 8, 2];
  if (first >= 232) return [first < 244 ? 0 : 7, 2];
  const cube = first - 16;
  const level = (step: number) => (Math.floor(cube / step) % 6) * 51;
  return [nearest(level(36), level(6), level(1)), 2];
}

/** Each bit of a colour's number is one of red, green and blue. */
function nearest(red: number, green: number, blue: number): number {
  const high = Math.max(red, green, blue);
  const bit = (value: number, weight: number) => (high > 60 && value > 0.6 * high ? weight : 0);
  return bit(red, 1) + bit(green, 2) + bit(blue, 4);
}
