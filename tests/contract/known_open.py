"""Cells that do not hold yet: by case and column, what happens instead. Each is a strict xfail: one that is mended says so."""

from __future__ import annotations

KNOWN_OPEN: dict[tuple[str, str], str] = {
    ("mean over a mask", "cut"): "equal:",
    ("mean over a mask", "ranks"): "equal:",
    ("cross entropy with ignored labels", "ranks"): "dead: TimeoutError: no end in 60 s",
    ("labels of minus 100 in the batch", "cut"): "equal:",
    ("labels of minus 100 in the batch", "ranks"): "equal:",
    ("sum over the batch", "cut"): "equal:",
    ("divided by a fixed number", "cut"): "equal:",
    ("the hardest half of the batch", "tight"): "wrong: the losses: off by 1.8e-01, of 1.5e+00",
    ("the hardest half of the batch", "cut"): "wrong: the losses: off by 1.8e-01, of 1.5e+00",
    ("weighted cross entropy", "cut"): "equal:",
    (
        "learned weights of tasks",
        "ranks",
    ): "refused: RuntimeError: RuntimeError: expand(torch.FloatTensor{[1]}, size=[]): the number of sizes pr",
    (
        "tied by data",
        "tight",
    ): "refused: ValueError: embed.weight shares its memory with head.weight; tie them as one object: module",
    (
        "tied to a transposed view",
        "tight",
    ): "refused: ValueError: down shares its memory with stem.weight; tie them as one object: module.a.weigh",
    (
        "a buffer that views a weight",
        "tight",
    ): "refused: ValueError: stem.weight shares its memory with view; give that a clone(). This plan has wei",
    (
        "a buffer that views a weight",
        "host",
    ): "refused: ValueError: stem.weight shares its memory with view; give that a clone(). This plan has wei",
    (
        "an attribute that is a detached weight",
        "tight",
    ): "refused: ValueError: head.weight shares its memory with kept; give that a clone(). This plan has wei",
    (
        "an attribute that is a detached weight",
        "host",
    ): "refused: ValueError: head.weight shares its memory with kept; give that a clone(). This plan has wei",
    (
        "overlapping views as parameters",
        "tight",
    ): "refused: ValueError: first shares its memory with second; tie them as one object: module.a.weight =",
    (
        "parameters of one flat tensor",
        "tight",
    ): "refused: ValueError: stem.weight shares its memory with flat; give that a clone(). This plan has wei",
    (
        "parameters of one flat tensor",
        "host",
    ): "refused: ValueError: stem.weight shares its memory with flat; give that a clone(). This plan has wei",
    (
        "a transposed parameter and a branch on contiguity",
        "tight",
    ): "refused: ValueError: turned does not lie in order in memory (strides (1, 8), as channels_last or a t",
    (
        "a transposed parameter and a branch on contiguity",
        "host",
    ): "refused: ValueError: turned does not lie in order in memory (strides (1, 8), as channels_last or a t",
    (
        "channels last weights",
        "tight",
    ): "refused: ValueError: stem.weight does not lie in order in memory (strides (27, 1, 9, 3), as channels",
    (
        "weights clamped in a block",
        "recomputed",
    ): "refused: ValueError: the plan recomputes blocks.0, and it edits its parameter blocks.0.up.weight in",
    ("weights clamped in a block", "host"): "equal:",
    (
        "weights clamped in a block",
        "both",
    ): "refused: ValueError: the plan recomputes blocks.0, and it edits its parameter blocks.0.up.weight in",
    ("weights edited through numpy", "tight"): "refused: ValueError: assignment destination is read-only",
    ("weights edited through numpy", "host"): "refused: ValueError: assignment destination is read-only",
    ("weights edited by foreach", "tight"): "wrong: the losses: off by 1.0e-02, of 1.2e+00",
    ("weights edited by foreach", "host"): "wrong: the losses: off by 1.3e-02, of 1.2e+00",
    ("weights normalised in forward", "host"): "equal:",
    (
        "embedding with max norm",
        "recomputed",
    ): "refused: ValueError: the plan recomputes embed, and it edits its parameter embed.weight in forward;",
    ("embedding with max norm", "host"): "equal:",
    (
        "embedding with max norm",
        "both",
    ): "refused: ValueError: the plan recomputes embed, and it edits its parameter embed.weight in forward;",
    (
        "weights read by functional call",
        "tight",
    ): "refused: OverLimitError: 58.8 KiB of device memory are needed in backward or the update, outside eve",
    (
        "weights swapped for others in forward",
        "tight",
    ): "refused: OverLimitError: 11.2 KiB of device memory are needed in backward or the update, outside eve",
    ("ema teacher inside the model", "tight"): "wrong: the losses: off by 1.1e-01, of 1.9e+00",
    ("ema teacher inside the model", "cut"): "wrong: the losses: off by 4.0e-02, of 1.9e+00",
    (
        "parameter hooks that scale",
        "tight",
    ): "refused: OverLimitError: 45.5 KiB of device memory are needed in backward or the update, outside eve",
    (
        "post accumulate hooks that clip",
        "tight",
    ): "refused: RuntimeError: the gradient of head.bias has left for the host, as the plan says; run.metric",
    ("post accumulate hooks that clip", "cut"): "wrong: the losses: off by 2.7e-02, of 1.8e+00",
    ("an update in a hook while backward runs", "tight"): "wrong: the losses: off by 2.5e-02, of 1.5e+00",
    ("an update in a hook while backward runs", "cut"): "wrong: the losses: off by 2.5e-02, of 1.5e+00",
    (
        "hooks of all modules",
        "recomputed",
    ): "refused: ValueError: the plan recomputes blocks.0, and its output differs when it is run again: by u",
    (
        "hooks of all modules",
        "both",
    ): "refused: ValueError: the plan recomputes blocks.0, and its output differs when it is run again: by u",
    (
        "gradients of each sample by vmap",
        "ample",
    ): "refused: RuntimeError: torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks.",
    (
        "gradients of each sample by vmap",
        "tight",
    ): "refused: RuntimeError: torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks.",
    (
        "gradients of each sample by vmap",
        "recomputed",
    ): "refused: RuntimeError: Cannot access data pointer of Tensor that doesn't have storage",
    (
        "gradients of each sample by vmap",
        "host",
    ): "refused: RuntimeError: torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks.",
    (
        "gradients of each sample by vmap",
        "cut",
    ): "refused: RuntimeError: torch.func.{grad, vjp, jacrev, hessian} don't yet support saved tensor hooks.",
    ("jacobian by forward mode", "ample"): "refused: NotImplementedError: Cannot access storage of TensorWrapper",
    ("jacobian by forward mode", "tight"): "refused: NotImplementedError: Cannot access storage of TensorWrapper",
    (
        "jacobian by forward mode",
        "recomputed",
    ): "refused: RuntimeError: Cannot access data pointer of Tensor that doesn't have storage",
    ("jacobian by forward mode", "cut"): "refused: NotImplementedError: Cannot access storage of TensorWrapper",
    (
        "an inner step of learning",
        "tight",
    ): "refused: NoPlan: Chain does not fit: with micro-batches of 4 it needs 83.9 KiB of device memory (wit",
    (
        "the users own autocast",
        "tight",
    ): "refused: OverLimitError: 45.9 KiB of device memory are needed in blocks.2.up, and 45.5 KiB are allow",
    ("a backward of its own inside the loss", "tight"): "wrong: the losses: off by 8.3e-02, of 1.2e+00",
    ("a backward of its own inside the loss", "cut"): "wrong: the losses: off by 1.9e-02, of 1.2e+00",
    (
        "blocks in inference mode",
        "host",
    ): "refused: RuntimeError: Inplace update to inference tensor outside InferenceMode is not allowed.You c",
    (
        "a list that is as long as the batch by accident",
        "tight",
    ): "refused: RuntimeError: The size of tensor a (4) must match the size of tensor b (2) at non-singleton",
    ("a nested tensor", "tight"): "refused: OverLimitError: 68.8 KiB of device memory are needed in backward or the update",
    (
        "a scripted model",
        "tight",
    ): "refused: OverLimitError: 16.5 KiB of device memory are needed in backward or the update, outside eve",
    ("batch norm", "ranks"): "wrong: the losses: off by 3.8e-01, of 1.7e+00",
    ("spectral norm of a linear", "tight"): "wrong: the losses: off by 4.4e-04, of 1.3e+00",
    ("exponential mean in a buffer", "tight"): "wrong: the losses: off by 9.6e-03, of 1.2e+00",
    ("a plain attribute that changes", "tight"): "wrong: the losses: off by 8.8e-02, of 1.2e+00",
    ("a counter in a dictionary", "tight"): "wrong: the losses: off by 9.1e-02, of 1.2e+00",
    ("a counter in a class", "tight"): "wrong: the losses: off by 1.1e-01, of 1.2e+00",
    ("a counter in another object", "cut"): "wrong: the losses: off by 1.1e-01, of 1.2e+00",
    (
        "a tensor attribute that is no buffer",
        "tight",
    ): "refused: FakeTensorDeviceMismatchError: Expected all tensors to be on the same device, but found at",
    ("memory bank of earlier samples", "cut"): "wrong: the losses: off by 4.7e+00, of 1.3e+01",
    ("layer drop by pythons random", "tight"): "wrong: the losses: off by 2.1e-01, of 1.3e+00",
    ("layer drop over blocks", "tight"): "wrong: the losses: off by 1.3e-01, of 1.3e+00",
    ("numpys random in forward", "tight"): "wrong: the losses: off by 1.2e-01, of 1.2e+00",
    ("a torch generator of its own", "tight"): "wrong: the losses: off by 2.1e-01, of 1.5e+00",
    ("a numpy generator of its own", "tight"): "wrong: the losses: off by 2.7e-01, of 1.3e+00",
    ("a generator outside the model", "cut"): "wrong: the losses: off by 8.3e-02, of 1.3e+00",
    ("extra state of a module", "tight"): "wrong: the losses: off by 7.0e-02, of 1.2e+00",
    ("running mean of the loss in a buffer", "tight"): "wrong: the losses: off by 2.9e-01, of 1.3e+00",
    ("a residual network with batch norm", "tight"): "wrong: the losses: off by 7.5e-02, of 5.6e+00",
    ("an lstm", "tight"): "refused: OverLimitError: 52.6 KiB of device memory are needed in body, and 32.5 KiB are allowed; the",
    ("the loss of llama itself", "tight"): "wrong: the losses: off by 9.6e-02, of 1.5e+01",
    ("the loss of llama itself", "cut"): "wrong: the losses: off by 6.2e-02, of 1.5e+01",
    (
        "llama by from huggingface",
        "tight",
    ): "refused: OverLimitError: 169 KiB of device memory are needed in backward or the update, outside ever",
    (
        "bart with its cache",
        "tight",
    ): "refused: OverLimitError: 117 KiB of device memory are needed in backward or the update, outside ever",
    (
        "adafactor",
        "tight",
    ): "refused: OverLimitError: 56.5 KiB of device memory are needed in backward or the update, outside eve",
    ("adafactor", "ranks"): "refused: RuntimeError: ValueError: Adafactor steps a piece of a parameter otherwise than the whole,",
    ("muon", "cut"): "wrong: the losses: off by 2.2e-04, of 1.2e+00",
    (
        "a counter on the optimizer",
        "host",
    ): "refused: ValueError: Counting changes its 'count' in a step, for all its parameters together: its pa",
    (
        "a norm across parameters",
        "host",
    ): "refused: ValueError: Normed cannot be tried on small parameters (RuntimeError: stack expects a non-e",
    (
        "a norm of every parameter",
        "ranks",
    ): "refused: RuntimeError: ValueError: Lars steps a piece of a parameter otherwise than the whole, and t",
    (
        "noise in the update",
        "host",
    ): "refused: ValueError: Langevin draws random numbers in its step: its parameters have to be stepped to",
    (
        "step hooks",
        "host",
    ): "refused: ValueError: SGD has hooks around its step (register_step_pre_hook, register_step_post_hook)",
    (
        "a replaced step",
        "host",
    ): "refused: ValueError: the step of SGD was replaced by other code: its parameters have to be stepped t",
    (
        "lookahead around another optimizer",
        "tight",
    ): "refused: RuntimeError: Attempting to broadcast a dimension of length 64 at -1! Mismatching argument",
    (
        "a group added after the start",
        "tight",
    ): "refused: RuntimeError: run.optimizer has parameter groups of [20, 2] parameters, and had [20] at the",
    (
        "a group added after the start",
        "host",
    ): "refused: RuntimeError: run.optimizer has parameter groups of [20, 2] parameters, and had [20] at the",
    (
        "state that is cleared",
        "tight",
    ): "refused: RuntimeError: run.optimizer.state is not kept there: the plan has the optimizer's state in",
    (
        "state that is cleared",
        "host",
    ): "refused: RuntimeError: run.optimizer.state is not kept there: the plan has the optimizer's state in",
    (
        "a parameter without dimensions",
        "ranks",
    ): "refused: RuntimeError: RuntimeError: expand(torch.FloatTensor{[1]}, size=[]): the number of sizes pr",
    ("parameters used by some steps", "tight"): "wrong: the losses: off by 1.7e-01, of 1.1e+00",
    (
        "thawed after some steps",
        "tight",
    ): "refused: RuntimeError: stem.weight was frozen when the run started and has a gradient now; requires_",
    (
        "thawed after some steps",
        "host",
    ): "refused: RuntimeError: stem.weight was frozen when the run started and has a gradient now; requires_",
    ("complex weights", "ample"): "equal:",
    ("complex weights", "recomputed"): "equal:",
    ("complex weights", "cut"): "equal:",
    ("embedding with padding scaled by frequency", "tight"): "wrong: the losses: off by 1.5e-04, of 1.3e+01",
    ("embedding with padding scaled by frequency", "cut"): "wrong: embed.weight: off by 1.9e-02, of 2.8e+01",
    ("sparse gradients", "tight"): "equal:",
    ("a subclass of parameter", "ample"): "refused: AttributeError: 'FakeTensor' object has no attribute 'decay'",
    ("a subclass of parameter", "cut"): "refused: AttributeError: 'FakeTensor' object has no attribute 'decay'",
    ("pythons random in the loss", "tight"): "wrong: the losses: off by 3.5e-01, of 1.1e+00",
    ("numpys random in the loss", "cut"): "wrong: the losses: off by 2.9e-01, of 2.0e+00",
    ("a counter in the loss", "cut"): "wrong: the losses: off by 1.1e-02, of 1.2e+00",
    ("a loss that is an object", "tight"): "wrong: the losses: off by 5.9e-01, of 1.8e+00",
    ("a loss with a generator of its own", "cut"): "wrong: the losses: off by 5.3e-01, of 1.5e+00",
    ("a loss that writes a file", "tight"): "wrong: the losses: off by 3.0e-01, of 1.5e+00",
}

# Of these, those that end the process: they are not run.
ENDS_THE_PROCESS: set[tuple[str, str]] = set()
