"""Step 3 of the guide: run the script locally."""

from trial import MyPyTorchTrial

import paceline as det
from paceline import pytorch


def main():
    with det.pytorch.init(hparams={"global_batch_size": 32}) as train_context:
        trial = MyPyTorchTrial(train_context)
        trainer = det.pytorch.Trainer(trial, train_context)
        trainer.fit(
            max_length=pytorch.Epoch(1),
            checkpoint_period=pytorch.Batch(10),
            validation_period=pytorch.Batch(10),
        )


if __name__ == "__main__":
    main()
