"""Fixtures for all tests: none may leave anything behind."""

import base64
import gc
import getpass
import hmac
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from email.utils import formatdate
from pathlib import Path
from typing import Any
from zlib import crc32

import psutil
import pytest
from hypothesis import settings

sys.path.append(str(Path(__file__).parent / "forking"))

from forked_processes import ForkServer, MasterServer, RankServer, free_ports

# Neither other work on the machine nor chance may decide a test; `make test-all` looks for new
# examples, and for more of them, by --hypothesis-profile=random.
settings.register_profile("random", deadline=None)
settings.register_profile("paceline", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("paceline")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has it ignored in what it runs in the background; tests press Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)

_WATCHED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)
# Set by pytest and by libraries at their import, not by tests.
_IGNORED_VARIABLES = ("PYTEST_", "KMP_", "TORCH", "PYTORCH_", "TRITON_", "RAY_CLIENT_MODE")
# The last two are of tqdm, which torch uses where it is installed, and of W&B.
_IGNORED_THREADS = (
    "AnyIO worker thread",
    "paceline-reader",
    "paceline-run-heartbeats",
    "paceline-slow-reader",
    "pytest_timeout",
    "tqdm_monitor",
    "Otel",
)
_JOB_VARIABLES = ("PACELINE_", "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "TORCHELASTIC")
_NUM_TURNS = 10
_LEAN_RAY = {
    # Workers that Ray starts before somebody asks would be of another environment than ours.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Beside other work on the machine, nicer workers would hardly get any time.
    "RAY_worker_niceness": "0",
}
# Files and directories that take longest, then directories of long files. They come first: at the
# end, all cores shall have something to do.
_LONGEST = (
    *("examples/test_blocks.py", "master/test_unmanaged.py", "examples/test_starters.py"),
    *("cli/test_master_commands.py", "storage/test_s3.py", "system/test_nodes.py"),
    *("system/test_group_faults.py", "data/test_remote.py", "system/test_store_outage.py"),
    *("launch/test_nodes.py", "system/test_node_checkpoints.py", "system/test_fault_matrix.py"),
    *("system/test_joined_storage.py", "system/test_repeated_failures.py"),
    *("declarative/test_documented_overrides.py", "train/test_ray.py", "workers/test_ray.py"),
    *("pytorch/test_launch.py", "webui/test_faults.py", "webui/test_tabs.py"),
    *("webui/test_live.py", "webui/test_actions.py", "system/test_group_checkpoints.py"),
    *("exactness/test_matrix.py", "system/test_plugins.py", "benchmarks/test_gpu.py"),
    *("client/test_client.py", "master/starters", "docs"),
    *("train", "webui", "workers", "exactness", "creators", "system", "pytorch", "core", "cli"),
    *("launch", "runner", "examples", "benchmarks", "faults", "packaging"),
    *("clients", "declarative", "seeds", "testing", "storage", "notebooks", "search"),
    *("test_quick_start.py", "test_named_paths.py", "test_imports.py", "test_extras.py"),
)


def pytest_collection_finish() -> None:
    """Have no later look for garbage go through what was collected, which stays."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests whose turn it is not, and begin with what takes longest."""
    if turn := os.environ.get("PACELINE_TEST_TURN"):

        def is_left_out(item: pytest.Item) -> bool:
            # A file has its turn as a whole: its tests share what is slow to start.
            file = crc32(item.nodeid.partition("::")[0].encode())
            return "long" in item.keywords and (file - int(turn)) % _NUM_TURNS != 0

        config.hook.pytest_deselected(items=[item for item in items if is_left_out(item)])
        items[:] = [item for item in items if not is_left_out(item)]
    place = {name: index for index, name in enumerate(_LONGEST)}
    tests = config.rootpath / "tests"

    def key(item: pytest.Item) -> int:
        if not item.path.is_relative_to(tests):
            return len(place)
        path = item.path.relative_to(tests)
        names = path.as_posix(), path.parent.as_posix(), path.parts[0]
        return min(place.get(name, len(place)) for name in names)

    items.sort(key=key)


@pytest.fixture(autouse=True)
def no_leaked_environment_variables() -> Iterator[None]:
    """Fail a test that leaves environment variables changed."""
    before = dict(os.environ)
    yield
    names = before.keys() | os.environ.keys()
    leaked = sorted(
        name
        for name in names
        if before.get(name) != os.environ.get(name) and not name.startswith(_IGNORED_VARIABLES)
    )
    for name in leaked:
        os.environ.pop(name, None)
        if name in before:
            os.environ[name] = before[name]
    assert not leaked, f"left environment variables changed: {leaked}"


@pytest.fixture(autouse=True)
def no_leaked_signal_handlers() -> Iterator[None]:
    """Fail a test that leaves signal handlers changed."""
    before = {number: signal.getsignal(number) for number in _WATCHED_SIGNALS}
    yield
    leaked = [number for number in before if signal.getsignal(number) != before[number]]
    for number in leaked:
        signal.signal(number, before[number])
    assert not leaked, f"left signal handlers changed: {leaked}"


@pytest.fixture(autouse=True)
def no_leaked_threads() -> Iterator[None]:
    """Fail a test that leaves threads running for more than a minute."""
    before = set(threading.enumerate())
    yield
    deadline = time.monotonic() + 60
    while leaked := [
        thread
        for thread in threading.enumerate()
        if thread not in before and not thread.name.startswith(_IGNORED_THREADS)
    ]:
        assert time.monotonic() < deadline, f"left threads running: {leaked}"
        time.sleep(0.01)


@pytest.fixture
def often_switching_threads() -> Iterator[None]:
    """Have threads take turns as often as can be."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def clean_environment() -> dict[str, str]:
    """Return the environment without anything that a job would set."""
    return _LEAN_RAY | {
        name: value for name, value in os.environ.items() if not name.startswith(_JOB_VARIABLES)
    }


@pytest.fixture
def run_python(
    tmp_path: Path, clean_environment: dict[str, str]
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Return a function that runs Python code in a fresh process, in `tmp_path`."""

    def run(
        code: str, *arguments: str, name: str = "script.py", **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        script = tmp_path / name
        script.write_text(code)
        return subprocess.run(
            [sys.executable, str(script), *arguments],
            cwd=tmp_path,
            env={**clean_environment, **environment},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )

    return run


@pytest.fixture
def run_with_torch(
    tmp_path: Path, clean_environment: dict[str, str], torch_ranks: RankServer
) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Return a function like that of `run_python`, whose processes have torch loaded.

    They are forked, so that each test saves a second; they have one thread.
    """

    def run(
        code: str, *arguments: str, name: str = "script.py", **environment: str
    ) -> "subprocess.CompletedProcess[str]":
        script = tmp_path / name
        script.write_text(code)
        return torch_ranks.run_to_end(
            str(script),
            *arguments,
            directory=tmp_path,
            environment={**clean_environment, "OMP_NUM_THREADS": "1", **environment},
        )

    return run


@pytest.fixture(scope="session")
def fork_server_class() -> type[ForkServer]:
    """Return the class of a process that forks others."""
    return ForkServer


@pytest.fixture(scope="session")
def torch_ranks() -> Iterator[RankServer]:
    """Return a server of ranks that have torch and `paceline.pytorch` loaded."""
    server = RankServer("torch.distributed.fsdp", "torch.distributed.tensor", "paceline.pytorch")
    yield server
    server.close()


@pytest.fixture(scope="session")
def master_server() -> Iterator[MasterServer]:
    """Return a server of masters, so that each has loaded what it needs."""
    server = MasterServer(
        "paceline.cli._app", "paceline.client", "httpcore2", "paceline._cluster.master.server"
    )
    yield server
    server.close()


# What most commands load, and their libraries on the first use.
_OF_COMMANDS = (
    *("paceline.cli._app", "paceline.cli._experiment_follower", "paceline.cli._console_output"),
    *(
        "paceline.client",
        "paceline.config",
        "paceline._training",
        "paceline._cluster.messages.experiment_models",
    ),
    *("encodings.idna", "h11", "httpcore2", "httpx2", "pathspec"),
    *("pydantic.type_adapter", "rich.table", "typer._adapters", "yaml"),
)


@pytest.fixture(scope="session")
def command_server() -> Iterator[ForkServer]:
    """Return a server of commands, so that each has loaded what most of them need."""
    server = ForkServer(*_OF_COMMANDS)
    yield server
    server.close()


@pytest.fixture
def make_small_disk(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts a file system in memory, with options of its own."""
    with ExitStack() as mounts:

        def make(**options: object) -> Path:
            if os.geteuid() != 0:
                pytest.skip("NOT TESTED: a full disk needs root to mount a small file system")
            disk = tmp_path / "small_disk"
            disk.mkdir()
            given = ",".join(f"{name}={value}" for name, value in options.items())
            command = ["mount", "-t", "tmpfs", "-o", given, "tmpfs", str(disk)]
            if subprocess.run(command, check=False).returncode != 0:
                pytest.skip("NOT TESTED: a full disk needs the right to mount a tmpfs")
            mounts.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
            return disk

        yield make


@pytest.fixture
def small_disk(make_small_disk: Callable[..., Path]) -> Path:
    """Return a mounted file system of one megabyte."""
    return make_small_disk(size="1m")


@pytest.fixture
def fill_disk() -> Callable[..., None]:
    """Return a function that fills a file system but for some bytes."""

    def fill(disk: Path, *, leave_bytes: int = 0) -> None:
        filler = disk / "filler"
        with filler.open("ab", buffering=0) as file:
            size = 1 << 16
            while size:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    size //= 2
        if leave_bytes:
            os.truncate(filler, filler.stat().st_size - leave_bytes)

    return fill


def _patient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that does the same, but goes on trying for minutes."""

    def call(*arguments: Any) -> Any:
        deadline = time.monotonic() + 75
        while True:
            try:
                return function(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    return call


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[Any]:
    """Return a Ray cluster of two nodes on the loopback address, to which this process belongs.

    The head node and the other one have two CPUs each, and the other one has a "memory_bank".
    """
    variables = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": "a-token-for-tests-alone-and-nothing-else",
        # What Ray calls so is whether it uses other addresses than that of the loopback interface.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        **_LEAN_RAY,
    }
    # Nodes that are made in this process set one of their own.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            ray = pytest.importorskip("ray", reason="NOT TESTED: Ray is not installed")
            from ray._private import services
            from ray._raylet import Config
            from ray.cluster_utils import Cluster

            # A test before may have loaded Ray, which reads the variables once.
            Config.initialize("")
            # Ray itself gives a node 30 s to start in, which a busy machine may exceed.
            patch.setattr(services, "get_node", _patient(services.get_node))
            # A node gives its agents 30 s to start in, and ends if they are late.
            for is_last in (False, False, True):
                cluster = Cluster()
                try:
                    # Nobody reads what a log monitor would send to the driver.
                    lean: dict[str, Any] = {"num_cpus": 2, "include_log_monitor": False}
                    cluster.add_node(**lean, include_dashboard=False)
                    cluster.add_node(**lean, resources={"memory_bank": 2})
                    break
                except Exception:
                    cluster.shutdown()
                    if is_last:
                        raise
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
            yield cluster
            ray.shutdown()
            cluster.shutdown()
    finally:
        signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def ray_tune(ray_cluster: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Return Ray Tune, whose trials take functions of the test module without importing it."""
    tune = pytest.importorskip("ray.tune", reason="NOT TESTED: needs pip install 'ray[tune]'")
    import ray

    # Tune leaves its handlers, and a library of it a variable.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    ray.cloudpickle.register_pickle_by_value(request.module)
    yield tune
    ray.cloudpickle.unregister_pickle_by_value(request.module)
    os.environ.pop("CRC32C_SW_MODE", None)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def drain_node(ray_cluster: Any) -> Callable[..., None]:
    """Return a function that tells Ray that a node will be taken away, by default in ten minutes.

    Ray itself takes away none.
    """

    def drain(node_id: str, deadline_s: float = 600) -> None:
        from ray._raylet import GcsClient
        from ray.core.generated import autoscaler_pb2

        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int(1000 * (time.time() + deadline_s))
        client = GcsClient(address=ray_cluster.address)
        accepted, why = client.drain_node(node_id, reason, "spot", deadline_ms)
        assert accepted, why

    return drain


# A node of a Ray cluster, as a process of its own.
_NODE = """
import sys
from ray._private.node import Node
from ray._private.parameter import RayParams

params = RayParams(
    gcs_address=sys.argv[1],
    num_cpus=int(sys.argv[2]),
    resources={"elsewhere": int(sys.argv[2])},
    object_store_memory=150 * 1024**2,
    min_worker_port=0,
    max_worker_port=0,
    node_manager_port=0,
    include_log_monitor=False,
)
node = Node(params, head=False, shutdown_at_exit=True, spawn_reaper=True)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def nodes_with_own_disks(ray_cluster: Any, tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that adds nodes to the cluster, which do not see a directory.

    Each has an empty disk of its own there, and one or more of the resource "elsewhere". The
    function returns the directory, which this process and its other nodes see.
    """
    directory = tmp_path / "project"
    directory.mkdir()
    mount = f"mount -t tmpfs tmpfs {directory}"

    def add(num_nodes: int, num_seats: int = 1) -> Path:
        if subprocess.run(["unshare", "--mount", "sh", "-c", mount], check=False).returncode != 0:
            pytest.skip("NOT TESTED: a node with files of its own needs the right to mount a tmpfs")
        for _ in range(num_nodes):
            _start_node(stack, mount, ray_cluster.address, num_seats)
        return directory

    with ExitStack() as stack:
        yield add


def _start_node(stack: ExitStack, mount: str, address: str, num_seats: int) -> None:
    start = [sys.executable, "-c", _NODE, address, str(num_seats)]
    node = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f'{mount} && cd / && exec "$@"', "sh", *start],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert node.stdin is not None
    assert node.stdout is not None
    stack.callback(node.wait, 60)
    stack.callback(node.stdout.close)
    stack.callback(node.stdin.close)
    assert node.stdout.readline() == b"ready\n"


_S3_SERVER = """
import sys
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """Return the URL of a server that speaks S3's protocol, with the bucket "checkpoints"."""
    yield from _bucket_server(_S3_SERVER)


def _bucket_server(program: str) -> Iterator[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    url = f"http://127.0.0.1:{int(process.stdout.readline())}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/checkpoints", method="PUT")).close()
    yield url
    process.communicate()


