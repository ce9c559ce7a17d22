"""Sandbox for untrusted code: namespaces, limits, deadlines. See README.md in this folder.

`box.Sandbox` is the interface. `inside`, `program`, `judge`, `values` and `confine` run inside the
sandbox and import only the standard library. This file imports nothing, because the interpreters
inside the sandbox import this package.
"""
