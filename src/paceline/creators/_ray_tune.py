"""Creator functions as a trainable of Ray Tune."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray import tune

from paceline._training.workers.ray.placement import trainable_name, trial_resources
from paceline._training.workers.worker_settings import WorkerResources, WorkerSettings
from paceline.creators._pytorch_trainer import PyTorchTrainer

_STATE_FILE = "trainer.pt"


class PyTorchTrainable(tune.Trainable):
    """A `creators.PyTorchTrainer` in a trial's workers; the config contains its arguments.

    Each step is one pass over the training data and one over the validation data. Without
    validation data, the config needs ``validation_function=False``. Lost workers end the trial;
    Tune's `FailureConfig` decides what follows.
    """

    @classmethod
    def trainer_arguments(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of the trial's trainer."""
        return config

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Return the placement group of a trial: a bundle for each worker.

        Raises:
            ResourcesError: The cluster can never run the workers of a trial.
        """
        given = cls.trainer_arguments(config)
        num_workers = given.get("num_workers") or given.get("num_replicas", 1)
        use_gpu = given.get("use_gpu", False)
        resources = WorkerResources(
            given.get("num_cpus_per_worker"), None if use_gpu == "auto" else float(use_gpu)
        )
        settings = WorkerSettings(num_workers=num_workers, resources=resources)
        return trial_resources(settings.ray_bundles(num_workers))

    def setup(self, config: dict[str, Any]) -> None:
        """Start the workers."""
        arguments = {**type(self).trainer_arguments(config), "cluster": "ray"}
        self._trainer = PyTorchTrainer(**arguments)

    def step(self) -> dict[str, Any]:
        """Train for a pass, validate, and return the statistics of both."""
        statistics: dict[str, Any] = self._trainer.train(max_retries=0)
        return {**statistics, **self._trainer.validate()}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the whole state."""
        self._trainer.save(Path(checkpoint_dir) / _STATE_FILE)

    def load_checkpoint(self, checkpoint_dir: Any) -> None:
        """Resume from a saved state."""
        self._trainer.load(Path(checkpoint_dir) / _STATE_FILE)

    def cleanup(self) -> None:
        """End the workers."""
        self._trainer.shutdown(force=True)


def as_trainable(
    arguments: dict[str, Any],
    tune_step: Callable[[PyTorchTrainer, dict[str, Any]], dict[str, Any]] | None,
) -> type[PyTorchTrainable]:
    """Return a trainable with fixed arguments; see `PyTorchTrainer.as_trainable`."""

    class Trainable(PyTorchTrainable):
        @classmethod
        def trainer_arguments(cls, config: dict[str, Any]) -> dict[str, Any]:
            return {**arguments, "config": {**(arguments.get("config") or {}), **config}}

        def step(self) -> dict[str, Any]:
            if tune_step is None:
                return super().step()
            return tune_step(self._trainer, {"iteration": self.training_iteration})

    Trainable.__name__ = trainable_name(arguments["model_creator"], "model_creator")
    return Trainable
