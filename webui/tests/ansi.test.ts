import { describe, expect, it } from "vitest";

import { piecesOf } from "../src/lib/ansi";

const line = (text: string, ...colors: [number, string][]) => ({ text, colors, found: null });

describe("colours of terminals", () => {
  it.each([
    ["31", { color: 1 }],
    ["1;94", { isBold: true, color: 4 }],
    ["4;3;42", { isUnderlined: true, isItalic: true, background: 2 }],
    ["38;5;208", { color: 1 }],
    ["38;5;21;1", { color: 4, isBold: true }],
    ["48;2;10;220;30", { background: 2 }],
    ["7", { color: undefined, background: 7 }],
    ["31;0", {}],
    ["99;;5", {}],
    ["38", { color: undefined }],
  ])("shows %s", (codes, look) => {
    expect(piecesOf(line("ab", [1, codes]))).toEqual([{ text: "a" }, { text: "b", ...look }]);
  });

  it("marks what was found across colours and characters of two units", () => {
    const found: [number, number] = [1, 3];
    expect(piecesOf({ text: "😀😀bc", colors: [[2, "32"]], found })).toEqual([
      { text: "😀" },
      { text: "😀", isMarked: true },
      { text: "b", color: 2, isMarked: true },
      { text: "c", color: 2 },
    ]);
    expect(piecesOf(line("one Two", [5, "1"]), "two").map((piece) => piece.text)).toEqual([
      "one ",
      "T",
      "wo",
    ]);
  });

  it("keeps the text whole whatever the places are", () => {
    const pieces = piecesOf(line("text", [900, "31"], [2, "32"], [-3, "33"]));
    expect(pieces.map((piece) => piece.text).join("")).toBe("text");
  });
});
