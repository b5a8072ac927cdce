"""Beyond the pipeline: data, shard and tensor parallelism of its stages on a DeviceMesh."""
