"""The contract suite: the same tests on each backend, and how much of it was run."""

import axes

# About a minute a backend on two cores.
SAMPLE = {"tensorflow": 40, "jax": 20, "torch": 200}


def pytest_generate_tests(metafunc):
    if "combination" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole")
        chosen = axes.COMBINATIONS if whole else axes.sample(SAMPLE[axes.BACKEND])
        metafunc.parametrize("combination", chosen, ids="-".join)


def pytest_terminal_summary(terminalreporter):
    stats = terminalreporter.stats
    found = {
        outcome: [r for r in stats.get(outcome, ()) if "test_combinations.py" in r.nodeid]
        for outcome in ("passed", "failed", "skipped")
    }
    count = sum(map(len, found.values()))
    if count:
        terminalreporter.write_line(
            f"Contract suite on {axes.BACKEND}: {count:,} of {len(axes.COMBINATIONS):,} "
            f"combinations of optimizer, layer, precision and loop; {len(found['failed'])} failed, "
            f"{len(found['skipped'])} that plain Keras cannot train either."
        )