@pytest.fixture(scope="session")
def google_server() -> Iterator[str]:
    """Return the URL of a stand-in for Google Cloud Storage, with the bucket "checkpoints"."""
    yield from _bucket_server(_GOOGLE_SERVER)


@pytest.fixture
def google(google_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty place in a bucket, for this process and those it starts."""
    account = {"client_email": "", "private_key": "", "private_key_id": ""}
    key = json.dumps({"gcs_base_url": google_server, "disable_oauth": True} | account)
    monkeypatch.setenv("GOOGLE_BASE_URL", google_server)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", key)
    return f"gs://checkpoints/{uuid.uuid4()}"


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty place in a bucket, for this process and those it starts."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return f"s3://checkpoints/{uuid.uuid4()}"


# Google's XML API is near to S3's: this turns its requests into those that moto takes. A delete of
# what is not there is an error of Google's.
_GOOGLE_SERVER = """
import sys, threading
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
from werkzeug.test import run_wsgi_app

class Quiet(WSGIRequestHandler):
    def log(self, *arguments):
        pass

s3 = DomainDispatcherApplication(create_backend_app)
SIGNED = "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request"

def google(environ, start_response):
    environ["HTTP_AUTHORIZATION"] = SIGNED
    if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":
        environ["HTTP_IF_NONE_MATCH"] = "*"
    if environ["REQUEST_METHOD"] == "DELETE" and not environ["QUERY_STRING"]:
        answer, status, headers = run_wsgi_app(s3, {**environ, "REQUEST_METHOD": "GET"})
        if status.startswith("404"):
            start_response(status, list(headers))
            return answer
    return s3(environ, start_response)

server = make_server("127.0.0.1", 0, google, threaded=True, request_handler=Quiet)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.port, flush=True)
sys.stdin.read()
server.shutdown()
"""


# What every Azurite has.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)


@pytest.fixture(scope="session")
def azure_server() -> Iterator[str]:
    """Return the URL of an Azurite's account, with the container "checkpoints"."""
    program = shutil.which(os.environ.get("AZURITE", "azurite-blob"))
    if program is None:
        pytest.skip("NOT TESTED: Azurite is not installed. Hint: make test-stores")
    port = free_ports(1)
    process = subprocess.Popen(
        [program, "--blobHost=127.0.0.1", f"--blobPort={port}", "--inMemoryPersistence",
         "--skipApiVersionCheck", "--disableTelemetry", "--silent"],
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        _make_container(port)
        yield f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
    finally:
        process.terminate()
        process.wait(60)


def _make_container(port: int) -> None:
    """Send the one request that the client under test has no call for, as soon as it is taken."""
    name, version = f"{AZURE_ACCOUNT}/checkpoints", "2021-08-06"
    date = formatdate(usegmt=True)
    text = "PUT" + 12 * "\n" + f"x-ms-date:{date}\nx-ms-version:{version}\n"
    text += f"/{AZURE_ACCOUNT}/{name}\nrestype:container"
    digest = hmac.digest(base64.b64decode(AZURE_KEY), text.encode(), "sha256")
    headers = {
        "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}",
        "x-ms-date": date,
        "x-ms-version": version,
        "Content-Length": "0",
    }
    url = f"http://127.0.0.1:{port}/{name}?restype=container"
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(
                urllib.request.Request(url, method="PUT", headers=headers)
            ).close()
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        else:
            return


@pytest.fixture
def azure(azure_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of an empty place in a container, for this process and those it starts."""
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure_server)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", AZURE_ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", AZURE_KEY)
    return f"az://checkpoints/{uuid.uuid4()}"


@pytest.fixture(scope="session")
def oidc_issuer() -> Iterator[str]:
    """Return the address of a certified provider of OpenID Connect, see `oidc_provider.mjs`."""
    tests = Path(__file__).parent
    folder = tests.parent / "build" / "oidc" / "node_modules" / "oidc-provider"
    node = shutil.which("node")
    if node is None or not folder.is_dir():
        pytest.skip("NOT TESTED: no provider of OpenID Connect is installed. Hint: make oidc")
    process = subprocess.Popen(
        [node, tests / "master" / "oidc_provider.mjs", folder, str(free_ports(1))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    issuer = process.stdout.readline().strip()
    assert issuer, "The provider did not start."
    yield issuer
    process.communicate()


@pytest.fixture(scope="module")
def two_workers() -> Iterator[Any]:
    """Return a trainer of two workers, which stay from test to test."""
    from paceline import train

    before = set(threading.enumerate())
    with train.Trainer(num_workers=2, cpus_per_worker=1) as trainer:
        trainer.start()
        yield trainer
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) - before == set()


@pytest.fixture
def dropout_trial() -> str:
    """Return the source of `Trial`, whose result depends on random numbers.

    It calls a function `before_batch(distributed, batch_idx)` of the script.
    """
    return """
import torch
from torch import nn
from paceline import pytorch


class Trial(pytorch.PyTorchTrial):
    dropout = 0.2

    def __init__(self, context):
        self.context = context
        self.model = context.wrap_model(nn.Sequential(nn.Dropout(self.dropout), nn.Linear(8, 2)))
        self.optimizer = context.wrap_optimizer(torch.optim.SGD(self.model.parameters(), 0.1))

    def train_batch(self, batch, epoch_idx, batch_idx):
        before_batch(self.context.distributed, batch_idx)
        x, y = batch
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.context.backward(loss)
        self.context.step_optimizer(self.optimizer)
        return {"loss": loss}

    def evaluate_batch(self, batch):
        x, y = batch
        return {"validation_loss": nn.functional.cross_entropy(self.model(x), y)}

    def build_training_data_loader(self):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
        size = self.context.get_per_slot_batch_size()
        return pytorch.DataLoader(data, batch_size=size, shuffle=True)

    build_validation_data_loader = build_training_data_loader
"""


@pytest.fixture
def free_port() -> int:
    """Return a port that is free, and that the system gives to nobody by itself."""
    return free_ports(1)


def _needs(*programs: str, package: str) -> None:
    missing = [name for name in programs if shutil.which(name) is None]
    if missing:
        pytest.skip(f"NOT TESTED: needs {', '.join(missing)}. Hint: apt-get install {package}")


Start = Callable[..., "subprocess.CompletedProcess[str]"]


def _run(
    command: list[str], directory: Path, **variables: str
) -> "subprocess.CompletedProcess[str]":
    launchers = ("PACELINE_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "OMPI_", "PMI", "SLURM_")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    return subprocess.run(
        [*command, sys.executable, "script.py"],
        cwd=directory,
        env=clean | {"OMP_NUM_THREADS": "1"} | variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


# ---- Slurm on one machine: a controller and two node daemons -------------------------------------

SLURM_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/controller.pid
SlurmdPidFile={directory}/%n.pid
KillWait=1
FirstJobId={first_job}
NodeName=127.0.0.[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Start Slurm with two nodes, and return the variables that lead to it."""
    daemons = ("munged", "slurmctld", "slurmd")
    _needs("srun", *daemons, package="slurm-wlm munge")
    directory = tmp_path_factory.mktemp("slurm")
    (directory / "state").mkdir()
    (directory / "key").write_bytes(os.urandom(128))
    (directory / "key").chmod(0o600)
    first = free_ports(3)
    config = SLURM_CONFIG.format(
        host=socket.gethostname().partition(".")[0],
        user=getpass.getuser(),
        directory=directory,
        port=first,
        first=first + 1,
        last=first + 2,
        # Ranks meet at a port that follows from the job; other tests have a Slurm at this time too.
        first_job=first,
    )
    (directory / "slurm.conf").write_text(config)
    variables = {"SLURM_CONF": str(directory / "slurm.conf")}
    authentication = [
        f"--{name}={directory / file}"
        for name, file in (
            ("key-file", "key"),
            ("socket", "munge.socket"),
            ("pid-file", "munge.pid"),
            ("seed-file", "munge.seed"),
        )
    ]
    commands = [
        ["munged", "--force", "--foreground", *authentication],
        ["slurmctld", "-D"],
        *(["slurmd", "-D", "-N", f"127.0.0.{node}"] for node in (1, 2)),
    ]
    started = []
    with (directory / "log").open("w") as log:
        try:
            for command in commands:
                path = shutil.which(command[0])
                assert path is not None
                environment = {**os.environ, **variables}
                started.append(
                    subprocess.Popen([path, *command[1:]], env=environment, stdout=log, stderr=log)
                )
                if command[0] == "munged":
                    _await(lambda: (directory / "munge.socket").exists(), directory)
            _await(lambda: _are_nodes_idle(variables), directory)
            yield variables
        finally:
            _end(started, variables["SLURM_CONF"])


def _are_nodes_idle(variables: dict[str, str]) -> bool:
    command = ["sinfo", "--noheader", "--format=%T %D"]
    result = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() == "idle 2"


def _await(condition: Callable[[], bool], directory: Path) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, (directory / "log").read_text()
        time.sleep(0.1)


def _end(daemons: list["subprocess.Popen[bytes]"], config: str) -> None:
    for process in reversed(daemons):
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    # Each step has a process that outlives the daemon of its node.
    for step in psutil.process_iter(["name"]):
        with suppress(psutil.Error):
            if step.info["name"] == "slurmstepd" and step.environ().get("SLURM_CONF") == config:
                step.kill()


# ---- scripts under a launcher --------------------------------------------------------------------


@pytest.fixture
def run_command(tmp_path: Path) -> Start:
    """Return a function that runs script.py by a command, as if no launcher had been there."""
    return lambda command, **variables: _run(command, tmp_path, **variables)


@pytest.fixture
def srun(slurm: dict[str, str], tmp_path: Path) -> Start:
    """Run a script as two tasks, each on a node of its own."""
    command = ["srun", "-N2", "-n2", "--kill-on-bad-exit=1"]
    return lambda **variables: _run(command, tmp_path, **slurm, **variables)


@pytest.fixture
def open_mpi(tmp_path: Path) -> Start:
    """Run a script as two processes of Open MPI."""
    _needs("mpirun.openmpi", package="openmpi-bin")
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun.openmpi", "--oversubscribe", "-np", "2"]
    return lambda **variables: _run(command, tmp_path, **root, **variables)


@pytest.fixture
def mpich(tmp_path: Path) -> Start:
    """Run a script as two processes of MPICH."""
    _needs("mpirun.mpich", package="mpich")
    return lambda **variables: _run(["mpirun.mpich", "-np", "2"], tmp_path, **variables)


@pytest.fixture
def paceline(tmp_path: Path) -> Start:
    """Run a script as two workers of Paceline's launcher."""
    options = ("-m", "paceline.launch.torch_distributed", "--nproc-per-node=2", "--")
    return lambda **variables: _run([sys.executable, *options], tmp_path, **variables)


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Start:
    """Run a script as two ranks of the launcher that the test names."""
    chosen: Start = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """Return a function that waits for a condition."""

    def wait(condition: Callable[[], object], timeout_s: float = 240.0) -> None:
        deadline, pause_s = time.monotonic() + timeout_s, 0.02
        while not condition():
            assert time.monotonic() < deadline, f"{condition} did not hold within {timeout_s} s"
            time.sleep(pause_s)
            # Each look asks a master, which takes milliseconds.
            pause_s = min(1.5 * pause_s, 0.3)

    return wait
