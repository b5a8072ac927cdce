"""Text forms of schedules and timelines, and readers of text from users.

csv          torch.distributed.pipelining's CSV
json         zeropipe's own JSON
torch_trace  traces of torch.profiler as a measured Timeline
action_names the names of actions in traces of other trainers
parse        JSON and TOML in bounded time and memory
toml         TOML text of values and tables
"""
