"""Pipeline parallelism with the schedules of `torch.distributed.pipelining`."""
