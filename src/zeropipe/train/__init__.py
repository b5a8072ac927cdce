"""`zeropipe train`: train a Hugging Face model with pipeline parallelism.

config       the training file: its fields, how it is read and written, and the rules that it must follow
inputs       loads what the file names: the model's config, the schedule, the layers of each stage, costs of layers
data         files -> the microbatches of a step, the same on every layout; a position that checkpoints save
loop         the run itself: set-up, steps, evaluation, checkpoints, metrics
compiling    whether blocks are compiled, where the file says `auto`
report       report.html: measured steps compared with predicted ones
stage_costs  predicted costs of the run's stages
schedule     the schedule that a run executes
preview      `--dry-run`: describes the run without starting it
start        starts the processes of a run, or uses those of torchrun
"""
