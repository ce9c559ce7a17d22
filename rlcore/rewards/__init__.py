"""Rewards: functions that score a response, and the service that runs them in child processes.

`--reward NAME` selects an entry of `registry.REWARDS`. `--reward my_pkg.my_reward` selects a user's
module, function or class on PYTHONPATH. This file imports nothing, so that child processes start
fast.
"""
