"""Facts about models that the engine, the simulator and the planner share.

configs        the models known by name, and their configurations
layers         how many layers each stage gets
positions      the largest number of positions
checkpointing  the modes of activation checkpointing
cp_exchange    which exchange attention over `cp` has, by heads, length and link
operators      the operators of a layer: FLOPs, bytes and parameters
head           the fused head of a last stage: what the engine and its predictions agree on
probe          the parts of a model that a profile runs, and the schedules that it runs them with
"""
