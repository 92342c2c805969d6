"""Step 2 of the guide: initialize the trial and the trainer; step 4 submits this script."""

import logging

from trial import MyPyTorchTrial

import paceline as det
from paceline import pytorch


def main():
    with det.pytorch.init() as train_context:
        trial = MyPyTorchTrial(train_context)
        trainer = det.pytorch.Trainer(trial, train_context)

        trainer.configure_profiler(
            enabled=True, sync_timings=True, begin_on_batch=0, end_after_batch=10
        )

        trainer.fit(
            checkpoint_period=pytorch.Batch(10),
            validation_period=pytorch.Batch(10),
        )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=det.LOG_FORMAT)
    main()
