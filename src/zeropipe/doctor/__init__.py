"""What is installed, what this machine has, and what will be slow and why: `zeropipe doctor`.

packages   the extras, and the versions of their packages
machine    cores, GPUs and links, seen by the system, nvidia-smi and torch
problems   what cannot run or will be slow, each with a command that mends it

Works without torch and without a GPU, and reports either instead of failing.
"""
