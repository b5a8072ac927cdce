"""One step of one rank: its row of a Program, losses, gradients, and the recorded timeline.

agreement         the start of a step: all processes announce what they are about to do
executor          a row of a Program as a list of calls, run every step
executor_cache    one executor for each use and number of microbatches; the order of collectives
cell_runner       F, B, I, sends and receives of one microbatch in one stage
dtensor_messages  DTensors between stages
streams           two CUDA streams for Overlaps
overlaps          Overlaps whose F and B take turns
dynamic           dynamic W: pending weight gradients run while a rank waits
offload           OFFLOAD and RELOAD: activations to the host and back
in_place          tensors that a stage modifies in place
losses            losses by microbatch, and the result of a step
sums              sums of gradients over copies, ties and replicas
expert_load       the rows of each expert in a step, and the bias that balances them
equal             comparison of values that must be equal on several ranks
watchers          labels for torch.profiler, the check for NaN
recorder          the recorded Timeline
shard_recorder    gathers and reductions of sharded stages in it
phase_recorder    phases of layers with divided experts in it
copy_recorder     copies of activations in it
event_columns     both, packed to be sent to other ranks
clock             the clocks of several machines
"""
