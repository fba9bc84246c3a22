"""Families of models: images, sequences, experts, and Transformers' own."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import anyfit
from tests.families import FAMILIES

from ..case import (
    ROWS,
    STEPS,
    Chain,
    Refused,
    Residual,
    Trial,
    adamw,
    classified,
    hostile,
    images,
    sgd,
    squared,
    tokens,
    trial,
    vectors,
)
from .aliases import next_token
from .state import STATISTICS


@hostile(also=("both",), cut=STATISTICS)
def a_residual_network_with_batch_norm() -> Trial:
    class Block(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
            self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.blocks = nn.ModuleList(Block(8) for _ in range(2))
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((2, 3)))

    return trial(Net, classified, images())


@hostile(also=("both",))
def a_unet_with_skips() -> Trial:
    def step(into: int, out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(into, out, 3, padding=1), nn.GroupNorm(2, out), nn.SiLU())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList([step(3, 8), step(8, 12)])
            self.middle = step(12, 12)
            self.up = nn.ModuleList([step(24, 8), step(16, 8)])
            self.head = nn.Conv2d(8, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            kept = []
            for each in self.down:
                x = each(x)
                kept.append(x)
                x = F.max_pool2d(x, 2)
            x = self.middle(x)
            for each in self.up:
                x = each(torch.cat([F.interpolate(x, scale_factor=2), kept.pop()], 1))
            return self.head(x)

    return trial(Net, lambda model, batch: (model(batch["x"]) - batch["x"].tanh()).square().mean(), images())


def sequences(steps: int = STEPS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(21)
    return [
        {"x": torch.randn(ROWS, 6, 8, generator=generator), "y": torch.randn(ROWS, 6, 8, generator=generator) * 0.5}
        for _ in range(steps)
    ]


CARRIED = Refused(r"(?is)hidden|cut|micro.?batch|sizes? of tensors|size")  # a state that has the whole batch's rows


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.body = kind(8, 12, num_layers=2, batch_first=True, **options)
        self.head = nn.Linear(24 if options.get("bidirectional") else 12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0])


@hostile(also=("both", "resumed"))
def an_lstm() -> Trial:
    return trial(lambda: Recurrent(nn.LSTM), squared, sequences())


@hostile(also=("both",))
def a_gru_of_two_directions() -> Trial:
    return trial(lambda: Recurrent(nn.GRU, bidirectional=True), squared, sequences(), adamw)


@hostile()
def an_lstm_over_packed_sequences() -> Trial:
    class Packed(Recurrent):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.body(packed)[0], batch_first=True, total_length=6)
            return self.head(out)

    batches = [{**batch, "lengths": torch.tensor([6, 5, 3, 2])} for batch in sequences()]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"], batch["lengths"]) - batch["y"]).square().mean()

    return trial(lambda: Packed(nn.LSTM), loss, batches)


@hostile(cut=CARRIED)
def an_lstm_cell_that_carries_its_state() -> Trial:
    """Truncated backpropagation: the state of one batch goes into the next."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.head = nn.LSTMCell(8, 12), nn.Linear(12, 8)
            self.register_buffer("hidden", torch.zeros(ROWS, 12), persistent=False)
            self.register_buffer("memory", torch.zeros(ROWS, 12), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            hidden, memory, out = self.hidden.clone(), self.memory.clone(), []
            for at in range(x.shape[1]):
                hidden, memory = self.cell(x[:, at], (hidden, memory))
                out.append(self.head(hidden))
            self.hidden.copy_(hidden.detach())
            self.memory.copy_(memory.detach())
            return torch.stack(out, 1)

    return trial(Net, squared, sequences())


@hostile(also=("both", "selective"))
def a_vision_transformer() -> Trial:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patch = nn.Conv2d(3, 16, 4, 4)
            self.token, self.places = nn.Parameter(torch.zeros(1, 1, 16)), nn.Parameter(torch.randn(1, 5, 16) * 0.02)
            layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
            self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.patch(x).flatten(2).mT
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
            return self.head(self.body(x)[:, 0])

    return trial(Net, classified, images())


@hostile(also=("both", "selective"))
def an_encoder_and_a_decoder() -> Trial:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 16)
            self.body = nn.Transformer(16, 2, 1, 2, 32, dropout=0.0, batch_first=True)
            self.head = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.head(self.body(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True))

    return trial(Net, squared, sequences())


