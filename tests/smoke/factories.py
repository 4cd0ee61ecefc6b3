"""Models for `--factory`: a healthy one, and one for every way to break that a smoke run has to find."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn import functional as nn_of_ranks
from torch.nn import functional

VOCABULARY = 61
WIDTH = 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden):
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))

    def run(self, hidden):
        return hidden + self.down(functional.gelu(self.up(self.norm(hidden))))


class Model(nn.Module):
    """Predicts the next token; takes its batch as one dict."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def example_batch(self, batch_size, seq_len):
        return {"tokens": torch.randint(0, VOCABULARY, (batch_size, seq_len))}

    def forward(self, batch):
        hidden = self.embed(batch["tokens"])
        for layer in self.layers:
            hidden = self.through(layer, hidden)
        logits = self.head(hidden)
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())

    def through(self, layer, hidden):
        return layer(hidden)


def healthy():
    return Model()


class Planned(Model):
    """Says itself how it is to be cut, and has a second entry."""

    fsdp_blocks = "Layer"
    fsdp_forward_methods = ("score",)
    fsdp_tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}  # noqa: RUF012

    def score(self, batch):
        return -self.forward(batch)


class CustomMethod(Model):
    """Calls a method of a unit that is not its forward."""

    def through(self, layer, hidden):
        return layer.run(hidden)


class DotForward(Model):
    """Calls `.forward`, past the hooks."""

    def through(self, layer, hidden):
        return layer.forward(hidden)


class Dispatching(Layer):
    def forward(self, hidden):
        return self.run(hidden)


class DoubleWrap(Model):
    """Its layers' forward dispatches to a method that is registered as an entry too, as in the BAGEL port."""

    fsdp_forward_methods = {"Dispatching": ("run",)}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Dispatching() for _ in range(2))


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


class Hangs(Model):
    """Rank 1 never comes back from the second layer."""

    def through(self, layer, hidden):
        if rank() == 1 and layer is self.layers[1]:
            self.wait_for_ever()
        return layer(hidden)

    def wait_for_ever(self):
        time.sleep(600)


class Skips(Model):
    """Rank 1 leaves a layer out, as a mixture that routes nothing to an expert."""

    def through(self, layer, hidden):
        if rank() == 1 and layer is self.layers[1]:
            return hidden
        return layer(hidden)


class Dies(Model):
    """Rank 1 is ended in its forward, as by a machine without memory."""

    def through(self, layer, hidden):
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return layer(hidden)


class DiesFirst(Model):
    """Rank 0 leaves without a word."""

    def through(self, layer, hidden):
        if rank() == 0:
            os._exit(7)
        return layer(hidden)


class LeavesQuietly(Model):
    """Rank 1 ends as if all was well, in the middle of its forward."""

    def through(self, layer, hidden):
        if rank() == 1 and layer is self.layers[1]:
            os._exit(0)
        return layer(hidden)


class Aborts(Model):
    """Rank 1 is ended by an assertion of native code."""

    def through(self, layer, hidden):
        if rank() == 1:
            os.abort()
        return layer(hidden)


class OwnGenerator(Model):
    """Forward draws from a generator that nobody seeds: no reference can agree."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator(device="cpu")

    def through(self, layer, hidden):
        return layer(hidden) + 0.1 * torch.randn(hidden.shape, generator=self.generator, device="cpu")


class DropsInside(Layer):
    def forward(self, hidden):
        return hidden + self.down(functional.dropout(functional.gelu(self.up(self.norm(hidden))), 0.2))


class Draws(Model):
    """With tp, every rank has a part of the features of which some are dropped."""

    fsdp_blocks = "DropsInside"
    fsdp_tp_plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(DropsInside() for _ in range(2))


class TwoScalars(Model):
    """Returns two scalars that have gradients, and says nothing about which one is the loss."""

    def forward(self, batch):
        loss = super().forward(batch)
        return loss, 2 * loss, None


class Penalised(TwoScalars):
    """The same; the second scalar is the loss."""

    fsdp_loss = "1"


class Remembers(Model):
    """Keeps a number that is in no state dict."""

    calls = 0

    def forward(self, batch):
        self.calls += 1
        return super().forward(batch) * (1 + self.calls // 4)


class Forgets(Model):
    """Learns something in training that it does not save."""

    trained = False

    def forward(self, batch):
        loss = super().forward(batch)
        if torch.is_grad_enabled():
            self.trained = True
            return loss
        return loss * (1.5 if self.trained else 1.0)


class Detached(Model):
    """Rank 1 leaves the last layer's gradient out."""

    def through(self, layer, hidden):
        result = layer(hidden)
        if rank() == 1 and layer is self.layers[1]:
            return hidden + (result - hidden).detach() + 0 * result
        return result


class NotFinite(Model):
    def forward(self, batch):
        return super().forward(batch) * float("nan")


class Overflows(Model):
    """The second layer leaves float16's range; the first and its weights are fine."""

    def __init__(self):
        super().__init__()
        layer = self.layers[1]
        layer.up.register_forward_hook(lambda module, args, output: output * 1e30 * 1e30)


class DividesByNothing(Model):
    """Between two modules, where no module's own output shows it."""

    def through(self, layer, hidden):
        return layer(hidden / torch.zeros(()))


class BreaksLater(Model):
    """The first step is fine; the weights after it are not."""

    def forward(self, batch):
        loss = super().forward(batch)
        self.calls = getattr(self, "calls", 0) + self.training
        return loss if self.calls < 2 else loss / torch.zeros(())


class Raises(Model):
    def forward(self, batch):
        raise ZeroDivisionError("the model says no")


class Nothing(Model):
    """Trains only a part of itself on some ranks."""

    def forward(self, batch):
        return {"answer": 42}


class WritesStdout(Model):
    """Prints, which must not come between the report and its reader."""

    def forward(self, batch):
        print("hello from the model", flush=True)
        return super().forward(batch)


class KeywordModel(Model):
    """Takes its batch by keywords and returns an object with a loss."""

    class Output:
        def __init__(self, loss):
            self.loss = loss

    def forward(self, tokens):
        return self.Output(super().forward({"tokens": tokens}))


class SumsOverRanks(Model):
    """Its loss is that of all ranks together, which FSDP's average does not know."""

    def forward(self, batch):
        loss = super().forward(batch)
        return nn_of_ranks.all_reduce(loss) if dist.is_initialized() else loss


class Silent(Model):
    """What its layers compute never reaches the loss."""

    def through(self, layer, hidden):
        return hidden + layer(hidden).detach()


class ReadsNumbers(Model):
    def __init__(self):
        super().__init__()
        self.scale = self.head.weight.std().item()


def not_a_module():
    return 42
