"""The launcher's own options."""

import pytest

from paceline.launch._launcher_arguments import LaunchArgumentError, LaunchOptions, parse_arguments


@pytest.mark.parametrize(
    ("line", "options", "program"),
    [
        ("train.py --lr 1", LaunchOptions(), ["train.py", "--lr", "1"]),
        ("-- train.py -- x", LaunchOptions(), ["train.py", "--", "x"]),
        ("-m mod --nnodes 3", LaunchOptions(), ["-m", "mod", "--nnodes", "3"]),
        ("--nproc-per-node 2 train.py", LaunchOptions(num_workers=2), ["train.py"]),
        ("--nproc_per_node=4 -- -m mod", LaunchOptions(num_workers=4), ["-m", "mod"]),
        ("--nproc-per-node gpu -- x", LaunchOptions(num_workers="gpu"), ["x"]),
        ("--max-restarts 0 --grace-s 2.5 x", LaunchOptions(grace_s=2.5), ["x"]),
        ("--heartbeat-timeout-s=0 x", LaunchOptions(heartbeat_timeout_s=0.0), ["x"]),
        ("--max_restarts=3 x", LaunchOptions(max_restarts=3), ["x"]),
        ("--nproc-per-node 2:4 x", LaunchOptions(num_workers=(2, 4)), ["x"]),
        (
            "--nproc-per-node 2:5 --tensor-parallel-size 2 x",
            LaunchOptions(num_workers=(2, 5), tensor_parallel_size=2),
            ["x"],
        ),
        (
            "--nnodes=2 --node_rank 1 --master-addr h --master_port=5 x",
            LaunchOptions(num_nodes=2, node_rank=1, master_address="h", master_port=5),
            ["x"],
        ),
    ],
)
def test_options_end_where_the_program_begins(
    line: str, options: LaunchOptions, program: list[str]
) -> None:
    assert parse_arguments(line.split()) == (options, program)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "empty script"),
        ("--nproc-per-node 2 --", "empty script"),
        ("--nproc-per-node", "`--nproc-per-node` must have a value"),
        ("--nproc-per-node -- x", "`--nproc-per-node` must have a value"),
        ("--nproc-per-node 0 x", "`--nproc-per-node` must be a number from 1 on, .* got '0'"),
        ("--nproc-per-node two x", "or auto, cpu or gpu, but got 'two'"),
        ("--nnodes 1:4 x", "got '1:4': an elastic range of nodes is not offered yet"),
        ("--nnodes 0 x", "`--nnodes` must be at least 1"),
        ("--nnodes 2 x", "`--master-addr` must be given for 2 nodes"),
        ("--node-rank 1 x", r"`--node-rank` must be below `--nnodes` \(1\), but got 1"),
        ("--master-port 99999 x", "`--master-port` must be below 65536"),
        ("--master-port x x", "`--master-port` must be a whole number, but got 'x'"),
        ("--max-restarts -1 x", "`--max-restarts` must be a whole number, but got '-1'"),
        ("--nproc-per-node 4:2 x", "LEAST:MOST, or auto, cpu or gpu, but got '4:2'"),
        ("--tensor-parallel-size 0 x", "`--tensor-parallel-size` must be at least 1, but got 0"),
        (
            "--tensor-parallel-size 2 --nproc-per-node 3:4 x",
            "`--nproc-per-node` must be a multiple of `--tensor-parallel-size` .2., or 1",
        ),
        ("--tensor-parallel-size 2 --nproc-per-node 3 x", "must be a multiple of .* but got 3"),
        ("--nproc-per-node 0:2 x", "LEAST:MOST, or auto, cpu or gpu, but got '0:2'"),
        ("--nnodes 2 --nproc-per-node 1:2 x", "LEAST:MOST` is not offered yet for several"),
        ("--rdzv_backend=c10d x", "`--rdzv-backend` is not offered yet"),
        ("--standalone x", "`--standalone` is not offered yet"),
        ("--module mod", "`--module` is not offered yet. Hint: write `-m package.module`"),
        ("--nproc 2 x", "unrecognized arguments: `--nproc` is not an option"),
        ("-x y", "unrecognized arguments: `-x`"),
        ("--heartbeat-timeout-s 0.5 x", "`--heartbeat-timeout-s` must be 0 or at least 1 second"),
        ("--grace-s -1 x", "`--grace-s` must be seconds from 0 on, but got '-1'"),
        ("--grace-s nan x", "`--grace-s` must be seconds from 0 on"),
        ("--trial mod:Class", "`--trial module:Class` is not offered"),
        ("-- --trial mod:Class", "`--trial module:Class` is not offered"),
        ("--trial=mod:Class", "`--trial module:Class` is not offered"),
    ],
)
def test_wrong_options_are_refused_by_name(line: str, message: str) -> None:
    with pytest.raises(LaunchArgumentError, match=message):
        parse_arguments(line.split())


def test_help_needs_no_program() -> None:
    options, program = parse_arguments(["--help"])
    assert (options.wants_help, program) == (True, [])
