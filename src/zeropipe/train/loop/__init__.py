"""The run itself, on every rank.

job          train(config): everything in its order
setup        device, mesh, stages, Engine
optimizer    torch's optimizers, in groups; rate: the learning rate of a step
steps        a step: data, gradients, finite or left out
evaluation   the loss on held-out data
kept         checkpoints: written, kept, found again
resume       the checkpoint that a run goes on from: does it belong to this model?
metrics      the progress line, metrics.jsonl, TensorBoard, Weights & Biases
signals      SIGTERM and Ctrl-C end a run after its step
sole         one run for each folder
export       a model directory, or an adapter's, from the last checkpoint
"""
