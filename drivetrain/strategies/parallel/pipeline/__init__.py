"""Pipeline parallelism over torch's schedules."""
