"""Train the net of model_def.py: alone, in several processes or for a master, without an edit."""

import argparse
import logging

from model_def import ImageTrial

import paceline
from paceline import pytorch

# Under a master, the hyperparameters and the length come from the experiment's config instead.
HPARAMS = {"global_batch_size": 64, "learning_rate": 0.005, "num_filters": 16, "dropout": 0.25}


def main(batches: int = 2000, resume: str | None = None) -> pytorch.Result:
    with pytorch.init(HPARAMS, seed=1, resume=resume) as context:
        trainer = pytorch.Trainer(ImageTrial(context), context)
        result = trainer.fit(
            max_length=pytorch.Batch(batches),
            validation_period=pytorch.Batch(250),
            # Each validation that is better than those before is worth a checkpoint.
            checkpoint_policy="best",
            metric="accuracy",
            smaller_is_better=False,
        )
        if context.distributed.rank == 0 and result.best_metrics:
            accuracy = result.best_metrics["accuracy"]
            print(f"{result.stop_reason}: {result.steps_completed} batches, best {accuracy:.1%}")
    return result


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=paceline.LOG_FORMAT)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=2000, help="how long to train")
    parser.add_argument("--resume", help="auto, or the directory of a run to go on with")
    main(**vars(parser.parse_args()))
