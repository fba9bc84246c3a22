"""A step on its streams: what a candidate plan would take, played through event by event.

    computation   goes through its segments, and waits where the engine would
    fetches       weights in slots, for each use of them; activations, offloaded and back
    gradients     to the host, or over ranks
    updates       by the host or streamed through the device, and the way of their fresh weights

All of them, and what ranks exchange (`step`), put their work on servers that take one thing at a time and slow each other
(`clock`).
"""

from .computation import Simulated as Simulated
from .computation import Span as Span
from .computation import played as played
from .computation import redone_seconds as redone_seconds
from .computation import simulate as simulate
from .computation import simulated_under as simulated_under
