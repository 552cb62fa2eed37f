"""Settings of all tests, and which target of the Makefile runs which of them.

- `make test` runs what is fast: neither `slow` nor `exhaustive`.
- `make test-slow` runs what is `slow`, as is all in tests/paper and tests/end_to_end.
- `make test-all` runs every case of every test.

A test with many cases says with `cases(n)` how many of them the first two run: those that differ
most from each other. The others are `exhaustive`. `cases(n, jax=m)` gives another number for a
backend, which a file gives for all its tests that give none; what is `slow_on("jax")` is slow on
that backend alone. A test of what all backends share is `same_on_all`: exhaustive on each but
PyTorch, which is quickest.
"""

import collections
import contextlib
import ctypes
import gc
import os
import resource
from pathlib import Path

import hypothesis
import pytest
from pairwise import most_different

ROOT = Path(__file__).parents[1]
SLOW_FOLDERS = ("paper", "end_to_end")
BACKEND = os.environ.get("KERAS_BACKEND", "tensorflow")

# How long an example takes depends on what else the machine does.
patient = {
    "deadline": None,
    "suppress_health_check": [
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
}
hypothesis.settings.register_profile("few", max_examples=25, **patient)
# TensorFlow traces and JAX compiles for most examples.
MANY = {"torch": 500, "tensorflow": 100, "jax": 50}
hypothesis.settings.register_profile("many", max_examples=MANY[BACKEND], **patient)
hypothesis.settings.load_profile("few")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Several test processes share the cores; PyTorch's threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that a test starts import what the tests import.
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))
# JAX compiles more than it computes here. What is compiled is kept, and little optimized.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


def number_of_cases(item):
    """How many cases of a test marked `cases` are not exhaustive; None for all."""
    markers = list(item.iter_markers("cases"))  # the test's before the file's
    of_backend = [marker.kwargs[BACKEND] for marker in markers if BACKEND in marker.kwargs]
    return of_backend[0] if of_backend else markers[0].args[0]


def is_slow(item):
    if item.path.relative_to(ROOT / "tests").parts[0] in SLOW_FOLDERS:
        return True
    return any(BACKEND in marker.args for marker in item.iter_markers("slow_on"))


def mark_targets(items):
    """Adds `slow` by folder and backend, and `exhaustive` to what `make test-all` alone runs."""
    cases = collections.defaultdict(list)
    for item in items:
        if is_slow(item):
            item.add_marker("slow")
        if BACKEND != "torch" and item.get_closest_marker("same_on_all"):
            item.add_marker("exhaustive")
        if item.get_closest_marker("cases") and not item.get_closest_marker("exhaustive"):
            cases[item.nodeid.split("[")[0]].append(item)
    for of_one_test in cases.values():
        number = number_of_cases(of_one_test[0])
        if number is None:
            continue
        chosen = most_different(map(values_of_case, of_one_test), number)
        for i in set(range(len(of_one_test))) - set(chosen):
            of_one_test[i].add_marker("exhaustive")


def values_of_case(item):
    """The numbers of a case's parameters; none for a test without."""
    callspec = getattr(item, "callspec", None)
    return tuple(sorted(callspec.indices.items())) if callspec else ()


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back():
    """Frees what JAX has compiled, of which a process would otherwise hold many gigabytes."""
    yield
    if BACKEND != "jax" or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 3 * 2**20:
        return
    import jax

    jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # of the GNU C library
        ctypes.CDLL(None).malloc_trim(0)


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items):
    """Marks what the targets select by."""
    mark_targets(items)
