"""`zeropipe train`: a Hugging Face model directory in, a better one out.

config   what a run is asked to do: typed, read from TOML and the command line, checked before anything starts
data     samples from files to the microbatches of a step, the same whatever the layout; a position that can be saved
loop     the run itself: set-up, steps, evaluation, checkpoints, metrics, the end
shape    the model, the schedule and the layers of each stage that a run means
report   measured steps beside the predicted ones
"""
