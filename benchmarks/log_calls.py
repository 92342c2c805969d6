"""What one call of each client costs a training, in one run: `python benchmarks/run.py log-calls`.

Each front logs ten values a call, 300 as fast as it can, in a process of its own; fronts take
turns. W&B's and MLflow's clients log to Paceline, and MLflow's to its own server as well; of
Paceline's own calls one case reports live to the master. An image has 256 x 256 pixels, and the
time to encode it is left out. A value of a figure is the median of the calls of one process.
"""

import json
import os
import subprocess
import sys
import tempfile
from statistics import fmean, median, quantiles

from figures import Figure
from log_clients import mlflow_server, paceline_server

_NUM_ROUNDS = 5
_NUM_CALLS = 300
_IMAGE_BAR_US = 200

BEGIN = {
    "wandb.log": """
import wandb
run = wandb.init(project="p", settings=wandb.Settings(silent=True))
call = lambda step: run.log(values)
end = run.finish
""",
    "mlflow.log_metrics": """
import mlflow
mlflow.start_run()
call = lambda step: mlflow.log_metrics(values, step=step)
end = mlflow.end_run
""",
    "paceline.log": """
import paceline
paceline.init()
call = lambda step: paceline.log(values)
end = paceline.finish
""",
    "report_training_metrics": """
import paceline.core
context = paceline.core.init().__enter__()
call = lambda step: context.train.report_training_metrics(step, values)
end = lambda: context.__exit__(None, None, None)
""",
    "report_image": """
import numpy, paceline.core
from paceline.core._media import encode_images
context = paceline.core.init().__enter__()
random = numpy.random.default_rng(0)
base = numpy.zeros((256, 256, 3), dtype="uint8")
base[:, :, 0] = numpy.arange(256)
def call(step):
    base[0, :4] = random.integers(0, 255, (4, 3))
    begin = time.perf_counter()
    encode_images(base)
    middle = time.perf_counter()
    context.train.report_image(step, "image", base)
    return time.perf_counter() - middle - (middle - begin)
end = lambda: context.__exit__(None, None, None)
""",
}
MEASURE = """
times = []
for step in range(1, num_calls + 1):
    begin = time.perf_counter()
    own = call(step)
    times.append(1e6 * (time.perf_counter() - begin if own is None else own))
end()
with open("times.json", "w") as file:
    json.dump(times, file)
"""


def measure(front: str, variables: dict[str, str], num_calls: int) -> list[float]:
    """Return the microseconds of each call in a new process."""
    code = "import json, time\nvalues = {f'm{k}': k / 3 for k in range(10)}\n"
    code += f"num_calls = {num_calls}\n{BEGIN[front]}"
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(
            [sys.executable, "-c", code + MEASURE], cwd=scratch, check=True,
            env=os.environ | variables, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        with open(f"{scratch}/times.json") as file:
            return list(json.load(file))


def measure_calls() -> list[Figure]:
    """Measure all fronts in turns."""
    with paceline_server() as url, mlflow_server() as mlflow_url:
        token, _, address = url.removeprefix("http://api:").partition("@")
        to_wandb = {"WANDB_BASE_URL": f"http://{address}", "WANDB_API_KEY": token}
        to_master = {"PACELINE_REPORT_TO": f"http://{address}", "PACELINE_TOKEN": token}
        cases: list[tuple[str, str, dict[str, str]]] = [
            ("wandb.log", "to Paceline", to_wandb),
            ("mlflow.log_metrics", "to Paceline", {"MLFLOW_TRACKING_URI": url}),
            ("mlflow.log_metrics", "to MLflow's own server", {"MLFLOW_TRACKING_URI": mlflow_url}),
            ("paceline.log", "without a master", {}),
            ("paceline.log", "reporting live to a master", to_master),
            ("report_training_metrics", "without a master", {}),
            ("report_image", "beyond encoding", {}),
        ]
        found: list[list[list[float]]] = [[] for _ in cases]
        for _ in range(_NUM_ROUNDS):
            for rounds, (front, _, variables) in zip(found, cases, strict=True):
                rounds.append(measure(front, variables, _NUM_CALLS))
    figures = []
    for (front, place, _), rounds in zip(cases, found, strict=True):
        calls = [one for times in rounds for one in times]
        p95, mean = quantiles(calls, n=20)[-1], fmean(calls)
        figures.append(
            Figure(
                what=f"a call of {front}, {place}", unit="us", values=[*map(median, rounds)],
                bar=_IMAGE_BAR_US if front == "report_image" else None,
                beside=f"95th percentile {p95:,.0f} us, mean {mean:,.0f} us",
            )
        )  # fmt: skip
    return figures
