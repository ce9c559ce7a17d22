"""Untrusted programs: namespaces, limits, deadlines. See README.md here.

`box.Sandbox` is the door. `inside`, `program`, `judge`, `values` and `confine` run within the walls
and import the standard library alone. Nothing is imported here: the interpreters within start with
it.
"""
