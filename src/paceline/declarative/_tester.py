"""Predictions of a trained model."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.declarative._config_classes import InferenceConfig
from paceline.declarative._run_files import load_weights
from paceline.engine import collate_of, form_of, to_device


class Tester:
    """Run a model over a data set, batch by batch: `tester.build()`, then `tester.run()`.

    Override `update_result_holders` to keep what you need.

    Args:
        configs: The config.

    Raises:
        TypeError: `configs` is no `InferenceConfig`.
        ValueError: A field is missing; all missing ones are named.
    """

    def __init__(self, configs: InferenceConfig) -> None:
        if not isinstance(configs, InferenceConfig):
            raise TypeError(f"`configs` must be an InferenceConfig, but got {configs!r}.")
        needed = ("model_class", "dataset", "pretrained_model_path")
        if missing := [f"`{name}`" for name in needed if getattr(configs, name) is None]:
            raise ValueError(f"The config must be complete, but lacks {', '.join(missing)}.")
        self.configs = configs
        self.model: nn.Module
        self.dataloader: DataLoader[Any]

    def build(self) -> None:
        """Make the loader and the model, with its weights, and the directory for output.

        Raises:
            FileNotFoundError: There is no file of weights.
            ValueError: It is of another model, or the data do not fit the config.
        """
        configs = self.configs
        is_cuda = torch.cuda.is_available() and not configs.cpu_only
        self.device = torch.device("cuda" if is_cuda else "cpu")
        collate = collate_of(
            form_of(
                configs.dataset,
                "dataset",
                configs.data_label_separation_index,
                configs.leading_sample_axis,
            )
        )
        self.dataloader = DataLoader(
            configs.dataset, batch_size=configs.batch_size_per_process, collate_fn=collate
        )
        model: nn.Module = configs.model_class(**configs.model_params.values())
        assert configs.pretrained_model_path is not None
        load_weights(model, configs.pretrained_model_path)
        self.model = model.to(self.device).eval()
        if configs.prediction_output_path is not None:
            Path(configs.prediction_output_path).mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Hand the predictions and labels of each batch to `update_result_holders`, in order.

        Raises:
            RuntimeError: `build` was not called before.
        """
        if "model" not in vars(self):
            raise RuntimeError("`run` must follow `build`, but that was not called.")
        index = self.configs.data_label_separation_index
        postprocess = self.configs.prediction_postprocessor
        for batch in self.dataloader:
            items = [to_device(item, self.device) for item in batch]
            with torch.no_grad():
                returned = self.model(*items[:index])
            preds = _as_tuple(returned)
            if postprocess is not None:
                preds = _as_tuple(postprocess(preds))
            self.update_result_holders(preds, tuple(items[index:] if index else ()))

    def update_result_holders(self, preds: tuple[Tensor, ...], labels: tuple[Any, ...]) -> None:
        """Take in a batch; does nothing unless it is overridden.

        Args:
            preds: The predictions, after `prediction_postprocessor`.
            labels: The labels, without any if there are none.
        """


def _as_tuple(returned: Any) -> tuple[Tensor, ...]:
    if isinstance(returned, Tensor):
        return (returned,)
    return tuple(returned.values() if isinstance(returned, Mapping) else returned)
