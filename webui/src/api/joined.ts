/** Requests that several parts of a page make at a time, as one. */

import { isStill } from "../lib/ready";

interface Asked<Wanted, Answer> {
  wanted: readonly Wanted[];
  resolve: (found: Answer[]) => void;
  reject: (error: unknown) => void;
}

/** While one scrolls, charts and rows come one after the other; else all of them at once. */
const JOINED_WITHIN_MS = 20;
const STILL_MS = 200;

/**
 * Joins what is asked for at a time with the same options.
 *
 * `send` answers in the order of what is wanted; `most` says how much one request asks for, unless
 * a single part wants more.
 */
export class JoinedRequests<Options, Wanted, Answer> {
  private readonly asked = new Map<string, Asked<Wanted, Answer>[]>();

  constructor(
    private readonly send: (wanted: readonly Wanted[], options: Options) => Promise<Answer[]>,
    private readonly most: number,
  ) {}

  read(wanted: readonly Wanted[], options: Options): Promise<Answer[]> {
    const key = JSON.stringify(options);
    return new Promise((resolve, reject) => {
      const known = this.asked.get(key);
      if (known !== undefined) {
        known.push({ wanted, resolve, reject });
        return;
      }
      this.asked.set(key, [{ wanted, resolve, reject }]);
      setTimeout(
        () => {
          const all = this.asked.get(key) ?? [];
          this.asked.delete(key);
          void this.sendInOrder(all, options);
        },
        isStill(STILL_MS) ? 0 : JOINED_WITHIN_MS,
      );
    });
  }

  /** Send one request after the other: side by side, the first would come as late as the last. */
  private async sendInOrder(
    all: readonly Asked<Wanted, Answer>[],
    options: Options,
  ): Promise<void> {
    for (const part of this.parts(all)) {
      try {
        const found = await this.send(
          part.flatMap(({ wanted }) => wanted),
          options,
        );
        let from = 0;
        for (const { wanted, resolve } of part) {
          resolve(found.slice(from, from + wanted.length));
          from += wanted.length;
        }
      } catch (error) {
        for (const { reject } of part) reject(error);
      }
    }
  }

  private parts(all: readonly Asked<Wanted, Answer>[]): Asked<Wanted, Answer>[][] {
    const found: Asked<Wanted, Answer>[][] = [];
    let count = Infinity;
    for (const one of all) {
      count += one.wanted.length;
      if (count > this.most) {
        found.push([]);
        count = one.wanted.length;
      }
      found.at(-1)?.push(one);
    }
    return found;
  }
}
