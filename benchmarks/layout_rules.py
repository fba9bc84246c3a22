"""Do the rules of how ops may be cut hold on this device?

    python -m benchmarks.layout_rules [--blocks WORD ...] [--ranks 2 3 4] [--device cuda|cpu]

Captures blocks of several models on the GPU (on the CPU where there is none), in bf16 and fp32, so that the device's own kernels
are in their graphs: attention by flash, memory-efficient and cuDNN kernels, dropout with its mask, fused norms, grouped products.
Every distinct call is run once whole and, for every rule, once for each of n ranks on what a rank would have. A line an op: in
how many calls it was found, how many rules were run, and which do not hold, with the reason. Ends with 1 where one does not.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel

from anyfit.layouts.capture import Captured, capture
from anyfit.layouts.check import distinct, values_of, why_wrong
from anyfit.layouts.graph import name_of, value_of
from anyfit.layouts.guard import NotCaptured, tensor_leaves
from anyfit.layouts.rules.table import family_of, outers_of, rules_of

ROWS, HEADS, VOCABULARY = 12, 12, 192
LENGTH, WIDTH = (96, 16) if torch.cuda.is_available() else (12, 4)  # a CPU is slow, and has one kernel
HIDDEN = HEADS * WIDTH
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "head_dim": WIDTH, "max_position_embeddings": 2 * LENGTH, "use_cache": False, **TOKENS,
}  # fmt: skip
ENCODER = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS}
GPT2 = {"n_layer": 1, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": LENGTH, "use_cache": False, **TOKENS}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {"d_model": HIDDEN, "d_kv": WIDTH, "d_ff": 2 * HIDDEN, "num_layers": 1, "num_heads": HEADS, "use_cache": False, **TOKENS}
MIXTURE = {**DECODER, "num_experts": HEADS, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
IMAGES = {"image_size": 32, "patch_size": 4, "num_channels": 3, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


class Called(NamedTuple):
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Model(NamedTuple):
    made_by: str
    kind: str
    options: dict[str, Any]
    path: str  # of the block
    inputs: str = "words"


MODELS = {
    "gpt2": Model("GPT2Model", "gpt2", {**GPT2, **STILL}, "h.0"),
    "gpt2, dropout": Model("GPT2Model", "gpt2", GPT2, "h.0"),
    "gpt2, dropout outside of attention": Model("GPT2Model", "gpt2", {**GPT2, "attn_pdrop": 0.0}, "h.0"),
    "llama, grouped heads": Model("LlamaModel", "llama", {**DECODER, "num_attention_heads": 2 * HEADS}, "layers.0"),
    "llama, padded": Model("LlamaModel", "llama", DECODER, "layers.0", "padded"),
    "t5, encoder": Model("T5Model", "t5", {**T5, "dropout_rate": 0.0}, "encoder.block.0", "halves"),
    "t5, decoder, dropout": Model("T5Model", "t5", T5, "decoder.block.0", "halves"),
    "vit": Model("ViTModel", "vit", {**ENCODER, **IMAGES}, "layers.0", "images"),
    "bert, padded": Model("BertModel", "bert", {**ENCODER, **TOKENS}, "encoder.layer.0", "padded"),
    "qwen3 moe": Model("Qwen3MoeModel", "qwen3_moe", MIXTURE, "layers.0", "few words"),
}


def inputs(kind: str, device: torch.device) -> dict[str, Tensor]:
    torch.manual_seed(1)
    words = torch.randint(3, VOCABULARY, (ROWS, 24 if kind == "few words" else LENGTH), device=device)
    if kind == "images":
        return {"pixel_values": torch.randn(ROWS, 3, 32, 32, device=device)}
    if kind == "halves":
        return {"input_ids": words, "decoder_input_ids": words.flip(1)}
    if kind == "padded":
        mask = torch.ones_like(words)
        mask[::2, LENGTH // 2 :] = 0
        return {"input_ids": words, "attention_mask": mask}
    return {"input_ids": words}


def of_model(model: Model, dtype: torch.dtype, device: torch.device) -> Called:
    """One block of it, with what a training forward gives it."""
    import transformers

    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(model.kind, **model.options)
    if model.kind == "qwen3_moe":
        config._experts_implementation = "grouped_mm" if dtype == torch.bfloat16 else "batched_mm"
    built: nn.Module = getattr(transformers, model.made_by)(config).to(device, dtype).train()
    block, found = built.get_submodule(model.path), []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(torch.utils._pytree.tree_map(_leaf, (args, kwargs)))

    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    given = inputs(model.inputs, device)
    built(**{name: each.to(dtype) if each.is_floating_point() else each for name, each in given.items()})
    handle.remove()
    return Called(block, *found[0])


def _leaf(each: Any) -> Any:
    return each.detach().clone().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each


# ---------------------------------------------------------------------- one kernel, and a head with its loss


class Attention(nn.Module):
    """By one kernel, with a bias that learns or without."""

    def __init__(self, backend: SDPBackend, is_causal: bool, biased: bool) -> None:
        super().__init__()
        self.backend, self.is_causal = backend, is_causal
        self.bias = nn.Parameter(torch.randn(1, HEADS, 4 * LENGTH, 4 * LENGTH)) if biased else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            return F.scaled_dot_product_attention(query, key, value, self.bias, is_causal=self.is_causal)


class Head(nn.Module):
    """Embedding, head and loss, with targets that do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=3)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(self.words(words)).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-100)


