"""Reports from several threads of a train function."""

import sys
import threading

import cloudpickle
import pytest

from paceline import train

# The workers cannot import the tests.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

NUM_THREADS, NUM_EACH, NUM_RUNS = 8, 25, 10
NUM_REPORTS = NUM_THREADS * NUM_EACH


def report_from_threads() -> None:
    """Report from several threads, which begin together and take turns as often as can be."""
    begin = threading.Barrier(NUM_THREADS)

    def report(name: int) -> None:
        begin.wait()
        for index in range(NUM_EACH):
            train.report(name=name, index=index)

    threads = [threading.Thread(target=report, args=(name,)) for name in range(NUM_THREADS)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


def check(reports: list[train.Report]) -> None:
    """Check that all reports are there, numbered in their order, each thread's own as well."""
    assert [report.number for report in reports] == list(range(1, NUM_REPORTS + 1))
    for name in range(NUM_THREADS):
        own = [report["index"] for report in reports if report["name"] == name]
        assert own == list(range(NUM_EACH))


class Heard(train.TrainingCallback):
    """What the driver was told, and by which threads."""

    def __init__(self) -> None:
        self.reports: list[train.Report] = []
        self.threads: set[int] = set()

    def handle_result(self, report: train.Report) -> None:
        self.reports.append(report)
        self.threads.add(threading.get_ident())


@pytest.mark.parametrize("num_workers", [0, 3])
def test_reports_of_threads_are_all_there_at_every_rank(num_workers: int) -> None:
    with train.Trainer(num_workers=num_workers) as trainer:
        for _ in range(NUM_RUNS):
            heard = Heard()
            results = trainer.run(report_from_threads, callbacks=[heard])
            for rank in range(max(1, num_workers)):
                check(results.metrics_of(rank))
                check([report for report in heard.reports if report.rank == rank])
            assert heard.threads == {threading.get_ident()}


def test_reports_of_threads_go_on_from_a_checkpoint() -> None:
    def function() -> None:
        train.load_checkpoint()
        report_from_threads()
        train.save_checkpoint(done=True)

    trainer = train.Trainer(num_workers=0)
    first = trainer.run(function)
    assert first.best_checkpoint is not None
    assert first.best_checkpoint.metadata["steps_completed"] == NUM_REPORTS
    second = trainer.run(function, checkpoint=first.best_checkpoint)
    numbers = [report.number for report in second.metrics]
    assert numbers == list(range(NUM_REPORTS + 1, 2 * NUM_REPORTS + 1))
