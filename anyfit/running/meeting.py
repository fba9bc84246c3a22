"""How ranks meet: at an address that all know, as one process group."""

from __future__ import annotations

import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .store import POLL_SECONDS, LostRankError, ranks_in_words
from .team import Team

MARGIN_SECONDS = 60.0  # a collective's own limit lies so much behind the one that tells what is waited for
_dist: Any = dist


def join(index: int, count: int, address: tuple[str, int], device: str, hang_seconds: float, seconds: float = 600.0) -> Team:
    """Meets the other ranks, at an address that all know. `device` names what this one computes on: "cpu", or a GPU by its UUID.

    Ranks that each have a GPU of their own talk through NCCL; on CPUs, and where several share a GPU, through gloo.
    """
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
    limit = timedelta(seconds=seconds)
    try:
        store, _, _ = next(iter(_dist.rendezvous(f"env://?rank={index}&world_size={count}", timeout=limit)))
    except dist.DistError as error:
        raise LostRankError(
            f"rank {index} of {count} did not meet the others at {address[0]}:{address[1]} within {seconds:.0f} s: {error}"
        ) from None
    place = f"{socket.gethostname()} {device}"
    try:
        store = _fresh(store, index, count, limit)
        store.set(f"place/{index}", place)
        places = [store.get(f"place/{each}").decode() for each in range(count)]
    except dist.DistError as error:
        raise LostRankError(f"rank {index} of {count} waited {seconds:.0f} s for the others: {error}") from None
    has_own_gpus = device != "cpu" and len(set(places)) == count
    dist.init_process_group(
        "nccl" if has_own_gpus else "gloo",
        store=_dist.PrefixStore("group", store),
        rank=index,
        world_size=count,
        timeout=timedelta(seconds=hang_seconds + MARGIN_SECONDS),
    )
    return Team(hang_seconds, ends_process=True, place=place, made_group=True)


def _fresh(store: Any, index: int, count: int, limit: timedelta) -> Any:
    """The part of a store that these processes have to themselves. torchrun's outlives ranks that are started again, and holds
    what they had written before: so each asks under a name that nobody else ever had, and rank 0 tells it the part's."""
    mine = uuid.uuid4().hex
    store.set(f"anyfit/asks/{index}", mine)
    if index:
        store.wait([f"anyfit/told/{mine}"], limit)
        part, _, ranks = store.get(f"anyfit/told/{mine}").decode().partition(" ")
        if int(ranks) != count:
            raise ValueError(f"rank {index} is one of {count} (WORLD_SIZE, or SLURM_NTASKS), and rank 0 of {ranks}: set it alike")
        store.set(f"anyfit/{part}/knows/{index}", "")
    else:
        part, until = mine, time.monotonic() + limit.total_seconds()
        while missing := [each for each in range(1, count) if not store.check([f"anyfit/{part}/knows/{each}"])]:
            if time.monotonic() > until:
                raise dist.DistStoreError(f"{ranks_in_words(missing)} did not come")
            for each in missing:  # who asks may be one that is no more: it is asked again
                if store.check([f"anyfit/asks/{each}"]):
                    store.set(f"anyfit/told/{store.get(f'anyfit/asks/{each}').decode()}", f"{part} {count}")
            time.sleep(POLL_SECONDS)
    return _dist.PrefixStore(f"anyfit/{part}", store)
