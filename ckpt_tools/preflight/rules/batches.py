"""CKPT10x to CKPT13x: sizes, batches and lengths of samples, devices of processes, and when a run saves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ckpt_tools.options.preflight import Framework
from ckpt_tools.preflight.rules.option_words import below_limits, frameworks_of
from ckpt_tools.preflight.rules.rule import Stated, Subject, Violation, enabled, error_rule, shown

# CKPT11x: batches, which are products of sizes that stand far apart in a config, and the lengths of samples.

_ACTOR = "actor_rollout_ref.actor"
_TRAIN_BATCH = "data.train_batch_size"
_DYNAMIC = f"{_ACTOR}.use_dynamic_bsz"
_SAMPLES = "actor_rollout_ref.rollout.n"


def next_multiple(number: int, unit: int) -> int:
    """Return the least multiple of `unit` that is at least `number`, and not 0."""
    return max(-(-number // unit), 1) * unit


def nearest_divisor(number: int, of: int) -> int:
    """Return the divisor of `of` that is nearest to `number`; of two the smaller."""
    return min((one for one in range(1, of + 1) if of % one == 0), key=lambda one: (abs(one - number), one))


def largest_divisor(of: int, *, at_most: int) -> int:
    """Return the largest divisor of `of` that is at most `at_most`."""
    return next(one for one in range(min(at_most, of), 0, -1) if of % one == 0)


def _multiple_of(case: Subject, found: Stated | None, unit: int, of: str) -> Iterator[Violation]:
    """Yield that an option is no multiple of `unit`, which is `of` in words."""
    if found is not None and found.count is not None and unit > 0 and found.count % unit:
        fix = case.written(found.key, next_multiple(found.count, unit))
        yield Violation(found.key, f"{found} is not a multiple of {of}", fix)


@error_rule(
    "CKPT110 (verl): rollouts that do not spread evenly over the ranks",
    why="verl requires that the ranks evenly divide prompts × samples, and stops before it loads anything",
    fix="set a data.train_batch_size whose product with rollout.n is divisible by the ranks",
)
def rollouts_spread(case: Subject) -> Iterator[Violation]:
    """Source: verl 0.9.1 `utils/config.py:98-119` (`minimal_bsz`)."""
    batch, ranks = case.whole(_TRAIN_BATCH), case.spec.world_size
    if batch is None or ranks is None or case.is_on(_DYNAMIC):
        return
    unit, strategy = ranks, case.get(f"{_ACTOR}.strategy")
    if strategy is not None and strategy.text == "megatron":
        sizes = [f"{_ACTOR}.megatron.{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "context")]
        model = math.prod(max(case.count(name), 1) for name in sizes)
        if ranks % model:
            key = max(sizes, key=case.count)
            yield Violation(key, f"{ranks} ranks are not a multiple of tp × pp × cp = {model}", f"a divisor of {ranks}")
            return
        unit = ranks // model * max(case.count(f"{_ACTOR}.ppo_micro_batch_size_per_gpu"), 1)
    elif not case.is_fsdp:
        return
    samples = max(case.count(_SAMPLES), 1)
    if batch * samples % unit:
        right = next_multiple(batch, unit // math.gcd(unit, samples))
        what = f"{batch} prompts × {samples} samples = {batch * samples}, which is not divisible by {unit}"
        yield Violation(_TRAIN_BATCH, what, f"{_TRAIN_BATCH}: {right}")


@error_rule(
    "CKPT111 (verl): mini-batches and micro-batches that do not fit together",
    why="verl splits the batch into mini-batches over the ranks, and those into micro-batches: with a remainder,"
    " the run stops at its first update",
    fix="use train_batch_size ≥ ppo_mini_batch_size, and micro-batches that divide a rank's share of a mini-batch",
)
def mini_batches_fit(case: Subject) -> Iterator[Violation]:
    """Source: verl 0.9.1 `workers/config/{actor,critic}.py`, `engine_workers.py:267`, `engine/utils.py:125`."""
    ranks = case.spec.world_size
    for role in (_ACTOR, "critic") if _has_critic(case) else (_ACTOR,):
        mini = case.option(f"{role}.ppo_mini_batch_size")
        if mini is None or mini.count is None or case.is_on(f"{role}.use_dynamic_bsz", _DYNAMIC):
            continue
        batch = case.whole(_TRAIN_BATCH)
        if batch is not None and batch < mini.count:
            yield Violation(_TRAIN_BATCH, f"{batch} prompts, and {mini}", f"{_TRAIN_BATCH}: {mini.count}")
        if ranks is None:
            continue
        yield from _micro_of_all(case, role, mini, ranks)
        if case.is_fsdp and role == _ACTOR:
            yield from _mini_of_a_rank(case, mini, ranks)


def _has_critic(case: Subject) -> bool:
    kind = case.get("algorithm.adv_estimator")
    return case.is_on("critic.enable") or (kind is not None and kind.text == "gae")


def _micro_of_all(case: Subject, role: str, mini: Stated, ranks: int) -> Iterator[Violation]:
    """Check the old option, which counts the samples of all ranks."""
    micro = case.option(f"{role}.ppo_micro_batch_size")
    if micro is None or micro.count is None or micro.count < 1 or mini.count is None:
        return
    cut = max(case.axis("sp"), 1)
    if mini.count % micro.count:
        fix = f"{micro.key}: {largest_divisor(mini.count, at_most=micro.count)}"
        yield Violation(micro.key, f"{micro} does not divide {mini}", fix)
    elif micro.count * cut < ranks:
        remedy = f"{micro.key}: {next_multiple(micro.count, -(-ranks // cut))}, or ppo_micro_batch_size_per_gpu"
        yield Violation(micro.key, f"{micro} is for all {ranks} ranks together, so some would get none", remedy)


def _mini_of_a_rank(case: Subject, mini: Stated, ranks: int) -> Iterator[Violation]:
    samples, data_ranks = max(case.count(_SAMPLES), 1), ranks // max(case.axis("sp"), 1)
    if mini.count is None or mini.count < 1 or data_ranks < 1:
        return
    total = mini.count * samples
    if total % data_ranks:
        right = next_multiple(mini.count, data_ranks // math.gcd(data_ranks, samples))
        what = f"{mini} × {samples} samples = {total}, which is not divisible by {data_ranks} data-parallel ranks"
        yield Violation(mini.key, what, f"{mini.key}: {right}")
        return
    micro = case.option(f"{_ACTOR}.ppo_micro_batch_size_per_gpu")
    share = total // data_ranks
    if micro is not None and micro.count is not None and micro.count > 0 and share % micro.count:
        fix = f"{micro.key}: {largest_divisor(share, at_most=micro.count)}"
        yield Violation(micro.key, f"{micro} does not divide the {share} samples that a rank gets of a mini-batch", fix)


@error_rule(
    "CKPT112 (torchtitan): a global batch that is no multiple of what the ranks take at a time",
    why="torchtitan accumulates gradients over global_batch_size ÷ (local_batch_size × data-parallel ranks) passes, and"
    " asserts that this is a whole number",
    fix="use a multiple of local_batch_size × dp_replicate × dp_shard",
)
def global_batch(case: Subject) -> Iterator[Violation]:
    """Source: torchtitan 0.3.0 `trainer.py:414-424`; 0.2.2 `train.py:202`."""
    found, local = case.option("training.global_batch_size"), case.count("training.local_batch_size", 8)
    ranks = case.axis("dp_replicate") * case.axis("dp_shard")
    if found is not None and (found.count or -1) > 0 and local > 0 and ranks > 0:
        yield from _multiple_of(case, found, local * ranks, f"{local} samples × {ranks} data-parallel ranks")


@error_rule(
    "CKPT113 (openrlhf): a training batch that micro-batches and ranks do not divide",
    why="DeepSpeed accumulates gradients over train_batch_size ÷ (micro_train_batch_size × ranks) passes, and asserts"
    " that this is a whole number of at least 1",
    fix="use a multiple of micro_train_batch_size × data-parallel ranks",
)
def train_batch(case: Subject) -> Iterator[Violation]:
    """Source: OpenRLHF 0.11.2 `utils/deepspeed/deepspeed.py:110-116,455`, DeepSpeed `_batch_assertion`."""
    micro, ranks = case.whole("train.micro_batch_size", "micro_train_batch_size") or 0, _data_ranks(case)
    if case.spec.engine == "deepspeed" and not case.is_on("train.dynamic_batch_enable", "use_dynamic_batch"):
        batch = case.option("train.batch_size", "train_batch_size")
        yield from _multiple_of(case, batch, micro * ranks, f"micro-batches of {micro} on {ranks} data-parallel ranks")


def _data_ranks(case: Subject) -> int:
    """Return the ranks that see different samples; 0 where nobody knows."""
    return (case.spec.world_size or 0) // max(case.axis("sp") * case.axis("tp"), 1)


@error_rule(
    "CKPT114 (openrlhf): fewer batches of rollouts than ranks",
    why="OpenRLHF distributes batches of samples over the actor's ranks, and asserts that each gets one",
    fix="use a larger rollout batch, or smaller micro-batches of it",
)
def rollouts_for_all(case: Subject) -> Iterator[Violation]:
    """Source: OpenRLHF 0.11.2 `cli/train_ppo_ray.py:757-763`."""
    batch, ranks = case.option("rollout.batch_size", "rollout_batch_size"), _data_ranks(case)
    micro = case.whole("rollout.micro_batch_size", "micro_rollout_batch_size")
    if batch is None or batch.count is None or micro is None or micro < 1:
        return
    samples = case.whole("rollout.n_samples_per_prompt", "n_samples_per_prompt") or 1
    batches = samples * batch.count // micro
    if batches < ranks:
        what = f"{batch.count} prompts × {samples} samples are {batches} batches of {micro}, for {ranks} ranks"
        yield Violation(batch.key, what, case.written(batch.key, -(-ranks * micro // samples)))


@error_rule(
    "CKPT115 (trainer, axolotl): groups of generations that do not fill the batch",
    why="GRPO compares the generations of one prompt: TRL and axolotl reject batches with incomplete"
    " groups, and groups of one",
    fix="use a num_generations that divides samples per rank × ranks × gradient_accumulation_steps",
)
def groups_fill_batch(case: Subject) -> Iterator[Violation]:
    """Source: TRL 1.16.0 `trainer/grpo_config.py:1096-1141`, axolotl 0.21.0 `utils/schemas/validation.py:1077-1133`."""
    at = "trl." if case.framework == "axolotl" else ""
    group = case.option(f"{at}num_generations")
    if group is None or group.count is None or (at and getattr(case.get("rl"), "text", "") != "grpo"):
        return
    if group.count < 2:
        yield Violation(group.key, f"{group}: advantages need at least 2", f"{group.key}: 2")
        return
    samples = case.whole("per_device_train_batch_size", "micro_batch_size")
    ranks = case.spec.world_size
    if ranks is None or samples is None or samples < 1:
        return
    passes = case.whole(f"{at}steps_per_generation", "gradient_accumulation_steps") or 1
    asked, step = case.option(f"{at}generation_batch_size"), samples * ranks
    if asked is not None and asked.count is not None:
        unit = math.lcm(step, group.count)
        if asked.count % group.count or (asked.count % step and not at):
            what = f"{asked} is not a multiple of {group.count} generations and of {samples} samples × {ranks} ranks"
            yield Violation(asked.key, what, f"{asked.key}: {next_multiple(asked.count, unit)}")
    elif step * passes % group.count:
        fix = f"gradient_accumulation_steps: {math.lcm(group.count, step) // step}"
        divisor = nearest_divisor(group.count, of=step * passes)
        problem = f"{group} does not divide {samples} samples × {ranks} ranks × {passes} accumulated = {step * passes}"
        yield Violation(group.key, problem, f"{group.key}: {divisor}, or {fix}" if divisor > 1 else fix)


_ARGUMENTS: Mapping[Framework, tuple[tuple[str, int], ...]] = {
    "trainer": (("per_device_train_batch_size", 8), ("gradient_accumulation_steps", 1)),
    "axolotl": (("micro_batch_size", 1), ("gradient_accumulation_steps", 1)),
    "accelerate": (),
    "deepspeed": (),
}
"""Arguments that DeepSpeed's sizes must be equal to, and what they are where the file has none."""
_SECTIONS: Mapping[Framework, str] = {"deepspeed": "", "accelerate": "deepspeed_config.deepspeed_config_file."}
"""Where DeepSpeed's own config lies; `deepspeed` in the others."""
_SIZES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


