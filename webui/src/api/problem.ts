/** Errors of the API as the pages tell them. */

export class ApiProblem extends Error {
  constructor(
    readonly status: number,
    readonly code: string,
    readonly title: string,
    detail: string,
  ) {
    super(detail);
    this.name = "ApiProblem";
  }

  get isUnauthorized(): boolean {
    return this.status === 401;
  }
}

const UNREACHABLE =
  "The master does not answer. It may be restarting; this page tries again by itself." +
  " If it stays away, start it with `paceline up`.";

/** Return what went wrong as a problem, whatever was thrown. */
export function problemOf(error: unknown): ApiProblem {
  if (error instanceof ApiProblem) return error;
  if (error instanceof TypeError)
    return new ApiProblem(0, "unreachable", "No connection", UNREACHABLE);
  const detail = error instanceof Error ? error.message : String(error);
  return new ApiProblem(0, "page_error", "This page failed", detail);
}

/** Return the problem that an answer's body describes. */
export function problemFrom(response: Response, body: unknown): ApiProblem {
  if (isProblem(body)) return new ApiProblem(response.status, body.code, body.title, body.detail);
  const detail = typeof body === "string" && body.length > 0 ? body : response.statusText;
  return new ApiProblem(response.status, "error", `Error ${response.status}`, detail);
}

function isProblem(body: unknown): body is { code: string; title: string; detail: string } {
  return (
    typeof body === "object" &&
    body !== null &&
    "code" in body &&
    "title" in body &&
    "detail" in body
  );
}
