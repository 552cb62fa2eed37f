"""Settings and options of all tests."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Several test processes share the cores; PyTorch's threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser):
    parser.addoption(
        "--whole",
        action="store_true",
        help="Run all combinations of the contract suite and all draws, not a sample of them.",
    )