@error_rule(
    "CKPT116: DeepSpeed's own sizes against those of the trainer",
    why="transformers refuses every value of DeepSpeed's config that is not auto and not that of the arguments, and"
    " DeepSpeed a train_batch_size that is not micro-batch × accumulation × ranks",
    fix="use auto in DeepSpeed's config",
    frameworks=tuple(_ARGUMENTS),
)
def deepspeed_sizes(case: Subject) -> Iterator[Violation]:
    """Source: transformers 5.23.0 `integrations/deepspeed.py:fill_match`, DeepSpeed `_batch_assertion`."""
    if case.spec.engine != "deepspeed":
        return
    at, ranks, sizes = _SECTIONS.get(case.framework, "deepspeed."), _data_ranks(case), []
    arguments = _ARGUMENTS[case.framework]
    for option, (name, default) in zip(_SIZES, arguments or (("", 0),) * 2, strict=True):
        argument = case.get(name) if name else None
        expected = default if argument is None else argument.count
        if name and expected is not None:
            yield from _differs(case, at + option, expected, f"{name} is {expected}")
        sizes.append(case.whole(at + option) or expected or 0)
    found, right = case.get(f"{at}train_batch_size"), math.prod(sizes) * ranks
    if found is not None and right > 0 and found.text != "auto" and found.value != right:
        what = f"{found}, and {sizes[0]} samples × {sizes[1]} accumulated × {ranks} ranks are {right}"
        yield Violation(found.key, what, f"{found.key}: {right}" + (", or auto" if arguments else ""))
    rate = case.get("learning_rate") if arguments else None
    if rate is not None and rate.number is not None:
        yield from _differs(case, f"{at}optimizer.params.lr", rate.number, str(rate))
    for word, other in (("fp16", "bf16"), ("bf16", "fp16")):
        asked, argument = case.get(f"{at}{word}.enabled"), case.get(word) if arguments else None
        # Arguments that say neither have a default, which is another one in TRL.
        is_off = argument.is_off if argument is not None else bool(arguments) and case.is_on(other)
        if asked is not None and asked.is_on and is_off:
            yield Violation(asked.key, f"{asked}, but the arguments have no {word}", f"{asked.key}: auto")


