"""Rewards: functions that score a response, and the service that runs them in child processes.

`--reward NAME` takes an entry of `registry.REWARDS`; `--reward my_pkg.my_reward` takes a module, a
function or a class of yours on PYTHONPATH. Nothing is imported here: child processes start with it.
"""
