import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# Several test processes share the cores; PyTorch's threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
