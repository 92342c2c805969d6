"""The guide's local training on several processes, for torchrun."""

import os

import torch.distributed as dist
from trial import MyPyTorchTrial

import paceline as det
from paceline import core, pytorch


def main():
    dist.init_process_group(backend="gloo")

    os.environ["USE_TORCH_DISTRIBUTED"] = "true"

    with det.pytorch.init(
        hparams={"global_batch_size": 32},
        distributed=core.DistributedContext.from_torch_distributed(chief_ip="localhost"),
    ) as train_context:
        trial = MyPyTorchTrial(train_context)
        trainer = det.pytorch.Trainer(trial, train_context)
        trainer.fit(
            max_length=pytorch.Epoch(1),
            checkpoint_period=pytorch.Batch(10),
            validation_period=pytorch.Batch(10),
        )


if __name__ == "__main__":
    main()
