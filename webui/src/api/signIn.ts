/** Signing in and out; the session itself is a cookie that no script can read. */

import { api, unwrap } from "./client";

export function signIn(user: string, password: string) {
  return unwrap(api.POST("/api/v1/login", { body: { user, password } }));
}

export function signOut() {
  return unwrap(api.POST("/api/v1/logout"));
}
