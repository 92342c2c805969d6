"""Look at this process from all sides, and write what is seen as JSON; for `test_warm_probes`."""

import _thread
import asyncio
import atexit
import contextlib
import faulthandler
import gc
import hashlib
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
import uuid
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import numpy
import torch
from torch import nn
from torch.utils.data import DataLoader

OUTPUT = sys.argv[1]


def status():
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    names = ("Name", "Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "Seccomp")
    return [found.get(name) for name in (*names, "SigBlk", "SigIgn", "SigCgt", "Cpus_allowed")]


def files():
    found = []
    for name in sorted(os.listdir("/proc/self/fd"), key=int):
        with contextlib.suppress(OSError):
            flags = Path(f"/proc/self/fdinfo/{name}").read_text().split()[3]
            found.append((os.readlink(f"/proc/self/fd/{name}").split(":")[0], flags))
    return sorted(found)


def square(number):
    return number * number


def pool(method):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as executor:
        return list(executor.map(square, range(4)))


def train():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(32, 64)).square().mean().backward()
        optimizer.step()
    return hashlib.sha256(model[0].weight.detach().numpy().tobytes()).hexdigest()


def load(num_workers, method=None):
    torch.manual_seed(1)
    loader = DataLoader(
        torch.arange(12.0), 4, shuffle=True, num_workers=num_workers, multiprocessing_context=method
    )
    return [batch.tolist() for batch in loader]


def raised():
    try:
        raise ValueError("x")
    except ValueError:
        return traceback.format_exc()


def thread_seeds():
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(torch.get_num_threads).result()


def tell_child():
    code = "import os, sys; print(sys.flags, sys.path[1:], os.environ.get('MARKER'), os.getcwd())"
    return subprocess.check_output([sys.executable, "-c", code], text=True)


def append(text):
    with open(OUTPUT + ".exit", "a") as file:
        file.write(text)


def atexit_order():
    # Seen by the test: handlers run, the last first, and open files are flushed.
    atexit.register(append, "first\n")
    atexit.register(append, "last\n")
    return True


class Mourned:
    def __del__(self):
        append("deleted\n")


async def add():
    return await asyncio.to_thread(square, 5)