def _differs(case: Subject, option: str, expected: float, other: str) -> Iterator[Violation]:
    found = case.get(option)
    if found is not None and found.text != "auto" and found.value != expected:
        value = f"the text {found.text}" if isinstance(found.value, str) else shown(found.value)
        yield Violation(found.key, f"{found.key} is {value}, but {other}", f"{found.key}: auto")


@error_rule(
    "CKPT117 (torchtitan): a sequence that its parallel ranks cannot cut evenly",
    why="torchtitan stops: sequence parallelism cuts a sample over the TP ranks, context parallelism into two parts per"
    " rank",
    fix="use a multiple of tp × 2 · cp",
)
def sequence_divides(case: Subject) -> Iterator[Violation]:
    """Source: torchtitan 0.3.0 `trainer.py:306-315`; 0.2.2 `models/llama3/infra/parallelize.py`."""
    keeps, ring = case.get("parallelism.enable_sequence_parallel"), max(case.axis("cp"), 1)
    width = 1 if keeps is not None and keeps.is_off else max(case.axis("tp"), 1)
    found = case.option("training.seq_len", "training.max_context_length")
    cuts = width * (2 * ring if ring > 1 else 1)
    yield from _multiple_of(case, found, cuts, f"{cuts} (tp={width}, cp={ring})")


