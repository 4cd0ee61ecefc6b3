"""Language models, sequence models, and what people put around them."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, HEADS = 61, 32, 4


def tokens(batch_size, seq_len):
    return torch.randint(0, VOCABULARY, (batch_size, seq_len))


def next_token_loss(logits, ids):
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Attention(nn.Module):
    """minGPT's: a mask in a buffer, dropout on the weights and on the way out."""

    def __init__(self, dropout=0.1, persistent=True):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention_dropout, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16), persistent=persistent)

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        weights = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        weights = weights.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf")).softmax(-1)
        mixed = (self.attention_dropout(weights) @ value).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.dropout(self.out(mixed))


class Block(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention(**options)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, hidden):
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.mlp(hidden)


class Gpt(nn.Module):
    """Tied, with dropout; returns logits and loss, as minGPT and nanoGPT do."""

    def __init__(self, **options):
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(Block(**options) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def example_batch(self, batch_size, seq_len):
        ids = tokens(batch_size, seq_len)
        return {"ids": ids, "targets": ids.clone()}

    def run(self, layer, hidden):
        return layer(hidden)

    def forward(self, ids, targets=None):
        hidden = self.dropout(self.embed(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for layer in self.layers:
            hidden = self.run(layer, hidden)
        logits = self.head(self.norm(hidden))
        return logits, None if targets is None else next_token_loss(logits, targets)


def masked_apart():
    return Gpt(persistent=False)


class GptLossFirst(Gpt):
    """Returns (loss, None): nothing else is asked for in training."""

    def forward(self, ids, targets=None):
        return super().forward(ids, targets)[1], None


class GptCheckpointed(Gpt):
    def run(self, layer, hidden):
        return checkpoint(layer, hidden, use_reentrant=False)


class GptReentrant(Gpt):
    def run(self, layer, hidden):
        return checkpoint(layer, hidden, use_reentrant=True)


class GptFrozen(Gpt):
    """Trains its last layer and the norm alone."""

    def __init__(self):
        super().__init__()
        self.requires_grad_(False)
        self.layers[-1].requires_grad_(True)
        self.norm.requires_grad_(True)


def wrapped():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Gpt()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    return model


def compiled_blocks():
    model = Gpt()
    for index, layer in enumerate(model.layers):
        model.layers[index] = torch.compile(layer, backend="eager")
    return model


def compiled_in_place():
    model = Gpt()
    for layer in model.layers:
        layer.compile(backend="eager")
    return model


def compiled_root():
    return torch.compile(Gpt(), backend="aot_eager")


class Rotary(nn.Module):
    """Llama's way: angles in a buffer that no checkpoint holds, a scale that is a plain attribute."""

    def __init__(self):
        super().__init__()
        half = WIDTH // HEADS // 2
        self.scale = torch.tensor(1.0)
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(half) / half), persistent=False)

    def forward(self, heads):
        angles = torch.outer(torch.arange(heads.shape[2], device=heads.device), self.inv_freq) * self.scale
        one, two = heads.chunk(2, -1)
        return torch.cat([one * angles.cos() - two * angles.sin(), one * angles.sin() + two * angles.cos()], -1)


class LlamaLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.rotary = Rotary()
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, hidden):
        batch, length, _ = hidden.shape
        parts = [self.q(self.norm(hidden)), *self.kv(self.norm(hidden)).chunk(2, -1)]
        query, key, value = (part.view(batch, length, HEADS, -1).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(
            self.rotary(query), self.rotary(key), value, is_causal=True, dropout_p=0.1 if self.training else 0.0
        )
        hidden = hidden + self.o(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        normed = self.mlp_norm(hidden)
        return hidden + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    """Returns a dict; the frequencies of its positions are a plain tensor that `__init__` computes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaLayer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.weights = torch.linspace(0.5, 1.5, 15)

    def forward(self, input_ids):
        hidden = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits = self.head(hidden)
        each = functional.cross_entropy(logits[:, :-1].transpose(1, 2), input_ids[:, 1:], reduction="none")
        return {"logits": logits, "nll": (each * self.weights).mean()}


class Expert(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))


class Mixture(nn.Module):
    """Noisy routing; experts that nobody chose take part with weight 0."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, hidden):
        scores = self.router(hidden)
        scores = scores + torch.randn_like(scores) * 0.1
        best, chosen = scores.softmax(-1).topk(2, -1)
        weights = torch.zeros_like(scores).scatter(-1, chosen, best)
        mixed = sum(weights[..., number, None] * expert(hidden) for number, expert in enumerate(self.experts))
        return hidden + mixed, (scores.softmax(-1).mean((0, 1)) ** 2).sum()


class MixtureModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, input_ids):
        hidden, balance = self.embed(input_ids), 0.0
        for layer in self.layers:
            hidden, more = layer(hidden)
            balance = balance + more
        logits = self.head(hidden)
        return {"loss": next_token_loss(logits, input_ids) + 0.01 * balance, "balance": balance, "logits": logits}


class Recurrent(nn.Module):
    """The word language model of PyTorch's examples: an LSTM with dropout between its layers."""

    def __init__(self, kind=nn.LSTM):
        super().__init__()
        self.embed, self.drop = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.2)
        self.rnn = kind(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids):
        hidden, _ = self.rnn(self.drop(self.embed(input_ids)))
        return next_token_loss(self.head(self.drop(hidden)), input_ids)


