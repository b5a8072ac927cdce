"""Stages on a DeviceMesh: sharded over `dp_shard` with FSDP2, divided over `tp`, `ep` and `cp`.

parallelize         parallelize(): shard the stages of a rank
sharded_stage       the FSDP units of a stage: gathered, freed and reduced when the Program says so
unit_gatherer       the order in which the units of a stage are gathered, and when they are freed
reduce_limit        how many reduces of a rank run at the same time
tensor_parallel     tensor parallelism by a plan; checks of plans
tp_check            a small copy of the model, sharded by the plan and compared with the full model
tp_stage            one stage sharded by a plan
tp_adapters         linear layers with a LoRA adapter sharded over `tp`
tp_layers           single layers sharded over `tp`: linear layers, experts, embeddings
sequence_parallel   sequences sharded over `tp` outside attention and MLP
vocab_parallel      logits sharded over the vocabulary, and their cross entropy
tp_collectives      collectives of `tp` with their gradients: copy, reduce, gather, scatter; and of `cp`

expert_parallel     the experts of each layer divided over a part of a data dimension: `expert_stacks`
ep_check            a small copy of the model with divided experts, compared with the full model

context_parallel    parts of every sequence on the processes of `cp`
cp_stage            one stage with its part of each sequence: inputs, masks and sums
cp_attention        attention over the keys and values of all processes
ring_attention      keys and values passed round a ring of the processes
cp_check            a small copy of the model in parts of sequences, compared with the full model
slice_check         the same in slices of sequences
"""