def heads(dtype: torch.dtype, device: torch.device) -> Called:
    words = inputs("words", device)["input_ids"]
    targets = torch.where(torch.arange(LENGTH, device=device) > torch.arange(ROWS, device=device)[:, None] * 5, words, -100)
    return Called(Head().to(device, dtype), (words, targets), {})


def kernels(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Callable[[], Called]]]:
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    for backend in backends if device.type == "cuda" else backends[:1]:
        for is_causal, biased in ((True, False), (False, False), (False, True)):
            if (biased and backend != SDPBackend.EFFICIENT_ATTENTION) or (
                device.type == "cuda" and dtype == torch.float32 and backend != SDPBackend.EFFICIENT_ATTENTION
            ):
                continue

            def make(backend: SDPBackend = backend, is_causal: bool = is_causal, biased: bool = biased) -> Called:
                torch.manual_seed(2)
                block = Attention(backend, is_causal, biased).to(device, dtype)
                shape = (ROWS, HEADS, 4 * LENGTH, WIDTH)
                return Called(
                    block, tuple(torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)), {}
                )

            words = f"{'causal' if is_causal else 'not causal'}{', bias' if biased else ''}"
            yield f"{backend.name.lower()}, {words}", make


def blocks(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Callable[[], Called]]]:
    for name, model in MODELS.items():
        yield name, lambda model=model: of_model(model, dtype, device)  # type: ignore[misc]
    yield "embedding, head and loss", lambda: heads(dtype, device)
    yield from kernels(dtype, device)


# ---------------------------------------------------------------------- checking


@dataclass
class Found:
    calls: Counter[str] = field(default_factory=Counter)
    wrong: defaultdict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    without: dict[str, None] = field(default_factory=dict)  # ops that no family knows


def check(captured: Captured, call: Called, ranks: list[int], found: Found, name: str) -> int:
    with torch.no_grad():
        for parameter in call.block.parameters():  # zeros and ones would hide mistakes
            parameter += torch.randn_like(parameter) / 10
    held = [*call.block.parameters(), *call.block.buffers(), *(each for _, each in tensor_leaves(call.args, call.kwargs))]
    like = [value_of(node) for node in captured.tangent_nodes]
    tangents = [torch.randn(each.shape, dtype=each.dtype, device=each.device) for each in like]
    values = values_of(captured.module, [*(each.detach() for each in held), *tangents])
    count = 0
    for node in distinct(captured.nodes):
        op = name_of(node).removeprefix("aten.")
        found.calls[op] += 1
        if family_of(node) is None:
            found.without[op] = None
        for n in ranks:
            for rule in rules_of(node, n, outers_of(captured.nodes, n)):
                trouble = why_wrong(node, rule, values, n)
                count += 1
                if trouble:
                    shapes = [tuple(value_of(each).shape) for each in node.all_input_nodes if isinstance(value_of(each), Tensor)]
                    found.wrong[op][f"{name}, n = {n}, {shapes}, {rule}: {trouble}"] = None
    return count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="*", default=[], help="only those whose names have one of these words")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 3, 4])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.backends.cudnn.allow_tf32 = False  # whose rounding depends on sizes
    warnings.simplefilter("ignore")
    found, refused, total, began = Found(), [], 0, time.perf_counter()
    for dtype in (torch.bfloat16, torch.float32):
        for name, make in blocks(dtype, device):
            if options.blocks and not any(word in name for word in options.blocks):
                continue
            name, since = f"{name}, {str(dtype).removeprefix('torch.')}", time.perf_counter()
            torch.manual_seed(0)
            try:
                call = make()
                captured = capture(*call)
            except (NotCaptured, RuntimeError) as error:
                refused.append(f"{name}: {str(error).partition(chr(10))[0]}")
                continue
            count = check(captured, call, options.ranks, found, name)
            total += count
            print(f"{name:45} {count:6} rules {time.perf_counter() - since:6.1f} s", flush=True)
    print(f"\n{'op':60} {'calls':>6}   wrong")
    for op in sorted(found.calls):
        note = "no family: whole" if op in found.without else str(len(found.wrong[op]) or "")
        print(f"{op:60} {found.calls[op]:6}   {note}")
    for op, troubles in found.wrong.items():
        for trouble in list(troubles)[:8]:
            print(f"WRONG {op}: {trouble}")
    for line in refused:
        print(f"not captured: {line}")
    wrong = sum(map(len, found.wrong.values()))
    print(f"{total} rules of {len(found.calls)} ops on {device}: {wrong} wrong, {time.perf_counter() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
