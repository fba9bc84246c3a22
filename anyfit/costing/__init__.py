"""Graph x Machine -> Profile: what every block costs in seconds and bytes."""

from .cost import cost as cost