@error_rule(
    "CKPT118 (verl): a budget of tokens below the longest sample",
    why="verl fills batches by tokens, and rejects a sample that is longer than a rank's budget",
    fix="set it to at least max_prompt_length + max_response_length",
)
def tokens_suffice(case: Subject) -> Iterator[Violation]:
    """Source: verl 0.9.1 `utils/seqlen_balancing.py:384`."""
    if not case.is_fsdp:
        return  # the sequence parallelism of other engines is not read
    found = case.option(f"{_ACTOR}.ppo_max_token_len_per_gpu")
    lengths = [case.whole(f"data.max_{part}_length") for part in ("prompt", "response")]
    if found is None or found.count is None or None in lengths or not case.is_on(_DYNAMIC):
        return
    longest, cut = sum(length or 0 for length in lengths), max(case.axis("sp"), 1)
    if found.count * cut < longest:
        what = f"{found}, but a prompt with its response may have {longest} tokens"
        yield Violation(found.key, what, f"{found.key}: {-(-longest // cut)}")


# CKPT10x: sizes that no run has, and numbers on the wrong side of zero.

MAX_RANKS = 1_000_000  # Ranks, of the world or of one axis; the largest clusters have a few hundred thousand devices
MAX_BATCH = 1_000_000  # Samples on one rank at once
MAX_SEQ_LEN = 100_000_000  # Tokens of one sample; the longest contexts that were ever trained have some ten million
MAX_LORA_RANK = 65_536  # Rank of an adapter; weights of language models are narrower