def gru():
    return Recurrent(nn.GRU)


class Translator(nn.Module):
    """Sequence to sequence with attention; Python's own dice decide about teacher forcing."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.GRUCell(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def example_batch(self, batch_size, seq_len):
        return {"source": tokens(batch_size, seq_len), "target": tokens(batch_size, 6)}

    def forward(self, source, target):
        memory, state = self.encoder(self.embed(source))
        state, word, losses = state[0], target[:, 0], []
        for number in range(1, target.shape[1]):
            context = ((memory @ state[:, :, None]).softmax(1) * memory).sum(1)
            state = self.decoder(torch.cat([self.embed(word), context], -1), state)
            logits = self.head(state)
            losses.append(functional.cross_entropy(logits, target[:, number]))
            word = target[:, number] if random.random() < 0.5 else logits.argmax(-1)
        return torch.stack(losses).mean()


class Seq2Seq(nn.Module):
    """nn.Transformer, with its dropout."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 64, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids):
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], device=input_ids.device)
        hidden = self.transformer(self.embed(input_ids), self.embed(input_ids), tgt_mask=mask)
        return next_token_loss(self.head(hidden), input_ids)


class Classifier(nn.Module):
    """A BERT of nn.TransformerEncoder with a pooled output: returns (loss, logits)."""

    def __init__(self):
        super().__init__()
        self.embed, self.cls = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def example_batch(self, batch_size, seq_len):
        return {"ids": tokens(batch_size, seq_len), "labels": torch.randint(0, 3, (batch_size,))}

    def forward(self, ids, labels):
        hidden = torch.cat([self.cls.expand(len(ids), -1, -1), self.embed(ids)], 1)
        logits = self.head(self.encoder(hidden)[:, 0])
        return functional.cross_entropy(logits, labels), logits


