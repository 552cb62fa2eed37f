"""Files with other content and right checksums: loaded, or a FreezeFileError, and nothing else."""

import importlib
import importlib.util
import marshal
import sys
from pathlib import Path

import keras
import pytest

# One process, once: the originals are trained for it.
pytestmark = pytest.mark.filterwarnings("ignore")

TOOL = Path(__file__).parents[2] / "tools" / "mutate_files.py"
MEMORY = 1 << 30  # bytes that reading all of them may add to a process with TensorFlow in it


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("mutate_files", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("count", [100, pytest.param(30_000, marks=pytest.mark.exhaustive)])
def test_changed_files_load_or_are_refused(count, tool, tmp_path):
    if count > 1_000 and keras.backend.backend() == "tensorflow":
        pytest.skip("there, Keras itself keeps 0.6 MB for each network that it builds")
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = tool.run(count, seed=0, folder=tmp_path)
    unit = 1 if sys.platform == "darwin" else 1024
    assert unit * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MEMORY
    assert found["files"] == count
    assert 0 < found["loaded"] < count


def test_a_changed_file_with_an_effect_would_be_found(tool, tmp_path):
    watch = tool.Watch()
    with watch.on():
        (tmp_path / "made").write_text("x")
        marshal.loads(marshal.dumps("code"))
    assert [found.split(" ")[0] for found in watch.found] == ["open", "marshal.loads"]
    (tmp_path / "made").write_text("y")
    assert len(watch.found) == 2


def test_a_module_that_a_reader_imports_first_is_no_effect_of_a_file(tool, tmp_path, monkeypatch):
    (tmp_path / "imported_while_reading.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    watch = tool.Watch()
    with watch.on():
        importlib.import_module("imported_while_reading")
    assert watch.found == []