@hostile(also=("both",))
def a_state_space_scan() -> Trial:
    """As Mamba's, in plain torch: a selective scan, step by step."""

    class Scan(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(width, 2 * width), nn.Linear(width, width)
            self.conv = nn.Conv1d(width, width, 3, padding=2, groups=width)
            self.decay, self.skip = nn.Parameter(torch.zeros(width, 4)), nn.Parameter(torch.ones(width))
            self.mix = nn.Linear(width, 9)

        def forward(self, x: Tensor) -> Tensor:
            length = x.shape[1]
            y, gate = self.into(x).chunk(2, -1)
            y = F.silu(self.conv(y.mT)[..., :length].mT)
            step, read, write = self.mix(y).split([1, 4, 4], -1)
            step, state, out = F.softplus(step), x.new_zeros(len(x), y.shape[-1], 4), []
            for at in range(length):
                faded = torch.exp(-step[:, at, :, None] * torch.exp(self.decay))
                state = faded * state + (step[:, at] * y[:, at])[..., None] * write[:, at, None]
                out.append((state * read[:, at, None]).sum(-1))
            return x + self.out((torch.stack(out, 1) + self.skip * y) * F.silu(gate))

    return trial(lambda: Chain(Scan, count=2), squared, sequences(), adamw)


class Experts(nn.Module):
    """Routes each row to one expert; which ops run depends on the routing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        share, chosen = self.router(x).softmax(-1).max(-1)
        out = x.clone()
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out.index_add_(0, rows, share[rows, None] * expert(x[rows]))
        return out


@hostile(also=("both", "selective", "resumed"))
def a_mixture_of_experts_in_a_loop() -> Trial:
    return trial(lambda: Chain(Experts), squared, vectors())


@hostile(draws=True, also=("both", "selective"))
def a_variational_autoencoder() -> Trial:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encode, self.decode = Chain(out=8), Chain(wide=4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            mean, log = self.encode(x).chunk(2, -1)
            return self.decode(mean + torch.randn_like(mean) * (log / 2).exp()), mean, log

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out, mean, log = model(batch["x"])
        return (out - batch["x"]).square().mean() + 0.1 * (mean.square() + log.exp() - log - 1).mean()

    return trial(Net, loss, vectors())


@hostile(draws=True, also=("both",))
def diffusion_with_timesteps_drawn_in_the_loss() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        share = torch.rand(len(batch["x"]), 1)
        noise = torch.randn_like(batch["x"])
        return (model(share * batch["x"] + (1 - share) * noise) - noise).square().mean()

    return trial(Chain, loss, vectors())


@hostile(also=("both",))
def a_mixer_that_transposes() -> Trial:
    class Mixing(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.along, self.across = Residual(6), Residual(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.across(self.along(x.mT).mT)

    return trial(lambda: Chain(Mixing, count=2), squared, sequences())


@hostile()
def attention_modules_of_torch() -> Trial:
    """nn.MultiheadAttention reads the weights of its output layer without calling it."""

    class Attending(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(width, 2, batch_first=True, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(x, x, x)[0]

    return trial(lambda: Chain(Attending), squared, sequences())


@hostile(also=("both",))
def early_exits() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.exits = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))

        def forward(self, x: Tensor) -> list[Tensor]:  # type: ignore[override]
            x, out = self.stem(x), []
            for block, leave in zip(self.blocks, self.exits, strict=True):
                x = block(x)
                out.append(leave(x))
            return out

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return sum((out - batch["y"]).square().mean() / (1 + at) for at, out in enumerate(model(batch["x"])))  # type: ignore[return-value]

    return trial(Net, loss, vectors())


@hostile()
def depth_chosen_by_the_values() -> Trial:
    """Stops when it is sure: a while loop over a tensor's value."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x, at = self.stem(x), 0
            while at < 3 and float(x.detach().abs().mean()) < 0.8:
                x = self.blocks[at](x)
                at += 1
            return self.head(x)

    return trial(Net, squared, vectors(), micro_batch=ROWS)


@hostile()
def siamese_networks_of_shared_weights() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        left, right = model(batch["x"]), model(batch["y"])
        return F.cosine_embedding_loss(left, right, torch.ones(len(left))) + (left - batch["y"]).square().mean()

    return trial(Chain, loss, vectors())


# ---------------------------------------------------------------- of Transformers


def transformers_model(family: str, **options: Any) -> nn.Module:
    made_by, kind, usual = FAMILIES[family]
    config = transformers.AutoConfig.for_model(kind, **usual | options)
    model: nn.Module = getattr(transformers, made_by)(config)
    return model


def padded(length: int = 8) -> list[dict[str, Tensor]]:
    """Rows of uneven length, and labels of -100 beyond it."""
    batches = []
    for ids in tokens(vocabulary=100, length=length):
        mask = torch.ones_like(ids)
        for row in range(ROWS):
            mask[row, 3 + row :] = 0
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return batches


def own_loss(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """As Job.from_huggingface's is: a sum and its weight."""
    labels = batch["labels"]
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100)
    return total, (labels[:, 1:] != -100).sum()


@hostile(also=("both", "ranks"), blocks=("model.layers.0", "model.layers.1"))
def llama_with_padding() -> Trial:
    return trial(lambda: transformers_model("llama"), own_loss, padded(), sgd)


@hostile(blocks=("model.layers.0", "model.layers.1"))
def the_loss_of_llama_itself() -> Trial:
    """A mean over the labels that are there."""
    return trial(lambda: transformers_model("llama"), lambda model, batch: model(**batch).loss, padded(), sgd)


@hostile(also=("ranks",), blocks=("model.layers.0", "model.layers.1"))
def llama_by_from_huggingface() -> Trial:
    """Its loss is (sum, weight), and beside it plain PyTorch takes the mean that the model itself gives."""
    torch.manual_seed(5)
    model = transformers_model("llama").train()
    batches = padded()
    job = anyfit.Job.from_huggingface(model, batch_size=ROWS, optimizer=sgd, sample=batches[0], precision="fp32")

    def plainly(job: anyfit.Job, model: Any, batches: Any) -> list[float]:
        optimizer, losses = job.optimizer(model), []
        for batch in batches:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            model.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    return Trial(job, batches, plainly=plainly)


@hostile(also=("both", "selective"), blocks=("model.layers.0", "model.layers.1"))
def llama_with_lora_by_hand() -> Trial:
    from .parameters import LowRank

    def make() -> nn.Module:
        model: Any = transformers_model("llama").requires_grad_(False)
        for layer in model.model.layers:
            layer.self_attn.q_proj, layer.mlp.up_proj = LowRank(layer.self_attn.q_proj), LowRank(layer.mlp.up_proj)
        return model

    return trial(make, own_loss, padded(), adamw)


@hostile(also=("both",), blocks=("transformer.h.0", "transformer.h.1"))
def gpt2_without_dropout() -> Trial:
    return trial(
        lambda: transformers_model("gpt2", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0),
        lambda model, ids: next_token(lambda ids: model(ids).logits, ids),  # type: ignore[arg-type]
        tokens(vocabulary=100),
    )


@hostile(also=("both", "selective"), blocks=("model.layers.0", "model.layers.1"))
def qwen3_mixture_of_experts() -> Trial:
    return trial(lambda: transformers_model("qwen3 moe"), own_loss, padded(), sgd)


@hostile(also=("both",), blocks=("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"))
def t5_with_its_cache() -> Trial:
    """Fills a cache of keys and values in training."""

    def loss(model: Any, ids: Tensor) -> Tensor:
        given = model(input_ids=ids, decoder_input_ids=ids[:, :-1], use_cache=True)
        return F.cross_entropy(given.logits.flatten(0, 1), ids[:, 1:].flatten())

    return trial(lambda: transformers_model("t5", dropout_rate=0.0, num_decoder_layers=2), loss, tokens(vocabulary=100))


@hostile(
    also=("both",),
    blocks=("model.encoder.layers.0", "model.encoder.layers.1", "model.decoder.layers.0", "model.decoder.layers.1"),
)
def bart_with_its_cache() -> Trial:
    def make() -> nn.Module:
        config = transformers.BartConfig(
            vocab_size=100,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=32,
            dropout=0.0,
        )
        return transformers.BartForConditionalGeneration(config)

    def loss(model: Any, ids: Tensor) -> Tensor:
        given = model(input_ids=ids, decoder_input_ids=ids[:, :-1], use_cache=True)
        return F.cross_entropy(given.logits.flatten(0, 1), ids[:, 1:].flatten())

    return trial(make, loss, tokens(vocabulary=100))


@hostile(also=("both",), blocks=("model.encoder.layers.0", "model.decoder.layers.0"))
def whisper_small() -> Trial:
    def make() -> nn.Module:
        config = transformers.WhisperConfig(
            vocab_size=100,
            num_mel_bins=4,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_source_positions=8,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
        return transformers.WhisperForConditionalGeneration(config)

    generator = torch.Generator().manual_seed(5)
    batches = [{"sound": torch.randn(ROWS, 4, 16, generator=generator), "ids": ids} for ids in tokens(vocabulary=100)]

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        ids = batch["ids"]
        given = model(input_features=batch["sound"], decoder_input_ids=ids[:, :-1])
        return F.cross_entropy(given.logits.flatten(0, 1), ids[:, 1:].flatten())

    return trial(make, loss, batches)


@hostile(draws=True, also=("both",), blocks=("bert.encoder.layer.0", "bert.encoder.layer.1"))
def bert_with_dropout() -> Trial:
    return trial(
        lambda: transformers_model("bert"),
        lambda model, ids: F.cross_entropy(model(ids).logits.flatten(0, 1), ids.flatten()),
        tokens(vocabulary=100),
    )
