"""What the tests of loops, backends and devices share; nothing here belongs to one backend."""

import os
import subprocess
import sys
from pathlib import Path

import keras

ROOT = Path(__file__).parents[2]
# An entry of None makes Python's import statement fail. Keras imports TensorFlow where it finds it,
# which takes a process of JAX half of the time that it needs to start.
HIDE_TENSORFLOW = "import sys; sys.modules['tensorflow'] = None\n"


def run_python(code, *arguments, backend=None, **environment):
    """What a program prints in a process of its own, with the current backend or another one."""
    path = os.pathsep.join([str(ROOT / "tests" / "core"), *filter(None, sys.path)])
    environment = {
        **os.environ,
        "KERAS_BACKEND": backend or keras.backend.backend(),
        "PYTHONPATH": path,
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
