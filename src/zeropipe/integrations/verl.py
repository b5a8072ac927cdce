"""verl's training engine on a pipeline: importing this registers the strategy "zeropipe"."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from zeropipe.core.schedule import Schedule
from zeropipe.engine.checkpoint.load import load_checkpoint
from zeropipe.engine.checkpoint.save import save_checkpoint
from zeropipe.engine.engine import Engine
from zeropipe.engine.mesh.parallelize import parallelize
from zeropipe.engine.stages.build import hf_stages
from zeropipe.errors import ConfigError
from zeropipe.integrations.schedule_choice import choose_schedule
from zeropipe.pipelining.plan import resolve_schedule
from zeropipe.schedules.registry import find

try:
    from verl.utils import tensordict_utils
    from verl.utils.device import get_device_name
    from verl.utils.torch_dtypes import PrecisionType
    from verl.workers.config import FSDPEngineConfig
    from verl.workers.config.engine import EngineConfig
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.engine.utils import detach_tree, postprocess_batch_func, prepare_micro_batches
except ImportError as error:
    raise ConfigError(f"zeropipe.integrations.verl needs verl (0.9): {error}") from error

DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")
_UNSUPPORTED = (
    "param_offload", "optimizer_offload", "offload_policy", "forward_only", "full_determinism", "pad_to_length",
    "use_fused_kernels",
)  # fmt: skip


@dataclass
class ZeropipeEngineConfig(FSDPEngineConfig):
    """As FSDPEngineConfig, with a schedule and a mesh."""

    strategy: str = "zeropipe"
    schedule: str = "1f1b"  # a name, or a CSV or JSON file
    mesh: dict[str, int] = field(default_factory=dict)  # sizes of pp, dp_replicate or dp_shard, tp
    layers: list[int] | None = None  # of each stage; evenly by default
    options: dict[str, Any] = field(default_factory=dict)  # of the Engine

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        for name in _UNSUPPORTED:
            if getattr(self, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)}: the engine of a pipeline has no such option; leave it out"
                )
        if self.ulysses_sequence_parallel_size != 1:
            raise ConfigError(
                f"ulysses_sequence_parallel_size={self.ulysses_sequence_parallel_size}: a sequence is on one process; "
                "leave it out"
            )
        if getattr(self.qat, "enable", False):
            raise ConfigError("qat.enable=True: weights are not quantized on a pipeline; leave it out")
        for name, size in self.mesh.items():
            if name not in DIMENSIONS or type(size) is not int or size < 1:
                raise ConfigError(f"mesh has {name}={size!r}: must have positive sizes of {', '.join(DIMENSIONS)}")
        if self.sizes["dp_replicate"] > 1 and self.sizes["dp_shard"] > 1:
            raise ConfigError("mesh has dp_replicate and dp_shard: verl divides data over one of them; use one")

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of all dimensions."""
        return {name: self.mesh.get(name, 1) for name in DIMENSIONS}

    def build_schedule(self) -> Schedule:
        """The schedule; one by name runs any number of microbatches."""
        choice, ranks = choose_schedule(self.schedule), self.sizes["pp"]
        if choice.schedule is not None:
            return choice.schedule
        stages = ranks * find(self.schedule).stages_per_rank[0]
        return resolve_schedule(self.schedule, ranks, stages, 2 * stages)


