"""Plan x model -> a placed model: state in flat chunks, gradients collected, updates exact."""

from .place import Placed as Placed
from .place import place as place
