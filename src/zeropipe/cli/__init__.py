"""The command line. Commands import what they use when they run, so that `zeropipe list` starts at once.

main           the group of commands, and how errors are printed
command        options with old names, and `--help` in groups
param_types    types of option values
options        the options that several commands share, with one meaning each
request        a command line as one value: schedules, sizes, costs
cost_source    the costs of a request: per rank or stage, per layer, or of a training file
layer_options  options for costs of layers
job_file       .toml files with schedule, sizes and costs
training_file  training files in place of job files
output         tables, numbers and JSON on stdout
progress       progress on a terminal's stderr

One module per command: show (also list and draw), simulate, compare, estimate, profile, plan, search, check, app, run,
train, trace, checkpoint, doctor. Their results are printed by compare_grid, run_output, plan_output, trace_output,
train_output and layer_table.
"""

from zeropipe.cli.main import main

__all__ = ["main"]
