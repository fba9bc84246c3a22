"""The update: the user's own torch optimizer, run chunk by chunk on exact fp32 masters, on the device or on the host.

Any optimizer that treats each parameter by itself works; others are stepped whole, where all is on the device (optimizers.py).
Until its last line a job on a lane changes nothing that counts, so one that fails can be started again.

    updates.py      `Updates`: a step's order
    speculation.py  what begins before the norm is known
    route.py        what a route is, and what all share: `resident.py`, `streamed.py`, `host.py` and `disk.py` are the four
    stepper.py      the arithmetic of one chunk: a one-pass kernel for Adam, the optimizer's own `step` for others
    states.py       the optimizer's state by parameter name: saved, loaded, adopted
"""

from .route import Pace as Pace
from .stepper import adam_keys as adam_keys
from .updates import Updates as Updates
