"""Hardware -> Machine: every rate and limit that a forecast rests on, measured where it will be used.

`probe.measure` measures, `cache.cached` remembers. One subject a file: compute, memory, operations, copies, host, update, disk,
links; and calls, which are those of a traced model.
"""
