"""Settings and options of all tests."""

import collections
import hashlib
import math
import os
from pathlib import Path

import hypothesis
import pytest

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Several test processes share the cores; PyTorch's threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Processes that a test starts import what the tests import.
ROOT = Path(__file__).parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "support")))


def pytest_addoption(parser):
    parser.addoption(
        "--whole",
        action="store_true",
        help="Run all combinations of the contract suite and all cases, not a sample of them.",
    )


def pytest_collection_modifyitems(config, items):
    """Keeps together what shares fixtures; samples the cases of tests marked `sample(share)`."""
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        if any(definitions[-1].scope == "module" for definitions in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.path.name))
    if config.getoption("--whole"):
        return
    cases = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sample"):
            cases[item.nodeid.split("[")[0]].append(item)
    left_out = set()
    for of_one_test in cases.values():
        (share,) = of_one_test[0].get_closest_marker("sample").args
        of_one_test.sort(key=lambda item: hashlib.sha256(item.nodeid.encode()).digest())
        left_out.update(of_one_test[math.ceil(share * len(of_one_test)) :])
    config.hook.pytest_deselected(items=sorted(left_out, key=lambda item: item.nodeid))
    items[:] = [item for item in items if item not in left_out]


def pytest_terminal_summary(terminalreporter):
    """Says how much of the contract suite was run."""
    stats = terminalreporter.stats
    found = {
        outcome: [r for r in stats.get(outcome, ()) if "test_combinations.py" in r.nodeid]
        for outcome in ("passed", "failed", "skipped")
    }
    count = sum(map(len, found.values()))
    if count:
        import axes

        terminalreporter.write_line(
            f"Contract suite on {axes.BACKEND}: {count:,} of {len(axes.COMBINATIONS):,} "
            f"combinations of optimizer, layer, precision and loop; {len(found['failed'])} failed, "
            f"{len(found['skipped'])} that plain Keras cannot train either."
        )
