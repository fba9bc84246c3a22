"""Models that no other test of cut blocks knows: of the hub, adapted ones, and some as people write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS, LENGTH, WORDS, WIDTH = 4, 12, 51, 32  # no axis divides the words
TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SIZES["max_position_embeddings"] = 64


class Hub(NamedTuple):
    kind: str
    head: str
    options: dict[str, Any]
    still: tuple[str, ...]  # what drops at random, by the name of its option
    batch: str = "words"


def _decoder(kind: str, *still: str, **options: Any) -> Hub:
    return Hub(kind, "AutoModelForCausalLM", {**SIZES, **TOKENS, **options}, still)


def _masked(kind: str, *still: str, **options: Any) -> Hub:
    return Hub(kind, "AutoModelForMaskedLM", {**SIZES, **TOKENS, **options}, still)


USUAL = "hidden_dropout_prob", "attention_probs_dropout_prob"
HUB: dict[str, Hub] = {
    "falcon": _decoder("falcon", "hidden_dropout", "attention_dropout", new_decoder_architecture=False, parallel_attn=True),
    "opt": _decoder("opt", "dropout", "attention_dropout", ffn_dim=64, word_embed_proj_dim=WIDTH),
    "gpt neox": _decoder("gpt_neox", "hidden_dropout", "attention_dropout"),
    "gptj": _decoder("gptj", "resid_pdrop", "embd_pdrop", n_embd=WIDTH, n_layer=2, n_head=4, n_positions=64, rotary_dim=4),
    "phi": _decoder("phi", "resid_pdrop", "embd_pdrop"),
    "phi3": _decoder("phi3", "resid_pdrop", "embd_pdrop", num_key_value_heads=2),
    "stablelm": _decoder("stablelm", "hidden_dropout", "attention_dropout", num_key_value_heads=2),
    "cohere": _decoder("cohere", "attention_dropout", num_key_value_heads=2),
    "granite": _decoder("granite", "attention_dropout", num_key_value_heads=2, tie_word_embeddings=True),
    "olmo2": _decoder("olmo2", "attention_dropout", num_key_value_heads=2),
    "bloom": _decoder("bloom", "hidden_dropout", "attention_dropout", n_layer=2, n_head=4),
    "mpt": _decoder("mpt", d_model=WIDTH, n_heads=4, n_layers=2, expansion_ratio=2, max_seq_len=64),
    "mamba2": _decoder("mamba2", num_heads=8, head_dim=8, n_groups=2, state_size=8, chunk_size=4),
    "xlnet": Hub(
        "xlnet", "AutoModelForCausalLM", {**TOKENS, "d_model": WIDTH, "n_layer": 2, "n_head": 4, "d_inner": 64}, ("dropout",),
    ),
    "starcoder2": _decoder("starcoder2", "residual_dropout", "embedding_dropout", num_key_value_heads=2),
    "deepseek": _decoder(
        "deepseek_v3", "attention_dropout", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=4,
        qk_nope_head_dim=4, v_head_dim=8, first_k_dense_replace=2, n_routed_experts=4,
    ),
    "mpnet": _masked("mpnet", *USUAL),
    "deberta": _masked("deberta-v2", *USUAL, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0),
    "electra": _masked("electra", *USUAL, embedding_size=WIDTH),
    "albert": _masked("albert", *USUAL, embedding_size=WIDTH),
    "distilbert": _masked("distilbert", "dropout", "attention_dropout", dim=WIDTH, n_heads=4, n_layers=2, hidden_dim=64),
    "roformer": _masked("roformer", *USUAL),
    "bart": Hub(
        "bart", "AutoModelForSeq2SeqLM",
        {**TOKENS, "d_model": WIDTH, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
         "decoder_start_token_id": 1},
        ("dropout", "attention_dropout"),
    ),
    "clip": Hub(
        "clip_vision_model", "AutoModel", {**SIZES, "image_size": 16, "patch_size": 4}, ("attention_dropout",), "images",
    ),
    "dinov2": Hub("dinov2", "AutoModel", {**SIZES, "image_size": 16, "patch_size": 4}, ("hidden_dropout_prob",), "images"),
    "beit": Hub("beit", "AutoModel", {**SIZES, "image_size": 16, "patch_size": 4, "drop_path_rate": 0.0}, USUAL, "images"),
    "swin v2": Hub(
        "swinv2", "AutoModel",
        {"image_size": 16, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
         "drop_path_rate": 0.0}, USUAL, "images",
    ),
    "wav2vec2": Hub(
        "wav2vec2", "AutoModel",
        {**SIZES, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0, "apply_spec_augment": False},
        ("hidden_dropout", "attention_dropout", "feat_proj_dropout", "activation_dropout"), "sound",
    ),
}  # fmt: skip


def _given(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if kind == "images":
        return {"pixel_values": torch.randn(ROWS, 3, 16, 16, generator=generator)}
    if kind == "sound":
        return {"input_values": torch.randn(ROWS, 400, generator=generator)}
    ids = torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, LENGTH // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def hub(name: str, *, drops: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    transformers.logging.set_verbosity_error()
    kind, head, options, still, batch = HUB[name]
    torch.manual_seed(0)
    rates = dict.fromkeys(still, 0.1 if drops else 0.0)
    config = transformers.AutoConfig.for_model(kind, **{**options, **rates})
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return getattr(transformers, head).from_config(config).train(), _given(batch)


# ---------------------------------------------------------------------- as people write them


class Mixer(nn.Module):
    """Of an MLP-mixer: one over the tokens, one over the channels."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.tokens = nn.Sequential(nn.Linear(LENGTH, 24), nn.GELU(), nn.Dropout(drop), nn.Linear(24, LENGTH))
        self.channels = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(drop), nn.Linear(64, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.first(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channels(self.second(x))
        return out


class Crossing(nn.Module):
    """Attention by hand: to itself, and to a context that all blocks have."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.packed, self.mixed = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.query, self.both, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.gate, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = self.packed(self.norms[0](x)).chunk(3, -1)
        x = x + self.drop(self.mixed(self._attended(q, k, v, is_causal=True)))
        k, v = self.both(context).chunk(2, -1)
        x = x + self.drop(self.back(self._attended(self.query(self.norms[1](x)), k, v, is_causal=False)))
        y = self.norms[2](x)
        out: Tensor = x + self.narrow(F.silu(self.gate(y)) * self.wide(y))
        return out

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in (q, k, v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
        return (self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(-2)


class Grouped(nn.Module):
    """Convolutions with group norms, as in a U-Net, and attention over the places of an image."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(8, WIDTH), nn.GroupNorm(8, WIDTH)
        self.into, self.out = nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(F.silu(self.first(x)))
        h = x + self.out(self.drop(F.silu(self.second(h))))
        places = h.flatten(2).transpose(1, 2)
        places = places + self.attention(places, places, places, need_weights=False)[0]
        return places.transpose(1, 2).unflatten(2, h.shape[2:])


class Recurrent(nn.Module):
    """A step after the other, in a loop of Python, between projections."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(drop)
        self.into, self.out = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.linspace(-2, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.into(self.norm(x)).chunk(2, -1)
        state, found = torch.zeros_like(value[:, 0]), []
        for at in range(x.shape[1]):
            state = torch.sigmoid(self.decay) * state + value[:, at]
            found.append(state)
        out: Tensor = x + self.drop(self.out(torch.stack(found, 1) * torch.sigmoid(gate)))
        return out


class InPlace(nn.Module):
    """What others write as new tensors."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), drop
        self.wide, self.narrow = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu_(self.wide(self.norm(x)).mul_(1.1).add_(0.1))
        h = self.narrow(h)
        h[:, 0] += 1
        h += x
        return F.dropout(h, self.drop, inplace=True)


class Normed(nn.Module):
    """A weight that is made of two others."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(drop)
        self.wide, self.narrow = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 64)), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.drop(self.narrow(F.gelu(self.wide(self.norm(x)))))
        return out


class Own(nn.Module):
    """Words in, blocks, words out by the same table."""

    def __init__(self, block: Callable[[float], nn.Module], drop: float, *, context: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block(drop) for _ in range(3))
        self.norm, self.context = nn.LayerNorm(WIDTH), context

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        x = self.words(input_ids)
        context = x.flip(1)[:, :6] if self.context else None
        for block in self.blocks:
            x = block(x) if context is None else block(x, context)
        logits = F.linear(self.norm(x), self.words.weight)[:, :-1]
        return (F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()),)


class Penalised(Own):
    """By how much the loss changes with the words."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> tuple[Tensor]:
        (loss,) = super().forward(input_ids, labels)
        (slope,) = torch.autograd.grad(loss, self.words.weight, create_graph=True)
        return (loss + slope.square().sum(),)


class Translating(nn.Module):
    """torch's own encoder and decoder, which looks at the numbers of a mask."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.model = nn.Transformer(WIDTH, 4, 2, 2, 64, drop, batch_first=True)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> tuple[Tensor]:
        x, later = self.words(input_ids), nn.Transformer.generate_square_subsequent_mask(LENGTH)
        logits = self.head(self.model(x, x, tgt_mask=later, src_key_padding_mask=attention_mask == 0))[:, :-1]
        return (F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()),)


class Pictures(nn.Module):
    """Outside of the blocks a norm takes its statistics from the whole batch."""

    def __init__(self, drop: float) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.Conv2d(3, WIDTH, 4, stride=4), nn.BatchNorm2d(WIDTH))
        self.blocks = nn.ModuleList(Grouped(drop) for _ in range(3))
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor]:
        x = self.into(pixel_values)
        for block in self.blocks:
            x = block(x)
        return (self.out(x.mean((2, 3))).square().mean(),)


OWN: dict[str, tuple[Callable[[float], nn.Module], str]] = {
    "mixer": (lambda drop: Own(Mixer, drop), "words"),
    "cross attention": (lambda drop: Own(Crossing, drop, context=True), "words"),
    "recurrent": (lambda drop: Own(Recurrent, drop), "words"),
    "group norms": (Pictures, "images"),
    "in place": (lambda drop: Own(InPlace, drop), "words"),
    "weight norm": (lambda drop: Own(Normed, drop), "words"),
    "torch's transformer": (Translating, "words"),
    "penalised": (lambda drop: Penalised(Normed, drop), "words"),
}
ADAPTED = {
    "gpt neox, adapted": ("gpt neox", ["query_key_value"]),
    "opt, adapted": ("opt", ["q_proj", "v_proj", "fc1"]),
}
NAMES = [*HUB, *OWN, *ADAPTED]


def any_model(name: str, *, drops: bool) -> tuple[nn.Module, dict[str, Tensor]]:
    """In training, with a batch."""
    if name in ADAPTED:
        import peft

        base, targets = ADAPTED[name]
        model, batch = hub(base, drops=drops)
        adapter = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.1 if drops else 0.0, init_lora_weights=False)
        return peft.get_peft_model(model, adapter).train(), batch  # type: ignore[arg-type]
    if name in OWN:
        make, kind = OWN[name]
        torch.manual_seed(0)
        return make(0.1 if drops else 0.0).train(), _given(kind)
    return hub(name, drops=drops)
