"""The simulator: what a schedule costs, and costs of the stages of a model.

costs          Costs: times, messages and memory of stages
costs_file     costs files
phase_costs    the phases of layers, from which the time of an Overlap follows
slice_costs    the costs of the slices of a microbatch
tables         costs as arrays, for the kernels
simulate       Schedule + Costs -> Timeline
fill           run weight gradients in idle time
gathered       the memory of a pass whose blocks are gathered one by one
overlaps       make Overlaps of neighbouring F and B
offload        place OFFLOAD and RELOAD
checkpointing  choose the F that are checkpointed
compare        several schedules under the same costs
fit            Timeline -> Costs
attribution    a run compared with its simulation, and the causes of its idle time
megatron       timer logs of Megatron-LM -> Costs
layer_costs    LayerCosts: costs of a model's layers
layer_file     costs of layers as JSON
profile_costs  the measurements of a profile -> LayerCosts
refit          LayerCosts corrected by a recorded run
"""
