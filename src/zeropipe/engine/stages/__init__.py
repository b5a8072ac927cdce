"""Models cut along their depth into stages.

contract     the interface between the engine and a stage: StageInfo, describe_stage
plain        PlainStage: a list of modules, run one after the other
build        hf_stages, hf_model, module_stages; Model: config, weights and family of a Hugging Face model
hf           HFStage: some layers of a Hugging Face decoder model
cut          how a model's own forward is made to begin and to end at a layer
packing      packed sequences (cu_seqlens): position ids, masks and rotary embeddings that keep them apart
packed_attention  the kernels that attend in packed rows without a dense mask
slices       slices of sequences, run one after the other; slice_attention: their attention to those before
sequence_parts  the parts of a sequence that the processes of `cp` have
router_loss  the load-balancing loss of a mixture of experts, summed over stages

families     Family: where a model can be cut, detected by running it; QUIRKS: exceptions by model type
small_model  small copies of a model for verification
verify       compares the stages of a small copy with the copy itself: loss and gradients

skeleton     ModelSkeleton: names and shapes of a full model, on the meta device
weights      first values of stages: random from a seed
devices      devices as users name them
memory       weights of a model in memory
directory    weights of a directory of safetensors
reader       the tensors of such a directory, one by one
quantized    fp8 and mxfp4 tensors, dequantized when they are read
adapters     LoRA adapters of peft
save         save_stages: stages -> a model directory, or an adapter directory
staging      the files of one save, and how they replace the previous model

A model type that needs special treatment (another mask function, other sizes of its small copy, a refusal) gets an
entry in `families.QUIRKS`; no other file changes.
"""
