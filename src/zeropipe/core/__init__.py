"""What a schedule and a timeline are. Needs only the standard library; jit.py uses numba for large inputs.

Schedules
    action          Action, Kind, Overlap, and their text form
    placement       Problem, and Placement: the rank of every stage
    packed          actions as integers
    overlap         the time of an Overlap, from the `phases` of layers with experts
    slices          the sizes of the slices of a sequence
    schedule        Schedule and Program
    needs           the data dependencies of actions
    complete        check that a schedule is complete and placed
    check           check that it cannot hang, with eager and with rendezvous sends
    rendezvous      check the messages of a Program
    deadlock        the error of a schedule that is stuck
    lower           Schedule -> Program: add SEND and RECV
    shard_actions   Schedule -> Program: add UNSHARD, RESHARD and REDUCE_GRAD
    gradient_policy when gradients of sharded stages are reduced
    offload_actions OFFLOAD and RELOAD beside the actions of a schedule
    select_rows     some kinds of actions out of rows
    collectives     the order of collectives of sharded stages
    resize          the same schedule for another number of microbatches
Timelines
    timeline        Timeline: when each rank ran which action
    shard_timeline  its gathers and reductions of sharded stages
    offload_timeline  its copies of activations to hosts and back
    explain         the causes of idle time, and the critical path
    ranking         which of several timelines is the best
    waits           recorded actions without their waiting for messages
    notebook        the hook for drawing in a notebook
Shared by other packages
    formats         text forms of schedules and timelines
    model           facts about models
    mesh            the dimensions of a mesh of processes
    files           files that are written atomically
    limits          limits of the command line and the page
    units           numbers as text
    jit             one source for plain and compiled kernels
    workers         functions in worker processes (worker_main is the other side)
"""