@EngineRegistry.register(model_type="language_model", backend="zeropipe", device=["cuda", "cpu"])
class ZeropipeEngine(FSDPEngineWithLMHead):
    """verl's engine for language models, run by an Engine of zeropipe (`pipeline`).

    Inputs, log-probabilities, entropy, optimizers and schedulers are those of verl's FSDP engine.
    """

    pipeline: Engine

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if model_config.lora_rank > 0:
            raise ConfigError(f"lora_rank={model_config.lora_rank}: adapters are not supported under verl; set it to 0")
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    # set-up

    def _init_device_mesh(self) -> None:
        sizes = self.engine_config.sizes
        mesh = init_device_mesh(get_device_name(), tuple(sizes.values()), mesh_dim_names=DIMENSIONS)
        self._data = next((name for name in ("dp_replicate", "dp_shard") if sizes[name] > 1), "dp_shard")
        self._full_mesh = mesh
        self.device_mesh = mesh[tuple(name for name in DIMENSIONS if sizes[name] > 1 or name == "pp")]
        self.ulysses_device_mesh = self.ulysses_parallel_group = None
        self.ulysses_sequence_parallel_size, self.use_ulysses_sp = 1, False

    def initialize(self) -> None:
        """Build the stages of this rank, their Engine, the optimizer and its scheduler."""
        config, device = self.engine_config, _current_device()
        schedule = config.build_schedule()
        stages = hf_stages(
            self.model_config.local_path,
            schedule,
            self.device_mesh["pp"].get_local_rank(),
            layers=config.layers,
            dtype=PrecisionType.to_dtype(config.model_dtype),
            device=device,
        )
        parallelize(stages, self.device_mesh)
        options = {"ac": "full" if self.model_config.enable_gradient_checkpointing else "none"} | config.options
        self.pipeline = Engine(schedule, stages, mesh=self.device_mesh, device=device, **options)
        self.module = nn.ModuleDict({str(number): stage for number, stage in stages.items()})
        self._has_last = any(stage.is_last for stage in stages.values())
        self.optimizer = self._build_optimizer(self.module)
        self.lr_scheduler = self._build_lr_scheduler(self.optimizer)

    # where data comes from and results go

    def get_data_parallel_rank(self) -> int:
        return self._full_mesh[self._data].get_local_rank()

    def get_data_parallel_size(self) -> int:
        return self._full_mesh[self._data].size()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._full_mesh[self._data].get_group()

    def is_mp_src_rank_with_outputs(self) -> bool:
        return self._has_last and self._full_mesh["tp"].get_local_rank() == 0

    # steps

    def forward_backward_batch(
        self, data: Any, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> Any:
        """Run the microbatches of a batch; ranks without the last stage get no outputs."""
        keeps_outputs = forward_only or tensordict_utils.get_non_tensor_data(data, "return_model_output", False)
        group = self.get_data_parallel_group()
        num_tokens = data["loss_mask"].sum().to(_current_device())
        dist.all_reduce(num_tokens, group=group)
        facts = {"sp_size": 1, "batch_num_tokens": num_tokens.item(), "dp_size": self.get_data_parallel_size()}
        tensordict_utils.assign_non_tensor(data, **facts)
        parts, indices = prepare_micro_batches(data=data, dp_group=group, same_micro_num_in_dp=True)
        step = _Step(self, [part.to(_current_device()) for part in parts], loss_function, keeps_outputs)
        with self._autocast():
            if forward_only:
                self.pipeline.forward(step.microbatches, post=step.finish)
            else:
                self.pipeline.train_step(step.microbatches, step)
        return postprocess_batch_func(output_lst=step.outputs(), indices=indices, data=data)

    def _autocast(self) -> AbstractContextManager[Any]:
        name = (self.engine_config.mixed_precision or {}).get("param_dtype", "bf16")
        dtype = PrecisionType.to_dtype(name)
        return nullcontext() if dtype is torch.float32 else torch.autocast(get_device_name(), dtype)

    def optimizer_step(self) -> float:
        """Clip by the norm over the full model, and update unless it is not finite."""
        norm = self.pipeline.clip_grad_norm(self.optimizer_config.clip_grad)
        if norm < float("inf"):
            self.optimizer.step()
        else:
            print(f"WARN: grad_norm is not finite: {norm}")
            self.optimizer.zero_grad()
        return norm

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Nothing to do: nothing is offloaded."""

    # weights and checkpoints

    def get_per_tensor_param(self, **kwargs: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """The full tensors under their Hugging Face names; all ranks iterate."""
        return self.pipeline.named_weights(published=True), None

    def get_per_tensor_param_shard(self, **kwargs: Any) -> Any:
        raise ConfigError("stages hold different tensors, so shards cannot be sent rank by rank; use full weights")

    get_per_tensor_param_delta_shard = get_per_tensor_param_shard

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Save weights, optimizer and scheduler for any layout; as many folders are kept as the caller deletes none."""
        if hdfs_path is not None:
            raise ConfigError(f"hdfs_path={hdfs_path}: checkpoints are written to local_path only; leave it out")
        extra = {"scheduler": self.lr_scheduler.state_dict()}
        save_checkpoint(Path(local_path), self.pipeline, self.optimizer, step=global_step, extra=extra)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False, **kwargs: Any
    ) -> None:
        """Load what `save_checkpoint` wrote; nothing is deleted."""
        loaded = load_checkpoint(Path(local_path), self.pipeline, self.optimizer)
        self.lr_scheduler.load_state_dict(loaded.extra["scheduler"])