class StateSpace(nn.Module):
    """Mamba's shape: a scan over time, and parameters of its own in one dimension."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.decay, self.skip = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.step = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids):
        values = self.embed(input_ids)
        mixed = functional.silu(self.conv(values.transpose(1, 2))[..., :-2].transpose(1, 2))
        gates = self.step(mixed).sigmoid()
        state, found = torch.zeros_like(mixed[:, 0]), []
        for number in range(mixed.shape[1]):
            state = state * torch.exp(-functional.softplus(self.decay)) + gates[:, number] * mixed[:, number]
            found.append(state + self.skip * mixed[:, number])
        return next_token_loss(self.head(torch.stack(found, 1)), input_ids)


class Adapted(nn.Module):
    """Hand-made LoRA: a frozen model whose linear layers got factors, and a prefix to train."""

    def __init__(self):
        super().__init__()
        self.base = Gpt().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)
        self.prefix = nn.Parameter(torch.randn(1, 2, WIDTH))

    def forward(self, input_ids):
        hidden = self.base.embed(input_ids)
        hidden = torch.cat([self.prefix.expand(len(hidden), -1, -1), hidden], 1)[:, :16]
        hidden = hidden + self.up(self.down(hidden))
        for layer in self.base.layers:
            hidden = layer(hidden)
        return next_token_loss(self.base.head(hidden), input_ids)


class Several(Gpt):
    """Returns several losses; says itself which one is trained on."""

    fsdp_loss = "losses.total"

    def forward(self, ids, targets=None):
        logits, own = super().forward(ids, targets)
        penalty = logits.float().logsumexp(-1).square().mean()
        return {"losses": {"own": own, "penalty": penalty, "total": own + 1e-3 * penalty}, "logits": logits}


class Odd(Gpt):
    """A frozen scalar, an empty parameter, a scalar buffer, an empty buffer, an integer parameter."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5), requires_grad=False)
        self.nothing = nn.Parameter(torch.empty(0, WIDTH))
        self.codes = nn.Parameter(torch.arange(4), requires_grad=False)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("no_rows", torch.empty(0, 3))

    def forward(self, ids, targets=None):
        self.calls += 1
        logits, _ = super().forward(ids)
        return next_token_loss(logits / self.temperature, targets) + self.nothing.sum()


class Hyper(nn.Module):
    """One network makes the weights of another's call."""

    def __init__(self):
        super().__init__()
        self.embed, self.maker = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(8, WIDTH * WIDTH)
        self.code, self.inner = nn.Parameter(torch.randn(8)), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids):
        made = {"weight": self.maker(self.code).view(WIDTH, WIDTH), "bias": self.inner.bias}
        return next_token_loss(
            self.head(torch.func.functional_call(self.inner, made, (self.embed(input_ids),))), input_ids
        )


class Recommender(nn.Module):
    """DLRM's shape: bags of embeddings, interactions, a logit."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode="sum") for rows in (7, 30, 101))
        self.bottom, self.top = nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Linear(6 + 8, 1)

    def example_batch(self, batch_size, seq_len):
        return {
            "dense": torch.rand(batch_size, 5),
            "sparse": torch.randint(0, 7, (batch_size, 3, 4)),
            "click": torch.randint(0, 2, (batch_size,)).float(),
        }

    def forward(self, dense, sparse, click):
        rows = torch.stack([self.bottom(dense), *(table(sparse[:, n]) for n, table in enumerate(self.tables))], 1)
        pairs = (rows @ rows.transpose(1, 2)).flatten(1)[:, [1, 2, 3, 6, 7, 11]]
        logit = self.top(torch.cat([rows[:, 0], pairs], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logit, click), {"logit": logit.detach()}


class Graph(nn.Module):
    """A graph network with dropped edges."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))

    def example_batch(self, batch_size, seq_len):
        return {"nodes": torch.rand(batch_size, seq_len, 12), "edges": torch.rand(batch_size, seq_len, seq_len)}

    def forward(self, nodes, edges):
        hidden = nodes
        for layer in self.layers:
            kept = functional.dropout((edges > 0.7).float(), 0.3, training=self.training)
            hidden = (layer(kept @ hidden) + hidden).tanh()
        return (hidden - nodes.flip(1)).square().mean()


class ActorCritic(nn.Module):
    """Draws actions; returns an object with a loss."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh())
        self.policy, self.value = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def example_batch(self, batch_size, seq_len):
        return {"seen": torch.rand(batch_size * seq_len, 6), "reward": torch.rand(batch_size * seq_len)}

    def forward(self, seen, reward):
        hidden = self.body(seen)
        choice = torch.distributions.Categorical(logits=self.policy(hidden))
        gain = reward - self.value(hidden).squeeze(1)
        loss = -(choice.log_prob(choice.sample()) * gain.detach()).mean() + gain.square().mean()
        return {"loss": loss, "entropy": choice.entropy().mean()}
