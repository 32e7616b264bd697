"""A plan under Ray Train: each worker of a TorchTrainer is one rank of it.

halopipe profile ray_train.py:perceptron
halopipe plan profile.json --solver even-split       # two stages, as an example
python ray_train.py plan.json
"""

from __future__ import annotations

import os
import socket
import sys

import torch
import torch.distributed as dist
from torch import nn

import halopipe as hp

STEPS = 3


def perceptron():
    """The network with an example and a loss: what is profiled, planned and trained."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return network, (torch.randn(16, 32), torch.randint(10, (16,))), nn.functional.cross_entropy


def train(config):
    """What each worker does; rank 0 returns the losses, which all ranks have."""
    leave_the_group_of_ray()
    network, batch, loss_fn = perceptron()
    with hp.execute(config["plan"], network, loss_fn, "SGD:lr=0.1", example=batch) as engine:
        return [engine.step(batch) for _ in range(STEPS)]


def leave_the_group_of_ray():
    """Ray joined the workers in a process group; halopipe makes its own, as under torchrun, at another port."""
    with socket.create_server(("", 0)) as probe:
        port = [probe.getsockname()[1]]
    dist.broadcast_object_list(port, 0)
    os.environ["MASTER_PORT"] = str(port[0])
    dist.destroy_process_group()


def main(path):
    """Train on as many workers as the plan has ranks."""
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    workers = ScalingConfig(num_workers=hp.load(path).decision.num_ranks)
    result = TorchTrainer(train, train_loop_config={"plan": os.path.abspath(path)}, scaling_config=workers).fit()
    print("losses", *result.return_value)


if __name__ == "__main__":
    main(sys.argv[1])
