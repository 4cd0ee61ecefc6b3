"""Precision, offload and resharding, on real ranks; and the formats that other writers make of sharded models."""

from __future__ import annotations

import pytest
import torch
from fsdp2 import models
from fsdp2.ranks import run_ranks

from ckpt_tools.checkpoint.layout import parse_mesh
from ckpt_tools.fsdp2 import Policy, Precision, fsdp_mesh, load_checkpoint

pytestmark = pytest.mark.full


POLICIES = {
    "plain": Policy(),
    "offload": Policy(cpu_offload=True),
    "keep-one": Policy(reshard_after_forward=2),
    "reshard-root": Policy(reshard_root=True),
    "prefetch": Policy(prefetch_forward=1, prefetch_backward=2),
    "ignored": Policy(ignored=("model.embed_tokens",)),
    "bf16": Policy(precision=Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    "bf16-reduce": Policy(precision=Precision(param_dtype=torch.bfloat16, output_dtype=torch.float32)),
}


def train(rank, world_size, source, out):
    """One step of every policy; then a save by torch's safetensors writer, loaded again."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor

    from ckpt_tools.fsdp2 import build_device_mesh, frozen, shard_model

    mesh = build_device_mesh(parse_mesh("dp_shard=4"))
    results = {}
    for name, policy in POLICIES.items():
        model = models.build("llama")
        frozen(model, policy.ignored)
        shard_model(model, mesh, policy)
        load_checkpoint(model, source)
        output = model(**models.batch_of("llama", 0, rank))
        output.loss.backward()
        trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        gradients = {n: p.grad.full_tensor() for n, p in trained}
        dtypes = {p.dtype for p in model.parameters()} | {p.grad.dtype for _, p in trained}
        results[name] = output.loss.item(), gradients, dtypes, output.logits.dtype
        if name == "ignored":
            assert not isinstance(model.model.embed_tokens.weight, DTensor)
        if name == "prefetch":
            states = [layer._get_fsdp_state() for layer in model.model.layers]
            assert states[0]._states_to_forward_prefetch == [states[1]]
            assert states[-1]._states_to_forward_prefetch == []
            assert states[-1]._states_to_backward_prefetch == states[-2::-1][:2]
    writer = dcp.HuggingFaceStorageWriter(str(out), save_distributed=True)
    dcp.save(model.state_dict(), storage_writer=writer)
    again = models.build("llama")
    shard_model(again, fsdp_mesh(mesh), Policy(strategy="shard_grad_op"))
    report = load_checkpoint(again, out)
    same = [
        torch.equal(p.to_local(), q.to_local()) for p, q in zip(model.parameters(), again.parameters(), strict=True)
    ]
    return results, report, all(same)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("llama")
    models.build("llama", "cpu").save_pretrained(directory / "hf")
    (directory / "sharded").mkdir()
    return run_ranks(4, train, directory / "hf", directory / "sharded", timeout=120)


@pytest.mark.parametrize("name", POLICIES)
def test_policy_gives_the_gradients_of_the_unsharded_model(trained, name):
    losses, gradients, _ = models.reference("llama", 1, 4)
    # bfloat16 keeps 8 bits: every product is off by up to 2⁻⁹, sums of some dozen of them by about a percent.
    tolerance, close = (2e-2, 2e-3) if name.startswith("bf16") else (1e-5, 1e-6)
    for rank, (results, _, _) in enumerate(trained):
        loss, found, dtypes, _ = results[name]
        assert loss == pytest.approx(losses[0][rank], rel=close)
        assert dtypes == {torch.float32}
        left = {fqn for fqn in gradients if any(fqn.startswith(f"{module}.") for module in POLICIES[name].ignored)}
        assert found.keys() == gradients.keys() - left
        for fqn, gradient in gradients.items():
            if fqn in left:
                continue
            assert (found[fqn] - gradient).norm() < tolerance * gradient.norm(), fqn


def test_output_has_the_dtype_that_was_asked_for(trained):
    results = trained[0][0]
    assert results["bf16"][3] == torch.bfloat16
    assert results["bf16-reduce"][3] == torch.float32


def test_sharded_safetensors_of_torch_are_read(trained):
    for _, report, same in trained:
        assert same
        assert not report.missing
