/** What the time of a trial went to: a bar, and the same numbers as a table. */

import { Text, Title, useComputedColorScheme } from "@mantine/core";
import { useQuery } from "@tanstack/react-query";

import { trialTimeQuery } from "../../api/queries";
import { lineStyle } from "../../charts/palette";
import { Scroll } from "../../components/Scroll";
import { formatDuration } from "../../lib/times";
import { formatShare, sharesOf } from "../../lib/timeShares";
import classes from "./TimeCard.module.css";

export function TimeCard({ trialId }: { trialId: number }) {
  const time = useQuery(trialTimeQuery(trialId)).data;
  const isDark = useComputedColorScheme("light") === "dark";
  if (time === undefined || time.total_s <= 0) return null;
  const shares = sharesOf(time).map((share) => {
    const isIdle = share.key === "waiting_s";
    const color = isIdle ? "var(--state-quiet)" : lineStyle(share.colorIndex, isDark).color;
    return { ...share, color, isIdle };
  });
  const told = shares.map((one) => `${one.name} ${formatShare(one.fraction)}`).join(", ");
  return (
    <section className={`card ${classes.time}`} aria-labelledby="time-title">
      <Title order={2} id="time-title">
        Where the time went
      </Title>
      <Text size="sm" c="dimmed">
        {time.goodput === null
          ? `${formatDuration(time.total_s)} in all.`
          : `Goodput ${formatShare(time.goodput)}: of ${formatDuration(
              time.total_s - time.waiting_s,
            )} with processes, ${formatDuration(time.training_s)} trained.`}
      </Text>
      <div className={classes.bar} role="img" aria-label={`Shares of the time: ${told}`}>
        {shares.map((one) => (
          <div
            key={one.key}
            className={classes.part}
            data-idle={one.isIdle || undefined}
            style={{ flexGrow: one.fraction, background: one.color }}
            title={`${one.name}: ${formatDuration(one.seconds)}`}
          />
        ))}
      </div>
      <Scroll label="Shares of the time">
        <table className="plain-table">
          <thead>
            <tr>
              <th>Share</th>
              <th className="number">Time</th>
              <th className="number">Of all</th>
              <th>What it is</th>
            </tr>
          </thead>
          <tbody>
            {shares.map((one) => (
              <tr key={one.key}>
                <td className="short">
                  <span
                    className={`${classes.swatch} ${classes.part}`}
                    data-idle={one.isIdle || undefined}
                    style={{ background: one.color }}
                  />
                  {one.name}
                </td>
                <td className="number short">{formatDuration(one.seconds)}</td>
                <td className="number short">{formatShare(one.fraction)}</td>
                <td className="prose">{one.meaning}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </Scroll>
    </section>
  );
}
