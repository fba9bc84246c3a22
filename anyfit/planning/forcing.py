"""A profile of which the search has nothing to decide but what a user leaves open (values/forced.py).

What is forced is taken out of the profile: passes of other sizes, other choices for the activations of blocks, other divisions of
the state. So every search, and every reason it gives, is the usual one. What cannot be is refused by name.
"""

from __future__ import annotations

from dataclasses import replace

from anyfit.values.forced import Activation, Forced
from anyfit.values.profile import BlockCost, Division, Pass, Profile

LEVELS = {"optimizer": (False, False), "gradients": (True, False), "all": (True, True)}  # gradients, weights


def held_to(profile: Profile, forced: Forced) -> Profile:
    """The profile with what is forced alone."""
    if forced.micro_batch is not None:
        profile = replace(profile, passes=_of_size(profile, forced.micro_batch))
    if forced.activations is not None:
        profile = replace(profile, passes=tuple(_with_choice(each, forced.activations) for each in profile.passes))
    if forced.shard is not None:
        profile = replace(profile, divisions=_divided(profile, forced))
    return profile


def _of_size(profile: Profile, micro_batch: int) -> tuple[Pass, ...]:
    share = profile.batch_size // profile.ranks
    if micro_batch > share:
        raise ValueError(f"micro-batch {micro_batch}: a rank's share of the batch is {share}; the nearest that works is {share}")
    found = tuple(each for each in profile.passes if each.micro_batch == micro_batch)
    if not found:
        sizes = [each.micro_batch for each in profile.passes]
        close = min(sizes, key=lambda size: abs(size - micro_batch))
        raise ValueError(f"micro-batch {micro_batch}: the model was not traced with it; the nearest that works is {close}")
    return found


def _with_choice(each: Pass, choice: Activation) -> Pass:
    blocks = tuple(_chosen(block, choice) for block in each.blocks)
    if choice != "keep" and not any(block.name and choice in block.choices for block in blocks):
        raise ValueError(f"activations {choice}: the model has no block that can be recomputed; keep works")
    return replace(each, blocks=blocks)


def _chosen(block: BlockCost, choice: Activation) -> BlockCost:
    """With this choice alone; a block that can only be kept is."""
    if not block.name or "recompute" not in block.choices:
        return replace(block, choices={name: cost for name, cost in block.choices.items() if name == "keep"})
    if choice not in block.choices:
        raise ValueError(
            f"activations {choice}: {block.name} is cut over the tensor axis, and recomputed as a whole; "
            "the nearest that works is recompute"
        )
    return replace(block, choices={choice: block.choices[choice]}, may_be_replayed=False)


def _divided(profile: Profile, forced: Forced) -> tuple[Division, ...]:
    divisions = profile.divisions
    if forced.shard == "none":
        return tuple(each for each in divisions if each.shards == 1)
    degrees = sorted({each.shards for each in divisions if each.shards > 1})
    if not degrees:
        raise ValueError(f"shard {forced.shard}: the data axis is 1, so that there is nobody to share with; shard none works")
    shards = forced.shards or degrees[-1]
    level = LEVELS[str(forced.shard)]
    found = tuple(each for each in divisions if each.shards == shards and (each.gradients, each.weights) == level)
    if not found:
        close = min(degrees, key=lambda each: abs(each - shards))
        raise ValueError(f"shard {forced.shard}={shards}: of {divisions[0].ranks} ranks, it can be over {close}")
    return found
