"""What scale.py measures: processes that average gradients of VGG16-D, dense and compact.

`python _scale_worker.py COUNT FREEZE_RATE REPEATS` starts the processes, and prints a line of JSON.
"""

import json
import os
import socket
import statistics
import subprocess
import sys
import time

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

BUCKET = 25 * 2**20 // 4  # float32 values, as in DistributedDataParallel


def main():
    count, freeze_rate, repeats = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    if "RANK" in os.environ:
        work(freeze_rate, repeats)
        return
    with socket.socket() as port:
        port.bind(("localhost", 0))
        number = port.getsockname()[1]
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "localhost", "MASTER_PORT": str(number)}
    group |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *sys.argv], env={**os.environ, **group, "RANK": str(rank)}
        )
        for rank in range(count)
    ]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        sys.exit(f"A process has failed: {statuses}")


def work(freeze_rate, repeats):
    import keras
    import numpy as np
    import torch
    import torch.distributed as dist

    import keras_freeze as kf
    from keras_freeze import backend

    network = kf.models.vgg16_d(seed=0)
    optimizer = kf.FreezeOptimizer(keras.optimizers.SGD(0.1), freeze_rate, criterion="random")
    network.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    kf.freeze(network, np.zeros((2, 32, 32, 3), "float32"), np.zeros(2))
    rows = kf.report(network).rows
    dist.init_process_group("gloo")
    dense = torch.ones(sum(row.size for row in rows)).split(BUCKET)
    compact = [torch.ones(row.num_trained) for row in rows if row.num_trained]
    one = torch.ones(1)

    def median(function):
        seconds = []
        for _ in range(2 + repeats):
            dist.barrier()
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
        return statistics.median(seconds[2:])

    found = {
        "latency": median(lambda: dist.all_reduce(one)),
        "dense": median(lambda: [dist.all_reduce(bucket) for bucket in dense]),
        "compact": median(lambda: backend.mean_over_processes(compact)),
        "dense_bytes": 4 * sum(bucket.numel() for bucket in dense),
        "compact_bytes": 4 * sum(vector.numel() for vector in compact),
    }
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
