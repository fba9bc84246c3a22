"""Job -> Graph: the real model runs forward and backward on fake tensors, and everything it does is written down."""

from .trace import AreEnough as AreEnough
from .trace import trace as trace
from .trace import trace_all as trace_all
from .trace import update_of as update_of
