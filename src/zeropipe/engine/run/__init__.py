"""Local ranks, and `zeropipe run`: schedules on a model with synthetic tokens.

forkserver: a process that has torch imported and forks ranks
launch: `LocalRanks`, processes on this machine that run functions together
rank: the code of such a process
torchrun: joining the processes that torchrun or `LocalRanks` started
spec: `Job`, the request of `zeropipe run`, without torch
job: running a job
measure: running and recording steps
compare: gradients of a step compared with those of the full model
slow_dtypes: a warning for dtypes that this CPU is slow with
python_private: private functions of the standard library
"""
