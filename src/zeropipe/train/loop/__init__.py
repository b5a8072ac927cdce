"""The run itself, on every rank.

trainer      train(config): set-up, steps, evaluation, checkpoints and the end, in this order
setup        device, mesh, stages and Engine of a rank
data_barrier the data is prepared by the first rank, while the others wait
steps        training steps and evaluation
optimizer    torch's optimizers, in groups; the learning-rate schedule
checkpoints  saved, pruned, found and resumed from; the fields that differ from those of a checkpoint's run
metrics      progress lines, metrics.jsonl, TensorBoard, Weights & Biases; memory and MFU
signals      SIGTERM and Ctrl-C end a run after the current step
output_lock  a lock of the run's folder
export       a model directory, or an adapter's, from the last checkpoint
"""
