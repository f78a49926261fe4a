"""Implementations in processes of their own, with limits of time and memory.

A process that dies, hangs or uses too much memory costs one item, and the next item gets a fresh
process. Nothing of this is imported if no implementation is isolated.

Three pools were tried before this was written. Pebble notices neither the end of a process that
exits with 0 (it waits until the time is up) nor its memory. With loky, and with the standard
library's pool, a process that is killed while it hands back a result leaves the pool waiting, and
outlives a parent that is killed. So these are multiprocessing's own processes and connections, one
of each for an implementation.
"""

from conformance.running.isolation.messages import Limits, StandIn
from conformance.running.isolation.supervisor import Supervisor, supervise

__all__ = ["Limits", "StandIn", "Supervisor", "supervise"]
