"""What a fork of `tests.forks` has imported when it begins."""

import threading

import rlcore.cli.builders
import rlcore.cli.train
import rlcore.cli.world
import rlcore.mcore.learner  # noqa: F401
import tests.kit
import tests.runs  # noqa: F401

assert threading.active_count() == 1, "a thread does not survive a fork"