class _Step:
    """The microbatches of a step for the Engine, and a loss that calls verl's on each."""

    def __init__(
        self,
        engine: ZeropipeEngine,
        parts: Sequence[Any],
        loss_function: Callable[..., Any] | None,
        keeps_outputs: bool,
    ) -> None:
        self._engine, self._parts, self._loss_function = engine, parts, loss_function
        self._keeps_outputs = keeps_outputs
        prepared = [engine.prepare_model_inputs(micro_batch=part) for part in parts]
        self._arguments = [arguments for _, arguments in prepared]
        self._outputs: dict[int, dict[str, Any]] = {}
        self.microbatches = [
            _microbatch(inputs, part, index) for index, ((inputs, _), part) in enumerate(zip(prepared, parts))
        ]

    def count(self, microbatch: Mapping[str, Any]) -> int:
        """All microbatches weigh the same: verl's losses are shares of the batch's."""
        return 1

    def __call__(self, output: Any, microbatch: Mapping[str, Any]) -> tuple[Tensor, int]:
        """The loss of a microbatch: verl sums them and averages over dp, the Engine takes the mean over all."""
        return self.finish(output, microbatch) * len(self._parts), 1

    def finish(self, output: Any, microbatch: Mapping[str, Any]) -> Tensor:
        """Compute the loss of a microbatch, and keep what verl gets of it."""
        index, engine = microbatch["index"], self._engine
        part, logits = self._parts[index], output[0] if isinstance(output, tuple) else output
        found = engine.prepare_model_outputs(
            SimpleNamespace(logits=logits), self._arguments[index], part, self._loss_function
        )
        loss, metrics = torch.ones(()), {}
        if self._loss_function is not None:
            loss, metrics = self._loss_function(
                model_output=found, data=part, dp_group=engine.get_data_parallel_group()
            )
        kept = {"model_output": detach_tree(found)} if self._keeps_outputs else {}
        self._outputs[index] = {**kept, "loss": loss.detach().item(), "metrics": metrics}
        return loss

    def outputs(self) -> list[dict[str, Any]]:
        """In the order of microbatches."""
        return [self._outputs[index] for index in sorted(self._outputs)]


def _microbatch(inputs: Mapping[str, Any], part: Any, index: int) -> dict[str, Any]:
    names = {"input_ids", "attention_mask", "position_ids"}
    for name in inputs.keys() - names:
        raise ConfigError(f"a batch has {name}, which stages do not take: must be {', '.join(sorted(names))}")
    microbatch = {name: value for name, value in inputs.items() if value is not None}
    if "attention_mask" not in microbatch:  # packed
        microbatch["cu_seqlens"] = part["input_ids"].offsets().to(torch.int32)
    return {**microbatch, "index": index}


def _current_device() -> torch.device:
    name = get_device_name()
    return torch.device(name, torch.cuda.current_device()) if name == "cuda" else torch.device(name)
