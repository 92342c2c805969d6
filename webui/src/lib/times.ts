/** Writing times and durations in the reader's own time zone. */

const FULL = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const CLOCK = new Intl.DateTimeFormat(undefined, {
  hour: "2-digit",
  minute: "2-digit",
  second: "2-digit",
  hour12: false,
});
const RELATIVE = {
  long: new Intl.RelativeTimeFormat("en", { numeric: "auto" }),
  short: new Intl.RelativeTimeFormat("en", { numeric: "auto", style: "short" }),
};

/** Return a time (seconds since 1970) in full. */
export function formatTime(seconds: number): string {
  return FULL.format(seconds * 1000);
}

/** Return the time of day in hours, minutes and seconds. */
export function formatClock(seconds: number): string {
  return CLOCK.format(seconds * 1000);
}

/** Return how long ago a time was; `now` in milliseconds. */
export function formatAgo(
  seconds: number,
  now = Date.now(),
  style: keyof typeof RELATIVE = "long",
): string {
  const words = RELATIVE[style];
  const age = seconds - now / 1000;
  const size = Math.abs(age);
  if (size < 10) return "just now";
  if (size < 60) return words.format(Math.round(age), "second");
  if (size < 3600) return words.format(Math.round(age / 60), "minute");
  if (size < 86_400) return words.format(Math.round(age / 3600), "hour");
  return words.format(Math.round(age / 86_400), "day");
}

/** Return a duration in its two largest units. */
export function formatDuration(seconds: number): string {
  if (seconds < 10) return `${Math.max(0, seconds).toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  const minutes = Math.round(whole / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

/** Return a time as the browser's own field for local times takes it. */
export function localInput(seconds: number): string {
  const at = new Date(seconds * 1000);
  const local = new Date(at.getTime() - at.getTimezoneOffset() * 60_000);
  return local.toISOString().slice(0, 19);
}