@error_rule(
    "CKPT100: an impossibly large size",
    why="Probably a typing error or the wrong unit: no cluster has so many ranks, and no device fits such a sample",
    fix="set the intended size",
)
def absurd_sizes(case: Subject) -> Iterator[Violation]:
    """Compare sizes with bounds that lie far beyond the largest runs."""
    sizes = [
        (case.key("world_size"), case.spec.world_size, MAX_RANKS, "ranks"),
        *((case.axis_key(axis), size, MAX_RANKS, "ranks") for axis, size in case.spec.axes.items()),
        (case.key("batch_size"), case.spec.batch_size, MAX_BATCH, "samples on one rank"),
        (case.key("seq_len"), case.spec.seq_len, MAX_SEQ_LEN, "tokens in one sample"),
    ]
    adapter = case.spec.adapter
    if adapter is not None:
        sizes.append((case.key("adapter"), adapter.rank, MAX_LORA_RANK, "as the rank of an adapter"))
    for key, size, most, what in sizes:
        if size is not None and size > most:
            yield Violation(key, f"{size} {what}, more than {most}", f"{key}: at most {most}")


@error_rule(
    "CKPT101: a size below its minimum",
    why="The trainer rejects it, divides by it, or trains nothing",
    fix="use a whole number that is large enough, or leave the option out",
    frameworks=frameworks_of("limits.tsv", "CKPT101"),
)
def least_sizes(case: Subject) -> Iterator[Violation]:
    """Look at sizes that one of the trainers' own checks, or a division, would stop at: `limits.tsv`."""
    for found, least in below_limits(case, "CKPT101"):
        what = f"{found.key} must be at least {least}, got {shown(found.value)}"
        yield Violation(found.key, what, f"{found.key}: {least}")


@error_rule(
    "CKPT102: a learning rate below zero",
    why="torch's optimizers reject it: Invalid learning rate",
    fix="set a learning rate above zero",
    frameworks=frameworks_of("limits.tsv", "CKPT102"),
)
def learning_rate(case: Subject) -> Iterator[Violation]:
    """Source: `torch/optim/adamw.py:AdamW.__init__`."""
    for found, _ in below_limits(case, "CKPT102"):
        yield Violation(found.key, f"a learning rate of {shown(found.value)}", f"{found.key}: above zero")


# CKPT12x: devices of the processes that a launcher starts, and of inference engines beside training.

_TENSOR: Mapping[Framework, tuple[str, ...]] = {
    "verl": ("actor_rollout_ref.rollout.tensor_model_parallel_size",),
    "openrlhf": ("vllm.tensor_parallel_size", "vllm_tensor_parallel_size"),
}
"""Ranks over which one inference engine cuts its tensors."""


@error_rule(
    "CKPT120 (accelerate): devices that the processes of a machine do not have",
    why="Only the devices in gpu_ids are visible: a process without one fails with an invalid device ordinal",
    fix="list one id per process of a machine, or gpu_ids: all",
)
def device_ids(case: Subject) -> Iterator[Violation]:
    """Source: accelerate 1.15.0 `utils/launch.py:264-277`, `commands/launch.py:_validate_launch_command`."""
    found, processes = case.option("gpu_ids"), case.count("num_processes", 0)
    if found is None or found.text.lower() in ("all", "") or case.is_on("use_cpu"):
        return
    ids, machines = [one.strip() for one in found.text.split(",") if one.strip()], max(case.count("num_machines"), 1)
    kind = case.get("distributed_type")
    if len(set(ids)) < len(ids):
        right = ",".join(map(str, range(len(ids))))
        yield Violation(found.key, f"{found} names a device twice", f"{found.key}: '{right}'")
    elif len(ids) < processes // machines:
        what = f"{processes // machines} processes per machine, but {len(ids)} devices ({found})"
        yield Violation(found.key, what, f"{found.key}: all, or num_processes: {len(ids) * machines}")
    elif len(ids) < 2 and machines == 1 and kind is not None and kind.text.startswith("MULTI_"):
        yield Violation(found.key, f"{kind} with one device ({found})", f"{found.key}: all")


