"""Communication between ranks: connections, messages, and how one rank's failure stops all.

collective    work that all ranks do: an error on one is raised on all
ranks         processes that monitor each other over the job's store
communicator  connections of an Engine: exchanges, channels, groups for sums
channels      one directed edge: its sender, its receiver
messages      shapes of messages, their headers, the cache of shapes
broadcast     any value from one rank to its pipeline
rendezvous    how processes find each other in the store
faults        the error board: the first error, posted by one rank and raised by all
heartbeat     status of ranks, and the diagnosis of a long wait
watchdog      the threads that publish heartbeats and stop this rank
threads       start and join threads, calls and receives in threads
"""