SAME = {
    "argv": lambda: sys.argv[2:],
    "orig_argv": lambda: sys.orig_argv[1:-2],
    "path": lambda: sys.path,
    "executable": lambda: [sys.executable, sys.prefix, sys.base_prefix],
    "flags": lambda: str(sys.flags),
    "xoptions": lambda: sys._xoptions,
    "warnoptions": lambda: sys.warnoptions,
    "main": lambda: sorted(name for name in vars(sys.modules["__main__"]) if name[:2] == "__"),
    "file": lambda: [__file__, __name__, __package__, __spec__ is None],
    "environment": lambda: {k: v for k, v in os.environ.items() if k not in LEFT_OUT},
    "libc environment": lambda: tell_child(),
    "cmdline": lambda: Path("/proc/self/cmdline").read_text().split("\0")[1:-3],
    "proc environ": lambda: sorted(
        entry
        for entry in Path("/proc/self/environ").read_text().split("\0")
        if entry.partition("=")[0] not in LEFT_OUT
    ),
    "cwd": os.getcwd,
    "status": status,
    "limits": lambda: [resource.getrlimit(n) for n in range(10)],
    "priority": lambda: [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
    "session": lambda: [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "parent": os.getppid,
    "files": files,
    "stdin": lambda: [sys.stdin.read(), sys.stdin.encoding, sys.stdin.isatty()],
    "streams": lambda: [
        (s.encoding, s.errors, s.line_buffering, s.write_through, s.isatty(), s.newlines)
        for s in (sys.stdout, sys.stderr)
    ],
    "handlers": lambda: [str(signal.getsignal(n)) for n in sorted(signal.valid_signals())],
    "wakeup": lambda: signal.set_wakeup_fd(-1),
    "timers": lambda: [signal.getitimer(signal.ITIMER_REAL), signal.alarm(0)],
    "threads": lambda: [t.name for t in threading.enumerate()],
    "native threads": lambda: [threading.main_thread().native_id == os.getpid(), _thread._count()],
    "thread of main": lambda: threading.current_thread() is threading.main_thread(),
    "switch": lambda: [sys.getswitchinterval(), sys.getrecursionlimit()],
    "hooks": lambda: [
        sys.gettrace(),
        sys.getprofile(),
        sys.excepthook is sys.__excepthook__,
        sys.displayhook is sys.__displayhook__,
        sys.breakpointhook is sys.__breakpointhook__,
        threading.excepthook is threading.__excepthook__,
    ],
    "faulthandler": faulthandler.is_enabled,
    "gc": lambda: [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)],
    "locale": lambda: [locale.setlocale(locale.LC_ALL), locale.getpreferredencoding(False)],
    "zone": lambda: time.tzname,
    # An optimizer loads it in any case, and it adds a filter.
    "filters": lambda: import_module("torch._dynamo") and sorted(map(str, warnings.filters)),
    "logging": lambda: [logging.root.level, logging.root.handlers, logging.lastResort is None],
    "temporary": tempfile.gettempdir,
    "traceback": raised,
    "ssl": lambda: [ssl.OPENSSL_VERSION, len(ssl.RAND_bytes(8))],
    "asyncio": lambda: asyncio.run(add()),
    "default socket timeout": socket.getdefaulttimeout,
    "sysconfig": lambda: sysconfig.get_paths()["purelib"],
    "multiprocessing": lambda: [
        multiprocessing.get_start_method(allow_none=True),
        multiprocessing.current_process().name,
        multiprocessing.parent_process() is None,
        len(multiprocessing.active_children()),
    ],
    "pool by fork": lambda: pool("fork"),
    "pool by spawn": lambda: pool("spawn"),
    "torch threads": lambda: [torch.get_num_threads(), torch.get_num_interop_threads()],
    "torch threads of a thread": thread_seeds,
    "torch defaults": lambda: [
        str(torch.get_default_dtype()),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mkldnn.enabled,
    ],
    "cuda": lambda: [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()],
    "numpy errors": lambda: numpy.geterr(),
    "numpy product": lambda: (
        numpy.random.default_rng(0).random((200, 200)) @ numpy.ones(200)
    ).tolist()[:9],
    "training": train,
    "loader": lambda: load(0),
    "loader with processes": lambda: load(2),
    "loader with spawned ones": lambda: load(1, "spawn"),
    "atexit": atexit_order,
    "unclosed file": lambda: globals().update(unclosed=open(OUTPUT + ".open", "w")),  # noqa: SIM115
    # One that an object of a library keeps, which a fork does not take apart.
    "file of a library": lambda: setattr(torch, "unclosed", open(OUTPUT + ".kept", "w")),  # noqa: SIM115
    "deleted object": lambda: globals().update(mourned=Mourned()),
}
# These must differ from process to process.
OWN = {
    "random": random.random,
    "numpy random": numpy.random.random,
    "torch random": lambda: torch.rand(()).item(),
    "seed of torch": torch.initial_seed,
    "uuid": lambda: str(uuid.uuid4()),
    "secret": secrets.token_hex,
    "name of a temporary file": lambda: next(tempfile._get_candidate_names()),
    "key of multiprocessing": lambda: multiprocessing.current_process().authkey.hex(),
    "openssl": lambda: ssl.RAND_bytes(8).hex(),
}
LEFT_OUT = {"PACELINE_WORKER_GROUP", "PWD", "_", "OLDPWD", ""}

if __name__ == "__main__":
    # Random numbers come first: the others set seeds.
    own = {name: probe() for name, probe in OWN.items()}
    same = {name: probe() for name, probe in SAME.items()}
    for file in (globals().get("unclosed"), torch.unclosed):
        file.write("written")
    Path(OUTPUT).write_text(json.dumps({"own": own, "same": same}))
