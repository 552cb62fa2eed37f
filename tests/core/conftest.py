"""The contract suite: the same tests on each backend."""

import axes

# About a minute a backend on two cores.
SAMPLE = {"tensorflow": 40, "jax": 20, "torch": 200}


def pytest_generate_tests(metafunc):
    if "combination" in metafunc.fixturenames:
        whole = metafunc.config.getoption("--whole")
        chosen = axes.COMBINATIONS if whole else axes.sample(SAMPLE[axes.BACKEND])
        metafunc.parametrize("combination", chosen, ids="-".join)
