"""Ranks that are forked from a process that has imported what they need."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drivetrain.launch import LaunchOptions
from drivetrain.launch.preload import ForkedProcess, Preloader
from drivetrain.launch.report import ERROR_FILE_VARIABLE, read_record
from drivetrain.runtime.errors import ConfigurationError, LaunchError
from tests.launch.launching import clean_environment, launch, write_script

pytestmark = pytest.mark.skipif(os.uname().sysname != "Linux", reason="forking preloaded ranks needs Linux")


@contextmanager
def preloading(script: Path, modules: str = "json", *arguments: str) -> Iterator[Preloader]:
    """A process that has imported modules; a small one of the standard library keeps the tests quick."""
    with Preloader.start(LaunchOptions(preload=modules), str(script), arguments) as preloader:
        yield preloader


def forked(preloader: Preloader, output: Path, **variables: str) -> ForkedProcess:
    environment = clean_environment(**variables)
    assert preloader.why_not(environment) is None
    with open(output, "w") as file:
        return preloader.fork(environment, stdout=file, stderr=file)


def test_each_rank_runs_the_script_with_its_own_variables_and_output(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import json, os, random, sys
        print(json.dumps([__name__, sys.argv[1:], os.environ["RANK"], "SECRET" in os.environ, random.random()]))
        """,
    )
    with preloading(script, "json", "--lr", "1") as preloader:
        ranks = [forked(preloader, tmp_path / str(rank), RANK=str(rank)) for rank in range(3)]
        assert [rank.wait(30) for rank in ranks] == [0, 0, 0]
    told = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]
    assert [each[:4] for each in told] == [["__main__", ["--lr", "1"], str(rank), False] for rank in range(3)]
    assert len({each[4] for each in told}) == 3  # forked processes would share the state of generators


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("sys.exit(3)", 3),
        ("raise ValueError('wrong')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("atexit.register(print, 'handler')", 0),
    ],
)
def test_exit_codes_are_those_of_a_fresh_interpreter(tmp_path: Path, line: str, code: int) -> None:
    script = write_script(tmp_path, f"import atexit, os, signal, sys\n{line}")
    with preloading(script) as preloader:
        rank = forked(preloader, tmp_path / "output", **{ERROR_FILE_VARIABLE: str(tmp_path / "error")})
        assert rank.wait(30) == rank.returncode == code
    record = read_record(str(tmp_path / "error"))
    assert (record is not None and "ValueError: wrong" in record.text) == (code == 1)
    assert ("handler" in (tmp_path / "output").read_text()) == (code == 0)


def test_a_signal_ends_a_rank_and_not_what_it_was_forked_from(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import time\ntime.sleep(600)")
    with preloading(script) as preloader:
        first = forked(preloader, tmp_path / "first")
        assert first.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(0.05)
        assert os.getsid(first.pid) == first.pid  # a session of its own, so that a signal reaches what it starts
        os.killpg(first.pid, signal.SIGTERM)
        assert first.wait(30) == -signal.SIGTERM
        second = forked(preloader, tmp_path / "second")  # as after a restart
        second.kill()
        assert second.wait(30) == -signal.SIGKILL


def test_ranks_end_with_what_they_were_forked_from(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import time\ntime.sleep(600)")
    preloader = Preloader.start(LaunchOptions(preload="json"), str(script))
    rank = forked(preloader, tmp_path / "output", **{ERROR_FILE_VARIABLE: str(tmp_path / "error")})
    os.kill(preloader._process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    assert rank.wait(30) == -signal.SIGKILL
    preloader.close()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()", "a thread"),
        ("import subprocess as s\nprocess = s.Popen(['cat'], stdin=s.PIPE)", "started a process"),
        ("import sys\nsys.setprofile(lambda *event: None)", None),
    ],
)
def test_an_import_that_a_fork_would_break_is_a_reason(tmp_path: Path, module: str, said: str | None) -> None:
    write_script(tmp_path, module, "imported.py")
    script = write_script(tmp_path, "import torch")
    with preloading(script, "imported") as preloader:
        reason = preloader.why_not(dict(os.environ))
    assert (reason is None) if said is None else said in (reason or "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"no_preload": True}, "--no_preload"),
        ({"no_python": True}, "--no_python"),
        ({}, "nothing but the standard library"),
    ],
)
def test_nothing_is_started_where_nothing_can_be_preloaded(tmp_path: Path, options: dict[str, bool], said: str) -> None:
    with Preloader.start(LaunchOptions(**options), str(write_script(tmp_path, "import json"))) as preloader:  # type: ignore[arg-type]
        assert preloader._process is None
        assert said in (preloader.why_not(dict(os.environ)) or "")


