"""Plans: what to run for a model, GPUs, memory and a batch.

plan        `zp.plan`: try candidates, rank those that fit
task        the checked arguments of a plan, with costs and settings
layouts     the layouts of GPUs: pipeline x sharded data x tensor parallelism
candidates  what to try: every layout, microbatch size and checkpointing mode, with every schedule and cut
runs        the layouts and microbatches of a task
rolling     the candidates among them with rolling gradients
slicing     candidates with slices of sequences
offloading  candidates that copy activations to the host
partial_checkpointing  candidates that checkpoint some F
context     what all candidates of a plan share: costs of layers, memory limit, machine size
score       one candidate simulated: the seconds of a step and the memory of a rank, by purpose
pool        groups of candidates scored, in worker processes if there are many
refine      for the best rows only: gaps to the lower bound, and searched schedules
rows        Candidate and PlanRow
closest     if nothing fits: what comes closest, and what would make it fit
untried     what a plan does not try
result      Plan: rows, front, what does not fit, and why a row is slower
levers      what each lever of the best row bought
data        a plan as JSON data, for the command line and the page
write       a row as a training file
"""
