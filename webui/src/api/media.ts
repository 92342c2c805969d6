/** Media of trials: their names, steps, reports and files. */

import { keepPreviousData, queryOptions } from "@tanstack/react-query";

import type { MediaFile } from "../lib/media";
import { formatBytes } from "../lib/numbers";
import { api, fetchText, unwrap } from "./client";
import { keys } from "./keys";
import { ApiProblem } from "./problem";

export const mediaNamesQuery = (trialId: number) =>
  queryOptions({
    queryKey: keys.mediaNames(trialId),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/trials/{trial_id}/media-names", {
          params: { path: { trial_id: trialId } },
        }),
      ),
  });

/** Whose media: of a trial, reported under a name. */
export interface MediaOf {
  trialId: number;
  group: string;
  name: string;
}

/** The steps of a name, or of all names. */
export const mediaStepsQuery = (trialId: number, of?: MediaOf) =>
  queryOptions({
    queryKey: keys.mediaSteps(trialId, of?.group, of?.name),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/trials/{trial_id}/media-steps", {
          params: {
            path: { trial_id: trialId },
            query: of && { group: of.group, name: of.name },
          },
        }),
      ),
  });

export const MOST_REPORTS = 500;

/** The reports of a name at some steps; meanwhile those asked for before stay. */
export const mediaQuery = ({ trialId, group, name }: MediaOf, steps: readonly number[]) =>
  queryOptions({
    queryKey: keys.mediaReports(trialId, group, name, steps),
    queryFn: () =>
      unwrap(
        api.GET("/api/v1/trials/{trial_id}/media", {
          params: {
            path: { trial_id: trialId },
            query: { group, name, step: [...steps], limit: MOST_REPORTS },
          },
        }),
      ),
    placeholderData: keepPreviousData,
  });

/** The address of a file of a trial. */
export function mediaAddress(trialId: number, path: string): string {
  const parts = path.split("/").map(encodeURIComponent).join("/");
  return `/api/v1/trials/${trialId}/files/${parts}`;
}

/** The text of a file; one beyond `maxBytes` is not read. */
export const mediaTextQuery = (trialId: number, file: MediaFile, maxBytes: number) =>
  queryOptions({
    queryKey: keys.mediaFile(trialId, file.path, file.digest),
    queryFn: () =>
      fetchText(mediaAddress(trialId, file.path), (size) => {
        if (size > maxBytes)
          throw new ApiProblem(
            413,
            "file_too_large",
            "Too large to show",
            `The file has ${formatBytes(size)}; up to ${formatBytes(maxBytes)} are shown. Download it.`,
          );
      }),
    staleTime: Infinity,
    retry: false,
  });
