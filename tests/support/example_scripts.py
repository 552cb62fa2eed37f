"""Scripts of examples/, run as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(script, *flags, cwd=ROOT):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)  # a user has not set it
    return subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *flags],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment,
    )
