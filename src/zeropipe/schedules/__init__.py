"""One small file per schedule, and the registry that knows them all."""