def test_variables_that_are_read_on_import_must_be_those_of_the_ranks(tmp_path: Path) -> None:
    with preloading(write_script(tmp_path, "import torch")) as preloader:
        assert preloader.why_not({**os.environ, "MKL_NUM_THREADS": "77"}) == (
            "MKL_NUM_THREADS has another value for the processes, and is read while torch is imported"
        )
        assert preloader.why_not({**os.environ, "RANK": "1", "OMP_NUM_THREADS": "1"}) is None


def test_a_module_that_was_asked_for_and_is_not_there_is_an_error(tmp_path: Path) -> None:
    said = r"'no_such_module' cannot be imported.*--preload"
    script = write_script(tmp_path, "import torch")
    with preloading(script, "no_such_module") as preloader, pytest.raises(LaunchError, match=said):
        preloader.why_not(dict(os.environ))


def test_preload_and_no_preload_contradict_each_other() -> None:
    with pytest.raises(ConfigurationError, match="contradict"):
        LaunchOptions(preload="torch", no_preload=True)


@pytest.mark.crash  # two launches, and all that a rank finds
def test_a_preloaded_rank_is_like_one_that_imports_for_itself(tmp_path: Path) -> None:
    write_script(
        tmp_path,
        """
        import faulthandler, gc, json, multiprocessing, os, signal, sys, threading
        import numpy, torch
        state = {
            "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path, "file": __file__, "name": __name__,
            "directory": os.getcwd(), "flags": list(sys.flags), "spec": __spec__ is None,
            "variables": {name: value for name, value in os.environ.items() if not name.startswith(
                ("TORCHELASTIC_", "MASTER_", "DRIVETRAIN_HEARTBEAT", "DRIVETRAIN_COMMAND"))},
            "threads": [torch.get_num_threads(), torch.get_num_interop_threads(), len(os.listdir("/proc/self/task"))],
            "files": len(os.listdir("/proc/self/fd")), "gc": gc.isenabled(),
            "signals": {str(number): str(signal.getsignal(number)).split(" at ")[0]
                        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE)},
            "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
            "main": [threading.current_thread() is threading.main_thread(), multiprocessing.current_process().name],
            "leads": os.getsid(0) == os.getpid(), "faulthandler": faulthandler.is_enabled(),
            "streams": [[each.encoding, each.line_buffering, each.isatty()] for each in (sys.stdout, sys.stderr)],
        }
        with open(sys.argv[1] + os.environ["RANK"], "w") as file:
            drawn = [numpy.random.rand(), torch.rand(()).item()]
            json.dump({"state": state, "drawn": drawn, "loaded": list(sys.modules)}, file)
        """,
    )
    flags = {"preloaded": [], "fresh": ["--no_preload"]}
    for name, given in flags.items():
        ended = launch("--cpu", "--num_processes", "2", *given, "script.py", "told", cwd=tmp_path)
        assert ended.code == 0, ended.err
        for rank in range(2):
            (tmp_path / f"told{rank}").rename(tmp_path / f"{name}{rank}")
    told = {name: [json.loads((tmp_path / f"{name}{rank}").read_text()) for rank in range(2)] for name in flags}
    assert [each["state"] for each in told["preloaded"]] == [each["state"] for each in told["fresh"]]
    assert "torch._dynamo" in told["preloaded"][0]["loaded"]  # it was preloaded
    assert "torch._dynamo" not in told["fresh"][0]["loaded"]
    for position in range(2):  # forked processes would share the state of these generators too
        assert len({each["drawn"][position] for name in flags for each in told[name]}) == 4
