"""A trial of eight steps that needs no torch; it waits at step 4 while `hold` is in its config."""

import time

import paceline as det

info = det.get_cluster_info()
with det.core.init() as context:
    first, total = 0, 0.0
    if info.latest_checkpoint is not None:
        with context.checkpoint.restore_path(info.latest_checkpoint) as path:
            words = (path / "state").read_text().split()
            first, total = int(words[0]), float(words[1])
    print("begins at step", first, flush=True)
    for step in range(first + 1, 9):
        total = total / 2 + info.trial.hparams["factor"] * step
        context.train.report_training_metrics(step, {"total": total})
        if step % 4 == 0:
            context.train.report_validation_metrics(step, {"loss": total})
            with context.checkpoint.store_path({"steps_completed": step}) as (path, _):
                (path / "state").write_text(f"{step} {total}")
            # The sample is made with this variable, and goes on without.
            while info.user_data.get("hold") and step == 4 and first == 0:
                if context.preempt.should_preempt():
                    raise SystemExit(0)
                time.sleep(0.05)
        if context.preempt.should_preempt():
            break
