"""What one call of each client costs a training, in one run.

    python benchmarks/log_calls.py [ROUNDS [CALLS]]

Each front logs ten values a call, CALLS as fast as it can, in a process of its own; fronts
take turns. W&B's and MLflow's clients log to Paceline, and MLflow's to its own server as well. The
last row is an image of 256 x 256 pixels without the time to encode it. One JSON object a line:
microseconds of a call, as the median, 95th percentile and mean of all rounds.
"""

import json
import os
import subprocess
import sys
import tempfile
from statistics import fmean, median, quantiles

from clients import mlflow_server, paceline_server

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
from paceline.core._media_encoding import encode_images
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


def main() -> None:
    """Measure all fronts in turns."""
    num_rounds, num_calls = (*map(int, sys.argv[1:]), *(3, 300)[len(sys.argv) - 1 :])
    with paceline_server() as url, mlflow_server() as mlflow_url:
        token, _, address = url.removeprefix("http://api:").partition("@")
        to_wandb = {"WANDB_BASE_URL": f"http://{address}", "WANDB_API_KEY": token}
        cases = [
            ("wandb.log", "paceline", to_wandb),
            ("mlflow.log_metrics", "paceline", {"MLFLOW_TRACKING_URI": url}),
            ("mlflow.log_metrics", "mlflow", {"MLFLOW_TRACKING_URI": mlflow_url}),
            ("paceline.log", "-", {}),
            ("report_training_metrics", "-", {}),
            ("report_image", "-", {}),
        ]
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(num_rounds):
            for front, server, variables in cases:
                found.setdefault((front, server), []).extend(measure(front, variables, num_calls))
    for (front, server), times in found.items():
        p95 = quantiles(times, n=20)[-1]
        us = {"median_us": median(times), "p95_us": p95, "mean_us": fmean(times)}
        row = {"front": front, "server": server}
        print(json.dumps(row | {name: round(value, 1) for name, value in us.items()}), flush=True)


if __name__ == "__main__":
    main()
