"""Build the package, install it into an empty environment, and use it there.

python tools/check_package.py

Builds sdist and wheel (with the packages of the extra `package`), looks into the wheel, makes a
virtual environment in a temporary folder, installs the wheel with the JAX backend, which is the
smallest, and freezes, saves and loads a network with it. Fails at the first error.
"""

import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE_DATA = (
    "keras_freeze/py.typed",
    "keras_freeze/storage/header_dictionary.txt",
    "keras_freeze/storage/header_dictionary_2.txt",
)
BACKEND = "jax"

PROGRAM = """
import keras
import numpy as np

import keras_freeze as kf

assert "site-packages" in kf.__file__, kf.__file__
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(3)])
kf.reinitialize(model, seed=0)
model.compile(kf.FreezeOptimizer("sgd", freeze_rate=0.9), loss="mse")
x = np.random.default_rng(0).normal(size=(32, 8))
kf.freeze(model, x, x[:, :3])
model.fit(x, x[:, :3], verbose=0)
kf.save(model, "model.freeze")
loaded = kf.load("model.freeze")
assert all(map(np.array_equal, loaded.get_weights(), model.get_weights()))
print(f"{kf.get_mask(loaded).num_trained} weights trained, saved and loaded")
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        wheel = build(Path(folder) / "dist")
        check_files(wheel)
        python = install(wheel, Path(folder) / "environment")
        use(python, Path(folder))


def build(folder: Path) -> Path:
    """Build sdist and, from it, the wheel; return the wheel."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    (_,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return wheel


def check_files(wheel: Path) -> None:
    """Check that the wheel has the package's data and every module, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "keras_freeze").rglob("*.py")}
    expected = modules | set(PACKAGE_DATA)
    if names != expected:
        raise SystemExit(f"{wheel.name} lacks or has too much: {sorted(names ^ expected)}")
    print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size:,} bytes")


def install(wheel: Path, folder: Path) -> Path:
    """Install the wheel and one backend into a new environment; return its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    requirement = f"keras_freeze[{BACKEND}] @ {wheel.as_uri()}"
    run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement)
    return python


def use(python: Path, folder: Path) -> None:
    """Run the command line and a small program in an empty folder."""
    run(str(python), "-m", "keras_freeze", "--version", cwd=folder)
    run(str(python), "-c", PROGRAM, cwd=folder)


def run(*command: str, cwd: Path | None = None) -> None:
    environment = {**os.environ, "KERAS_BACKEND": BACKEND}
    environment.pop("PYTHONPATH", None)
    subprocess.run(command, cwd=cwd, env=environment, check=True)


if __name__ == "__main__":
    main()