@error_rule(
    "CKPT121 (verl, openrlhf): inference engines that do not fill the devices of training",
    why="Engines that share the actor's devices must use all of them in equal parts: verl and OpenRLHF assert it",
    fix="make engines × tensor parallel size = ranks of the actor",
)
def engines_fill(case: Subject) -> Iterator[Violation]:
    """Source: verl 0.9.1 `workers/engine_workers.py:655-660`, OpenRLHF 0.11.2 `cli/train_ppo_ray.py:56-64`."""
    ranks, size = case.spec.world_size, case.option(*_TENSOR[case.framework])
    if ranks is None:
        return
    if case.framework == "verl":
        at = "actor_rollout_ref.rollout."
        if size is None or size.count is None or size.count < 1 or case.count(f"{at}nnodes", 0) > 0:
            return
        engine = size.count * case.count(f"{at}data_parallel_size") * case.count(f"{at}pipeline_model_parallel_size")
        if engine > 0 and ranks % engine:
            what = f"{ranks} ranks are not a multiple of an engine's {engine} ranks"
            yield Violation(size.key, what, f"{size.key}: a divisor of {ranks}")
        return
    engines = case.option("vllm.num_engines", "vllm_num_engines")
    if not case.is_on("train.colocate_all", "colocate_all_models") or case.is_on("train.async_enable", "async_train"):
        return
    width = 1 if size is None else size.count
    if engines is None or engines.count is None or engines.count < 1 or width is None or width < 1:
        return
    if engines.count * width != ranks:
        fix = case.written(engines.key, ranks // width) if ranks % width == 0 else f"engines × their ranks = {ranks}"
        yield Violation(engines.key, f"{engines.count} engines of {width} ranks, but the actor has {ranks}", fix)


@error_rule(
    "CKPT122 (verl, openrlhf): an inference engine whose ranks do not divide the attention heads",
    why="vLLM and SGLang cut attention by heads, and reject a tensor parallel size that does not divide them",
    fix="use a divisor of the heads",
)
def engine_heads(case: Subject) -> Iterator[Violation]:
    """Source: vLLM `config/model.py:verify_with_parallel_config`."""
    size, heads, ranks = case.option(*_TENSOR[case.framework]), case.facts.num_heads, case.spec.world_size
    if size is None or size.count is None or size.count < 2 or heads is None or heads % size.count == 0:
        return
    common = [one for one in range(1, size.count) if heads % one == 0 and (ranks or one) % one == 0]
    yield Violation(size.key, f"{size} does not divide {heads} attention heads", case.written(size.key, common[-1]))


# CKPT13x: when a run saves and evaluates.

_PARTS = 1_000_000  # ratios are compared as whole numbers, as Trainer does


def _strategy(case: Subject, default: str, *names: str) -> tuple[str, Stated | None]:
    """Return a strategy, which may be a bare `no` in YAML."""
    found = case.option(*names)
    return default if found is None else "no" if found.value is False else found.text, found


@error_rule(
    "CKPT130 (trainer): the best model is asked for, and not every save follows an evaluation",
    why="Trainer can only reload a checkpoint that was evaluated: it rejects other schedules at the start",
    fix="use the same strategy for both, with save_steps a multiple of eval_steps",
)
def best_is_evaluated(case: Subject) -> Iterator[Violation]:
    """Source: transformers 5.23.0 `training_args.py:1575-1583,1749-1774`."""
    wanted = enabled(case.get("load_best_model_at_end"))
    save, save_by = _strategy(case, "steps", "save_strategy")
    evaluate, eval_by = _strategy(case, "no", "eval_strategy", "evaluation_strategy")
    if wanted is None or save == "best":
        return
    if evaluate != save:
        if evaluate == "no" or save == "no":
            key = "save_strategy" if save == "no" else "eval_strategy" if eval_by is None else eval_by.key
            fix = f"{key}: {evaluate if save == 'no' else save}"
        else:
            key = "save_strategy" if save_by is None else save_by.key
            fix = f"{key}: {evaluate}"
        yield Violation(key, f"{wanted}, but saves are by {shown(save)} and evaluations by {shown(evaluate)}", fix)
    elif save == "steps":
        yield from _multiples(case)


def _multiples(case: Subject) -> Iterator[Violation]:
    saves, found = case.option("save_steps"), case.option("eval_steps")
    every = 500.0 if saves is None else saves.number
    step = None if found is None else found.number
    if found is None or step == 0:  # then it evaluates whenever it logs
        logged = case.option("logging_steps")
        step = None if logged is None else logged.number  # by default every 500 steps, and in TRL every 10
    if every is None or step is None or step <= 0 or every <= 0:
        return
    if (every < 1) == (step < 1) and round(every * _PARTS) % round(step * _PARTS) == 0:
        return
    key = "save_steps" if saves is None else saves.key
    right = step if (every < 1) != (step < 1) else max(every // step, 1) * step
    what = f"it saves every {every:g} steps and evaluates every {step:g}: every save must follow an evaluation"
    yield Violation(key, what, f"{key}: {right:g}")
