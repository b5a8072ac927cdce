"""Checkpoints of a training run: saved by one layout, loaded by any other, converted to and from model directories.

save            save_checkpoint: collect the state of all ranks, and write it in the background
load            load_checkpoint: check the checkpoint on all ranks, then read this rank's shards
convert         checkpoints to and from Hugging Face model directories and peft adapters, without processes
merge           an adapter added to the weights of its base model
named_weights   the full weights of a running engine, one tensor at a time
catalog         the tensors of all stages under their names in the full model; ties
optimizers      the state of torch optimizers, under the names of their parameters
random_states   the states of random-number generators
fingerprint     a digest of the frozen weights, which does not depend on the layout
manifest        checkpoint.json: the index of tensors, files and checksums
writer          shards to files with torch's DCP; the folder of a checkpoint that is being written
reader          shards from files into tensors of any layout
"""
