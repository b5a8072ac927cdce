"""Schedules: one file for each built-in one, and the registry.

registry  `zp.register`, `zp.build`: names, facts and options of schedules
lane      Lane: writes the row of one rank, action by action
user      schedules of users: files and Python modules
validate  checks of a user's schedule before it runs
advice    hints about sizes that waste time
blocks, rounds, squeeze  patterns that several schedules share
"""
