"""A line through noisy points, by gradient descent with momentum."""

import random
import time

import paceline


def main() -> None:
    with paceline.core.init() as context:
        trial = context.info.trial
        lr, momentum = trial.hparams["lr"], trial.hparams["momentum"]
        weight = velocity = 0.0
        draw = random.Random(trial.trial_seed)
        for step in range(1, trial.hparams["steps"] + 1):
            gradient = weight - 2.0 + draw.gauss(0.0, 0.1)
            # As a training with a model would take.
            time.sleep(0.03)
            velocity = momentum * velocity - lr * gradient
            weight += velocity
            if step % 10:
                continue
            context.train.report_validation_metrics(step, {"loss": (weight - 2.0) ** 2})
            if context.preempt.should_preempt():
                return


if __name__ == "__main__":
    main()
