"""Running the scripts in examples/: within this process, which is quick, or as a user does."""

import contextlib
import io
import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from absl import app, flags
from absl import logging as absl_logging

ROOT = Path(__file__).parents[2]


class Finished(NamedTuple):
    """A script that has ended, with the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


@contextlib.contextmanager
def logging_restored():
    """Undo what a script does to logging, so that later tests see what is logged."""
    verbosity = absl_logging.get_verbosity()
    loggers = [logging.root, absl_logging.get_absl_logger(), logging.getLogger("tensorflow")]
    levels = [logger.level for logger in loggers]
    try:
        yield
    finally:
        logging.root.removeHandler(absl_logging.get_absl_handler())
        absl_logging.set_verbosity(verbosity)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def run(script, *arguments, **environment):
    """Run a script within this process."""
    path = ROOT / "examples" / script
    app.define_help_flags()  # which happens once
    known = set(flags.FLAGS)
    with (
        logging_restored(),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        mock.patch.object(sys, "argv", [str(path), *map(str, arguments)]),
        mock.patch.object(sys, "path", [str(ROOT / "examples"), str(path.parent), *sys.path]),
        mock.patch.dict(os.environ, environment),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
            status = None
        except SystemExit as stop:
            status = stop.code
        finally:  # another script may have flags of these names
            for name in set(flags.FLAGS) - known:
                delattr(flags.FLAGS, name)
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    return Finished(status or 0, out.getvalue(), err.getvalue())


def run_process(script, *arguments, cwd=ROOT):
    """Run a script in a new process."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)  # a user has not set it
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )
