"""Two warm workers: what only several of them show. They are shared by most tests here."""

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from paceline import core, train
from paceline._training.workers.worker_failures import WorkerFailedError
from paceline.data import DataNotFoundError, Dataset
from paceline.data._dataset import Fold

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture
def trainer(two_workers: train.Trainer) -> train.Trainer:
    """Return a trainer of two workers, which stay from test to test."""
    return two_workers


@pytest.fixture(autouse=True)
def no_leaked_threads() -> None:
    """Leave the threads to the end, as workers may be replaced within a test."""


X = torch.arange(26, dtype=torch.float64).view(13, 2) / 10
Y = X.sum(1, keepdim=True) - 1


def fit(config: dict[str, Any]) -> Any:
    """Train a linear model on 13 samples, 3 a shard; the last batch of rank 1 has none."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    model = train.accelerate(model, strategy=config.get("strategy", "flat"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data: Any = TensorDataset(X, Y)
    if config.get("is_stream"):
        data = Stream()
    loader = train.prepare_data_loader(DataLoader(data, batch_size=config["batch_size"]))
    seen, norms = [], []
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            seen.append(len(x))
    with torch.no_grad():
        num_evaluated = sum(len(x) for x, _ in loader)
    return model, seen, norms, num_evaluated


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(X, Y, strict=True)))


@pytest.mark.parametrize("strategy", ["flat", "ddp"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_two_workers_train_like_one_on_the_whole_batch(
    trainer: train.Trainer, strategy: str, is_stream: bool
) -> None:
    config = {"batch_size": 3, "strategy": strategy, "is_stream": is_stream}
    first, second = trainer.run(fit, config)
    ((expected, _, norms, _),) = train.Trainer(num_workers=0).run(fit, {"batch_size": 6})
    # The last batch is one sample, which stands in on rank 1 without counting.
    assert first[1] == [3, 3, 1] * 3
    assert second[1] == [3, 3, 1] * 3
    assert (first[3], second[3]) == (7, 6)
    for model, _, found_norms, _ in (first, second):
        assert type(model) is nn.Linear
        torch.testing.assert_close(model.weight, expected.weight, rtol=0, atol=1e-12)
        assert found_norms == pytest.approx(norms, rel=1e-10)
    assert torch.equal(first[0].weight, second[0].weight)


def has_train(config: dict[str, Any]) -> bool:
    return "paceline.train" in sys.modules


def test_workers_have_loaded_what_train_functions_use(work_here: Path) -> None:
    """Each worker that replaces a lost one would load it before its first batch, for 50 ms."""
    with train.Trainer(1) as trainer:
        assert trainer.run(has_train) == [True]


def test_places_and_values_come_in_rank_order(trainer: train.Trainer) -> None:
    def rank_info() -> Any:
        print("hello from", train.world_rank())
        return (
            train.world_rank(),
            train.local_rank(),
            train.node_rank(),
            train.world_size(),
            str(train.get_device()),
            torch.get_num_threads(),
        )

    values = trainer.run(rank_info)
    assert values == [(0, 0, 0, 2, "cpu", 1), (1, 1, 0, 2, "cpu", 1)]
    table = str(trainer)
    assert re.search(r"Trainer: 2 worker\(s\), running on 1 node\(s\), backend gloo", table)
    assert re.search(rf"\n1     {os.uname().nodename} +\d+ +cpu +1 +auto$", table)
    assert (values.run_dir / "logs" / "rank-1.log").read_text() == "hello from 1\n"


def test_reports_of_each_rank_arrive_while_the_function_goes_on(trainer: train.Trainer) -> None:
    class Seen(train.TrainingCallback):
        def __init__(self) -> None:
            self.reports: list[Any] = []

        def handle_result(self, report: train.Report) -> None:
            self.reports.append((report.rank, report.number, report["x"]))
            # The ranks wait for this file, so that nothing can arrive at the end only.
            Path(f"seen-{report.rank}-{report.number}").touch()

    def function() -> None:
        for number in range(1, 4 - train.world_rank()):
            train.report(x=number * 10)
            path = Path(f"seen-{train.world_rank()}-{number}")
            while not path.exists():
                time.sleep(0.001)

    seen = Seen()
    results = trainer.run(function, callbacks=[seen])
    assert sorted(seen.reports) == [(0, 1, 10), (0, 2, 20), (0, 3, 30), (1, 1, 10), (1, 2, 20)]
    assert [r["x"] for r in results.metrics_of(1)] == [10, 20]
    assert sorted(results.report_lags_s) == [0, 1]


def test_all_that_was_printed_is_there_when_a_run_or_an_error_returns(
    trainer: train.Trainer, work_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nobody takes the lines slowly but for a busy machine.
    monkeypatch.setattr("paceline.train._run_driver._DRAIN_S", 60.0)

    def function(config: dict[str, Any]) -> None:
        for number in range(5000):
            print("line", number)
        print("no end of line", end="")
        if config and train.world_rank() == 0:
            raise ZeroDivisionError

    results = trainer.run(function)
    for rank in range(2):
        lines = (results.run_dir / "logs" / f"rank-{rank}.log").read_text().splitlines()
        assert lines[:5000] == [f"line {number}" for number in range(5000)]
    with pytest.raises(ZeroDivisionError):
        trainer.run(function, {"fails": True})
    (run_dir,) = set(work_here.glob("paceline_runs/*")) - {results.run_dir}
    lines = (run_dir / "logs" / "rank-0.log").read_text().splitlines()
    assert "line 4999" in lines


def test_each_rank_tells_its_own_throughput(trainer: train.Trainer) -> None:
    def function() -> None:
        for _ in train.prepare_data_loader(DataLoader(TensorDataset(X[:12]), batch_size=3)):
            train.report(seen=True)

    results = trainer.run(function)
    for rank in range(2):
        assert results.timings_of(rank)
        for timings in results.timings_of(rank):
            per_batch = timings["samples_per_second"] / timings["batches_per_second"]
            assert per_batch == pytest.approx(3)


def test_a_function_leaves_the_working_directory_to_the_next_one(
    trainer: train.Trainer, work_here: Path
) -> None:
    assert trainer.run(lambda: os.chdir("/") or os.getcwd()) == ["/"] * 2
    assert trainer.run(os.getcwd) == [str(work_here)] * 2


def test_tuples_of_all_ranks_are_not_taken_for_one(
    trainer: train.Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    model, result = trainer.run(lambda: ("model", train.world_rank()))
    assert (model, result) == (("model", 0), ("model", 1))
    assert "Hint: `trainer.run(...)[0]` is the tuple of rank 0." in caplog.text
    caplog.clear()
    trainer.run(lambda: (1, 2, 3))
    assert "one value per rank" not in caplog.text


def test_a_checkpoint_in_a_report_is_named() -> None:
    with pytest.raises(TypeError, match=r"`checkpoint` \(dict\)\. Hint: `train.save_check"):
        train.report({"loss": 1.0}, checkpoint={"step": 3})
    train.report({"loss": 1.0}, checkpoint=3)


def test_unequal_numbers_of_reports_are_no_failure(
    trainer: train.Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    def function() -> None:
        for _ in range(1 + train.world_rank()):
            train.report(x=1)

    trainer.run(function)
    assert "The ranks have reported unequally often: rank 0 1, rank 1 2." in caplog.text
    caplog.clear()
    trainer.run(lambda config: train.world_rank() == 0 and train.report(x=1))
    assert "unequally" not in caplog.text


def test_reports_can_be_taken_one_by_one(trainer: train.Trainer) -> None:
    def function(config: dict[str, Any]) -> int:
        for number in range(config["count"]):
            train.report(number=number)
        return train.world_rank()

    iterator = trainer.run_generator(function, {"count": 3})
    assert not iterator.is_finished()
    assert next(iterator) == {"number": 0}
    with pytest.raises(RuntimeError, match="A run must be finished before the next one begins"):
        trainer.run(function, {"count": 1})
    assert list(iterator) == [{"number": 1}, {"number": 2}]
    assert iterator.is_finished()
    assert iterator.get_returns() == [0, 1]
    every = trainer.run_iterator(function, {"count": 2}, ranks=None)
    assert sorted((r.rank, r["number"]) for r in every) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert trainer.run_iterator(function, {"count": 2}).get_results() == [0, 1]


def test_data_set_is_shared_among_the_workers(
    trainer: train.Trainer, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> Any:
        split = train.get_dataset("numbers").get_split()
        loader = split.to_torch(batch_size=2, shuffle=True)
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
        stream = train.get_dataset("made").get_shard().to_torch(batch_size=2)
        shard = train.get_dataset_shard("numbers")
        return list(shard), len(shard), epochs, [batch.tolist() for batch in stream]

    data = {"numbers": list(range(10)), "made": make_stream}
    first, second = trainer.run(function, dataset=data)
    assert first[:2] == ([0, 2, 4, 6, 8], 5)
    assert second[:2] == ([1, 3, 5, 7, 9], 5)
    for epoch in range(2):
        batches = [*first[2][epoch], *second[2][epoch]]
        assert sorted(number for batch in batches for number in batch) == list(range(10))
    assert first[2][0] != first[2][1]
    assert (first[3], second[3]) == ([[0, 1], [4]], [[2, 3]])
    assert capfd.readouterr().err.count("each of the 2 workers reads all of it") == 1


def make_stream() -> Any:
    return iter(range(5))


def test_several_data_sets_are_given_by_name_or_number(trainer: train.Trainer) -> None:
    def function(config: dict[str, Any]) -> Any:
        if config.get("name") is not None:
            return [len(train.get_dataset(config["name"])), len(train.get_datasets())]
        return {
            name: sorted(x for batch in each.to_torch(3) for x in batch.tolist())
            for name, each in train.get_datasets().items()
        }

    few, more = Dataset(range(6)), Dataset(range(8))
    assert trainer.run(function, {"name": 1}, dataset=(few, more))[0] == [8, 2]
    assert trainer.run(function, {"name": "validation"}, dataset=more.to_cv(4)[0])[0] == [2, 2]
    makers = {"a": lambda config: range(config["size"]), "b": lambda: list(range(2))}
    first, second = trainer.run(function, {"size": 4}, dataset=lambda config: makers)
    assert sorted(first["a"] + second["a"]) == [0, 1, 2, 3]
    assert sorted(first["b"] + second["b"]) == [0, 1]
    Path("rows.csv").write_text("a\n1\n2\n3\n")
    few_rows = trainer.run(
        lambda: [row["a"] for row in train.get_dataset("rows")], dataset={"rows": "rows.csv"}
    )
    assert few_rows[0] == [1, 2, 3]
    with pytest.raises(DataNotFoundError, match="no-such"):
        trainer.run(function, dataset="no-such/*.csv")
    # A tuple of other things is a data set of its own.
    assert trainer.run(lambda: list(train.get_dataset_shard()), dataset=(1, 2, 3)) == [[1, 3], [2]]

    for wrong, text in (
        (b"s3://bucket/data", "`dataset` must be a data set, a path or a URL, but got bytes"),
        ((few, Dataset([])), r"must have samples, but `dataset\[1\]` has none"),
        ([Fold(few, Dataset([]))], r"`dataset\[0\].validation` has none"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            trainer.run(function, dataset=wrong)
    with pytest.raises(ValueError, match=r"`name` must say .* but got None for \[0, 1\]"):
        trainer.run(lambda: train.get_dataset(), dataset=(few, more))
    with pytest.raises(KeyError, match=r"no data set 2, only \[0, 1\]"):
        trainer.run(lambda: train.get_dataset(2), dataset=(few, more))


@pytest.mark.long
def test_models_that_users_wrap_stay_in_step(trainer: train.Trainer) -> None:
    def function() -> Any:
        model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
        loader = train.get_dataset_shard().to_torch(batch_size=2)
        for x in loader:
            model(x.float().unsqueeze(1)).sum().backward()
        return len(loader), model.module.weight.grad

    first, second = trainer.run(function, dataset=[0.0, 1.0, 2.0, 3.0, 4.0])
    assert first[0] == second[0] == 2
    assert torch.equal(first[1], second[1])


def test_distributed_sampler_is_replaced(trainer: train.Trainer) -> None:
    def function() -> Any:
        data = TensorDataset(torch.arange(8))
        loader = DataLoader(data, 2, sampler=DistributedSampler(data, shuffle=False))
        return [x.tolist() for (x,) in train.prepare_data_loader(loader)]

    assert trainer.run(function) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_checkpoint_holds_the_chiefs_state_and_what_each_rank_knows(
    trainer: train.Trainer,
) -> None:
    def function() -> Any:
        model = train.prepare_model(nn.BatchNorm1d(1))
        model(torch.tensor([[0.0], [1.0 + train.world_rank()]]))
        before = torch.rand(1)
        train.save_checkpoint(rank=train.world_rank(), model=model)
        return before, torch.rand(1)

    results = trainer.run(function)
    (checkpoint,) = results.checkpoints
    state = checkpoint.load()
    assert state["rank"] == 0
    assert state["model"]["running_mean"].item() == pytest.approx(0.05)
    files = sorted(path.name for path in checkpoint.path.glob("rank_*.json"))
    assert files == ["rank_0.json", "rank_1.json"]
    assert not torch.equal(results[0][1], results[1][1])

    def go_on() -> Any:
        model = nn.BatchNorm1d(1)
        model.load_state_dict(train.load_checkpoint()["model"])
        model = train.prepare_model(model)
        train.restore_random_state()
        return torch.rand(1), model.running_mean

    again = trainer.run(go_on, checkpoint=checkpoint)
    for rank in range(2):
        assert torch.equal(again[rank][0], results[rank][1])
    # Each rank has its own statistics again.
    assert [mean.item() for _, mean in again] == [pytest.approx(0.05), pytest.approx(0.1)]


def test_checkpoint_of_one_rank_only_names_the_others(trainer: train.Trainer) -> None:
    def function() -> int:
        if train.world_rank() == 0:
            train.save_checkpoint(1)
        return train.world_rank()

    with pytest.raises(
        train.IncompleteCheckpointError, match="equally often, but rank 1 has made 0 of 1 calls"
    ) as raised:
        trainer.run(function)
    assert raised.value.results == [0, 1]
    assert raised.value.results.checkpoints == []
    with pytest.raises(train.IncompleteCheckpointError, match="but rank 0 has made 0 of 1 calls"):
        trainer.run(lambda config: train.world_rank() == 1 and train.save_checkpoint(1))


def test_data_set_must_suffice_for_all_workers_and_be_given(trainer: train.Trainer) -> None:
    def function() -> None:
        train.get_dataset_shard().to_torch(batch_size=2)

    with pytest.raises(ValueError, match="one sample for each of the 2 workers, but has 1"):
        trainer.run(function, dataset=[1])
    with pytest.raises(RuntimeError, match="which|that got none"):
        trainer.run(function)


def test_errors_keep_their_type_and_tell_the_rank_and_leave_the_trainer_usable(
    trainer: train.Trainer,
) -> None:
    class Seen(train.TrainingCallback):
        error: BaseException | None = None

        def finish_training(self, error: BaseException | None) -> None:
            self.error = error

    def function() -> float:
        train.report(x=1)
        if train.world_rank() == 1:
            return 1 / 0
        time.sleep(100)
        return 0.0

    seen = Seen()
    with pytest.raises(ZeroDivisionError, match="division by zero") as raised:
        trainer.run(function, callbacks=[seen])
    assert "Rank 1 raised, the first of 2 to fail" in str(raised.value.__cause__)
    assert "return 1 / 0" in str(raised.value.__cause__)
    # The user's frame is the first one.
    assert str(raised.value.__cause__).count("  File ") == 1, f"{raised.value.__cause__}"
    assert seen.error is raised.value
    assert trainer.run(lambda config: 1) == [1, 1]


@pytest.mark.parametrize("first", [0, 1])
def test_a_run_of_which_any_rank_failed_is_no_completed_one(
    trainer: train.Trainer, first: int
) -> None:
    def function() -> None:
        train.report(x=1)
        if train.world_rank() == first:
            Path("reported").touch()
            return
        while not Path("reported").exists():
            time.sleep(0.01)
        # The other one has returned by then.
        time.sleep(0.5)
        raise ValueError("too late")

    with pytest.raises(ValueError, match="too late"):
        trainer.run(function)
    assert trainer.run_dir is not None
    summary = core.summarize_run(trainer.run_dir)
    assert (summary.state, summary.error) == (core.RunState.CRASHED, "ValueError: too late")
    assert (summary.num_attempts, summary.last_step) == (1, 1)


def test_a_run_that_could_not_begin_tells_why(trainer: train.Trainer) -> None:
    lock = threading.Lock()
    with pytest.raises(train.NotSendableError):
        trainer.run(lambda config: lock)
    newest = core.list_runs(Path("paceline_runs"))[-1]
    assert newest.state is core.RunState.CRASHED
    assert newest.error is not None
    assert newest.error.startswith("NotSendableError: ")


def test_values_that_cannot_travel_are_named(trainer: train.Trainer) -> None:
    lock = __import__("threading").Lock()
    with pytest.raises(train.NotSendableError, match="`.*lock` .* is not: cannot pickle"):
        trainer.run(lambda config: lock)
    with pytest.raises(train.NotSendableError, match=r"`args\[0\]\.config\['parts'\]\[0\]`"):
        trainer.run(lambda config: None, {"parts": [lock]})
    with pytest.raises(train.NotSendableError, match=r"What rank \d returned .*lock"):
        trainer.run(lambda config: __import__("threading").Lock())


def test_error_that_cannot_travel_is_no_lost_worker(trainer: train.Trainer) -> None:
    def function() -> None:
        made = threading.Lock()

        class Odd(Exception):
            lock = made

        with Path(f"calls-{train.world_rank()}").open("a") as file:
            file.write("x")
        raise Odd("of a kind")

    with pytest.raises(WorkerFailedError, match="cannot travel to the driver: Odd: of a kind"):
        trainer.run(function)
    # The error of one rank ends the other, which may not have begun by then.
    calls = [path.read_text() for path in Path().glob("calls-*")]
    assert set(calls) == {"x"}


def test_reports_before_an_error_are_taken_before_it(trainer: train.Trainer) -> None:
    def function() -> None:
        for number in range(5):
            train.report(number=number)
        # The error of one rank would end another one that has reported less.
        dist.barrier()
        raise ZeroDivisionError

    taken: list[Any] = []
    iterator = trainer.run_iterator(function)
    with pytest.raises(ZeroDivisionError):
        taken.extend(iterator)
    assert taken == [{"number": number} for number in range(5)]
    assert iterator.is_finished()
    with pytest.raises(ZeroDivisionError):
        iterator.get_results()


def test_a_run_that_its_driver_gives_up_is_preempted(work_here: Path) -> None:
    def function() -> None:
        train.report(number=1)
        if train.world_rank() != 1:
            time.sleep(600)

    with train.Trainer(num_workers=3) as trainer:
        iterator = trainer.run_iterator(function)
        assert next(iterator) == {"number": 1}
    (run,) = core.list_runs(work_here / "paceline_runs")
    assert (run.state, run.error) == (core.RunState.PREEMPTED, None)
    with pytest.raises(RuntimeError, match="given up before its end"):
        iterator.get_results()


def test_workers_whose_start_is_interrupted_are_ended(work_here: Path) -> None:
    hung = work_here / "hung"

    def hook() -> None:
        hung.touch()
        time.sleep(600)

    def interrupt() -> None:
        while not hung.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    with train.Trainer(num_workers=1) as trainer:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            trainer.start(initialization_hook=hook)
        thread.join()
        trainer.start()
        assert trainer.run(lambda config: train.world_size()) == [1]


def test_run_is_one_of_a_master(
    trainer: train.Trainer, work_here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with core.init(name="prepared") as context:
        path = context.run_dir
    monkeypatch.setenv("PACELINE_RUN_DIR", str(path))

    def function() -> None:
        train.report(x=1)

    # The run directory is the runner's, and each run adds a generation to the attempt.
    first, second = trainer.run(function), trainer.run(function)
    assert first.run_dir == second.run_dir == path
    reports = [*first.metrics, *second.metrics]
    assert [(r.generation, r.number) for r in reports] == [(1, 1), (2, 2)]
