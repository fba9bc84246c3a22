"""What the engine does and the planner counts. Both import it from here, so that a forecast cannot drift from what runs."""

from collections.abc import Iterable

GRADIENT_BUFFERS = 5  # staging buffers for gradients of host updates: one fills while others are copied to the host
REDUCTION_BUFFERS = 3  # staging buffers for gradients that ranks sum: one fills, one is reduced, one is copied to the host
STREAMED_DEPTH = 3  # streamed chunks at once: one is copied to the device, one is updated, one is copied back
DISK_DEPTH = 3  # chunks with state on the disk at once: one is read, one is updated, one is written
DISK_BLOCK_BYTES = 2**22  # of what is read or written there at once
DISK_REQUESTS = 8  # of these in flight, each way
OFFLOADED_AT_ONCE = 2  # blocks whose activations take room on the device: one is computed, the one before goes to the host
LATER = 2**30  # order among the host's updates, of what can wait for all weights


def staging_bytes(chunks: Iterable[int]) -> list[int]:
    """Sizes of the staging buffers for gradients of chunks of so many bytes, which all go to the host: a single large chunk, such
    as that of an embedding, needs a single large buffer.

    >>> staging_bytes([10, 10, 10, 90, 10, 10, 10])
    [90, 10, 10, 10, 10]
    """
    return sorted(chunks, reverse=True)[:GRADIENT_BUFFERS]


def is_two_phase(chunk: int, share: float) -> bool:
    """Whether the host updates this chunk in two phases, weights before moments, where it does so with a share of all chunks.
    They are spread evenly, as every part of forward waits for some of them.

    >>> [is_two_phase(chunk, 0.5) for chunk in range(4)]
    [False, True, False, True]
    """
    return int((chunk + 1) * share) > int(chunk * share)
