"""What the executor costs and reaches, beside torch.distributed.pipelining in the same run."""
