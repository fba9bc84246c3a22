"""Job -> Graph: the real model runs forward and backward on fake tensors, and everything it does is written down."""

from .trace import trace as trace
